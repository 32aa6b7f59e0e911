"""How long does a training step of each family take? ``python benchmarks/accuracy.py --time``."""

import math
import time
from dataclasses import replace
from typing import Any

import corpora
import torch
from corpora import Packed
from families import BY_DEPTH, DROPS, FAMILIES, LINEAR, ROUTINGS, SEARCH, USUAL, recipes_of
from stacked import Stack, Steps, as_means, as_vectors, batches, gather

STEPS = 15
IMPLEMENTATIONS = ("auto", "reference")  # "auto" trains one head after the other, see stacked.py


def measure(task: str, splits: dict[str, Packed], options: Any) -> None:
    """Print the milliseconds of a step of three heads of each family, and those of gathering its inputs."""
    for label in options.heads or FAMILIES:
        for kind in IMPLEMENTATIONS if label in ROUTINGS else ("",):
            times = time_of(task, splits["train"], label, kind)
            print(f"{task} {label} {kind}: {told(times)}", flush=True)


def fastest(task: str, splits: dict[str, Packed]) -> str:
    """Return the implementation of routing that trains the routing family fastest on this device."""
    times = {kind: time_of(task, splits["train"], "routing", kind) for kind in IMPLEMENTATIONS}
    for kind, found in times.items():
        print(f"routing, implementation={kind}: {told(found)}", flush=True)
    return min(times, key=lambda kind: math.inf if isinstance(times[kind], str) else times[kind][0])


def told(times: tuple[float, float] | str) -> str:
    return times if isinstance(times, str) else f"{times[0]:.2f} ms a step, {times[1]:.2f} ms to gather"


def time_of(task: str, data: Packed, label: str, kind: str) -> tuple[float, float] | str:
    """Return the milliseconds of a step and of gathering its inputs, or what went wrong.

    The shape is the second of the family, or its only one.
    """
    name, shapes = FAMILIES[label]
    shape = min(1, len(shapes) - 1)
    if label == LINEAR:
        data = as_means({"train": data})["train"]
    elif label not in BY_DEPTH:
        data = as_vectors(data)
    depth, d_emb = data.hidden.shape[1:]
    options = {"d_emb": d_emb, "depth": depth, "n_cls": corpora.TASKS[task]} | shapes[shape][0]
    options |= {"implementation": kind} if kind else {}
    training = replace(SEARCH[task], drop=0.0 if label == LINEAR else DROPS[task][USUAL])
    if data.hidden.is_cuda:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        stack = Stack(name, options, recipes_of(label, shape)[:3], str(data.hidden.device))
        return milliseconds(stack, data, training)
    except Exception as error:  # one failed family must not hide the others
        return f"{type(error).__name__}: {error}"


def milliseconds(stack: Stack, data: Packed, training: Any) -> tuple[float, float]:
    """Return the mean times of a step and of gathering its inputs, after a first step for each batch."""
    steps, found = Steps(stack, 1000), []
    generator = torch.Generator(stack.device).manual_seed(0)
    some = [
        which for which, _ in zip(batches(data, training.batch_size, [generator]), range(STEPS), strict=False)
    ]
    inputs = [(*gather(data, which, training), data.label[which]) for which in some]
    for repeat in range(2):
        for run in (lambda k: steps(*inputs[k]), lambda k: gather(data, some[k], training)):
            started = now(stack.device)
            for k in range(len(some)):
                run(k)
            if repeat:
                found.append(1000 * (now(stack.device) - started) / len(some))
    return found[0], found[1]


def now(device: str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
