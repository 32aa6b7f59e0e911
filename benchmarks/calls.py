"""Measure one forward + backward: host time, whole time, captured time, kernels, Python calls."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from types import CodeType, FrameType

import common
import torch
from torch import Tensor, nn

import vecroute as vr

WARM_UP = 30  # calls before any timing: Python 3.12 speeds up code after about twenty runs
MOST_CALLS = 50  # calls per figure at most, unless its rounds need more
ROUNDS = 3
PACKAGE = str(Path(vr.__file__).parent)
# Python 3.12 inlines comprehensions, so counts of different versions agree only without them.
NOT_FUNCTIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@dataclass
class Call:
    """Forward + backward of a model, as in a training step: every gradient is None before.

    Args:
        given: further arguments of the model: masks or cu_seqlens.
        grad: gradient of the output, drawn in the first call.
    """

    model: nn.Module
    x_inp: Tensor
    given: dict[str, Tensor]
    mode: str
    device: str
    grad: Tensor | None = None

    def forward(self) -> Tensor:
        self.x_inp.grad = None
        self.model.zero_grad(set_to_none=True)
        with common.autocast(self.mode, self.device):
            return self.model(self.x_inp, **self.given)

    def backward(self, x_out: Tensor) -> None:
        if self.grad is None:
            self.grad = torch.randn(x_out.shape, generator=seeded(1)).to(x_out)
        x_out.backward(self.grad)

    def __call__(self) -> None:
        self.backward(self.forward())
        self.x_inp.grad = None  # the next call may have another input


def seeded(seed: int, device: str = "cpu") -> torch.Generator:
    """Return a new generator, because a failed capture can leave PyTorch's CUDA generator unusable."""
    return torch.Generator(device).manual_seed(seed)


# Inputs


def lengths_of(batch: int, n: int, shortest: float) -> Tensor:
    """Return the number of vectors of each sample, from ``shortest * n`` to n."""
    return torch.randint(max(1, round(shortest * n)), n + 1, (batch,), generator=seeded(0))


def prefix_mask(lengths: Tensor, n: int, device: str) -> Tensor:
    return (torch.arange(n) < lengths[:, None]).to(device)  # [batch, n]


def random_input(shape: tuple[int, ...], mode: str, device: str) -> Tensor:
    x = torch.randn(shape, generator=seeded(0, device), device=device)
    return x.to(common.element_type(mode))


# Time, in milliseconds


def synchronize(device: str) -> None:
    if common.is_cuda(device):
        torch.cuda.synchronize()


def host_times(runs: Sequence[common.Run], device: str) -> list[float]:
    """Return the time until each call returns. The GPU is idle before; the clock does not wait for it."""
    times = []
    for run in runs:
        synchronize(device)
        start = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - start))
    synchronize(device)
    return times


def whole_times(runs: Sequence[common.Run], device: str) -> list[float]:
    """Return the time from the end of one call to the end of the next, with calls queued back to back."""
    synchronize(device)
    marks = [common.now(device)]
    for run in runs:
        run()
        marks.append(common.now(device))
    return [common.between(a, b) for a, b in pairwise(marks)]


def n_calls(run: common.Run, device: str, seconds: float, least: int) -> int:
    """Warm up, and return the number of calls for a figure: ``least`` or more, in about ``seconds``."""
    for _ in range(WARM_UP):
        run()
    once = median(whole_times([run] * 3, device))
    return max(least, min(MOST_CALLS, int(1000 * seconds / once)))


def host_columns(times: list[float]) -> dict[str, float]:
    return {"host_ms": median(times), "host_mean_ms": mean(times)}


def figures(runs: Sequence[common.Run], device: str, seconds: float, least: int) -> list[dict[str, float]]:
    """Return host and whole time of each run, over all rounds. On the CPU they are the same.

    In a round, every run has a block of ``least`` calls or more. So a slow phase of the machine affects all
    runs alike.
    """
    blocks = [[run] * max(least, n_calls(run, device, seconds, least) // ROUNDS) for run in runs]
    whole: list[list[float]] = [[] for _ in runs]
    host: list[list[float]] = [[] for _ in runs] if common.is_cuda(device) else whole
    for _ in range(ROUNDS):
        for k, block in enumerate(blocks):
            whole[k] += whole_times(block, device)
            if host is not whole:
                host[k] += host_times(block, device)
    return [{**host_columns(h), "whole_ms": median(w)} for h, w in zip(host, whole, strict=True)]


def captured_ms(call: Call, seconds: float, least: int) -> float | None:
    """Return the whole time of the call as a CUDA graph; None, with a printed reason, if capture fails."""
    stream = torch.cuda.current_stream()
    try:
        replay = common.captured(call)
        runs = [replay] * n_calls(replay, call.device, seconds, least)
        return median(whole_times(runs, call.device))
    except RuntimeError as error:
        print(f"cannot be captured: {first_line(error)}", flush=True)
        return None
    finally:
        torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
        with suppress(RuntimeError):  # clears the error that a failed capture may leave behind
            torch.cuda.synchronize()


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# Kernels


def count_kernels(run: common.Run) -> dict[str, int]:
    """Count the kernels of one call on the GPU, and its copies and fills (memcpy, memset).

    Call it after all timing: CUPTI, which the profiler uses, can slow down later launches.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    names = [
        event.name
        for event in profiler.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
    ]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return {"kernels": len(names) - copies, "copies": copies}


# Python calls


class Trace:
    """For ``sys.setprofile``: counts the Python calls that enter functions of vecroute.

    ``jumps`` counts the calls among them whose nearest caller in vecroute is in another file.
    """

    def __init__(self) -> None:
        self.calls = self.jumps = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not is_ours(frame.f_code):
            return
        self.calls += 1
        caller = frame.f_back
        while caller is not None and not is_ours(caller.f_code):
            caller = caller.f_back
        if caller is not None:
            self.jumps += caller.f_code.co_filename != frame.f_code.co_filename


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE) and code.co_name not in NOT_FUNCTIONS


def traced(call: Call) -> Trace:
    """Return the Python calls of one forward + backward, after one that sets things up."""
    call()
    trace = Trace()
    sys.setprofile(trace)
    try:
        x_out = call.forward()
    finally:
        sys.setprofile(None)
    # A profile function belongs to a thread, and on a GPU the backward pass runs in its own thread.
    x_out.register_hook(lambda grad: sys.setprofile(trace))
    last = torch.ones(1, device=call.device, requires_grad=True) * 1
    last.register_hook(lambda grad: sys.setprofile(None))
    try:
        call.backward(x_out)
    finally:
        last.backward()
    return trace
