"""Fill disks and kill processes while a classifier is fitted, saved and used, and check what remains.

    python scripts/faults.py --limits 40 --kills 50

Each round fills a cache, trains with checkpoints, saves into a new folder, saves over it, predicts a table,
and predicts a corpus of several files. A round either limits the size of every file that is written (the
system refuses to write more, as on a full disk), or kills the process (SIGKILL) at a random moment of one of
these phases: half of the kills after a random time, half before a random operation on files, since saving
takes only milliseconds. After each round, every folder of a classifier must load, and be the old or the new
one, the output of ``predict`` must be the beginning of the right one, and each file of the corpus must be
right or missing. Then the same work without faults must end with the weights and the outputs of a run that
was never disturbed. Prints a row of counts for each kind of fault, and how many kills fell into each phase.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import vecroute as vr  # noqa: E402
from tests.helpers.texts import LABELS, TEXTS  # noqa: E402
from tests.helpers.tiny_models import save_tiny  # noqa: E402
from vecroute.classifier.parts import encoder_for  # noqa: E402
from vecroute.cli import main as main_of_vecroute  # noqa: E402
from vecroute.encoders import cache, features  # noqa: E402
from vecroute.training import loop  # noqa: E402

PHASES = ("cache", "fit", "save", "save over", "predict", "corpus")
OPERATIONS = ("open", "os.", "shutil.", "ctypes.call")  # beginnings of the names of events, see sys.audit
OUTPUT, ANSWERS = "predictions.jsonl", "answers"
N_SHARDS = 6
OPTIONS = {"max_epochs": 2, "batch_size": 32, "mixup": 0.2, "device": "cpu", "verbose": False}


class Kill(NamedTuple):
    """The moment of a kill: some seconds after the beginning of a phase, or before its nth file operation."""

    phase: str
    after: float | None = None
    operation: int | None = None


class Right(NamedTuple):
    """The results of a run that was never disturbed."""

    weights: dict[str, torch.Tensor]
    output: bytes
    answers: dict[str, bytes]  # the files of the corpus


def work(encoder: str, place: Path, mark: Callable[[str], Any]) -> None:
    """Do everything that writes, and mark the beginning of each phase."""
    loop.CHECKPOINT_SECONDS = 0.0
    cache.SEGMENT_BYTES = 4_000  # many small segments
    prepare = features.Features.prepare

    def marked(self: Any, *rest: Any, **options: Any) -> int:
        mark("cache")
        left = prepare(self, *rest, **options)
        mark("fit")
        return left

    features.Features.prepare = marked  # type: ignore[method-assign]
    classifier = vr.RoutingClassifier(
        encoder, cache=place / "cache", checkpoint=place / "checkpoint", **OPTIONS
    ).fit(TEXTS, LABELS)
    mark("save")
    if not (place / "model").exists():
        classifier.save_pretrained(place / "model", about={"time": "first"})
    mark("save over")
    classifier.save_pretrained(place / "model", overwrite=True, about={"time": "second"})
    table = place.parent / "table.txt"
    mark("predict")
    with open(place / OUTPUT, "w") as file, redirect_stdout(file):
        vecroute("predict", place / "model", table, "--rows", "4")
    mark("corpus")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        vecroute("predict", place / "model", place.parent / "corpus", "--out", place / ANSWERS)


def vecroute(*arguments: Any) -> None:
    """Run a command in this process."""
    sys.argv = ["vecroute", *map(str, arguments)]
    try:
        main_of_vecroute()
    except SystemExit as end:
        if end.code:
            raise


class Marks:
    """Tell the parent process where phases begin, and die before an operation on files, if asked to."""

    def __init__(self, writer: int, kill: Kill | None):
        self.writer, self.kill = writer, kill
        self.phase, self.operations = "", 0
        sys.addaudithook(self.hook)

    def __call__(self, phase: str) -> None:
        os.write(self.writer, f"{phase}:{self.operations}\n".encode())  # operations of the phase before
        self.phase, self.operations = phase, 0

    def hook(self, event: str, _: Any) -> None:
        if self.phase and event.startswith(OPERATIONS):
            self.operations += 1
            if self.kill and self.kill.phase == self.phase and self.operations == self.kill.operation:
                os.kill(os.getpid(), signal.SIGKILL)


def in_a_fork(
    encoder: str, place: Path, limit: int | None = None, kill: Kill | None = None
) -> tuple[str, dict[str, float], list[int]]:
    """Do the work in a new process. Return how it ended, when phases began, and their operations on files."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            marks = Marks(writer, kill)
            work(encoder, place, marks)
            marks("end")
        except OSError:
            os._exit(2)
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(writer)
    began, operations = {}, []
    with open(reader) as lines:
        for line in lines:
            phase, _, n = line.strip().partition(":")
            began[phase] = time.monotonic()
            operations.append(int(n))
            if kill and kill.phase == phase and kill.after is not None:
                time.sleep(kill.after)
                os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    told = {0: "ended", 2: "told that it cannot write", -signal.SIGKILL: "killed"}
    return told.get(status, f"failed: {status}"), began, operations[1:]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone()
        for name, p in vr.RoutingClassifier.from_pretrained(folder).head_.named_parameters()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def look(place: Path, expected: dict[str, torch.Tensor]) -> str:
    """Return the state of the folder: nothing, the first or the second model. Raise for anything else."""
    if not (place / "model").exists():
        return "no folder"
    found = vr.RoutingClassifier.from_pretrained(place / "model")  # raises if it is damaged
    if not same(weights(place / "model"), expected):
        raise RuntimeError(f"{place} holds other weights")
    return f"the {found.about_['time']} folder"


def answers(place: Path) -> dict[str, bytes]:
    """Return the files of the corpus that were written."""
    return {path.name: path.read_bytes() for path in (place / ANSWERS).glob("[!._]*")}


def check_output(place: Path, right: Right) -> None:
    """Raise unless the outputs of ``predict`` are missing, right, or the beginning of the right one."""
    output = place / OUTPUT
    if output.exists() and not right.output.startswith(output.read_bytes()):
        raise RuntimeError(f"{output} is not the beginning of the right output")
    for name, data in answers(place).items():
        if data != right.answers[name]:
            raise RuntimeError(f"{name} of the corpus in {place} is not the right file")


def one_round(
    name: str, encoder: str, place: Path, limit: int | None, kill: Kill | None, right: Right
) -> Counter:
    """Run with one fault, look at what is left, and run again without."""
    counts: Counter = Counter()
    place.mkdir()
    ended, began, _ = in_a_fork(encoder, place, limit, kill)
    counts[ended] += 1
    if ended.startswith("failed"):
        raise RuntimeError(f"{name} {limit or kill}: {ended}")
    if ended == "killed":
        counts[f"killed in {list(began)[-1]}"] += 1
    counts[f"left: {look(place, right.weights)}"] += 1
    check_output(place, right)
    again, _, _ = in_a_fork(encoder, place)
    if again != "ended" or look(place, right.weights) != "the second folder":
        raise RuntimeError(f"{name} {limit or kill}: the same work again {again}")
    if (place / OUTPUT).read_bytes() != right.output or answers(place) != right.answers:
        raise RuntimeError(f"{name} {limit or kill}: the same work again predicts something else")
    if (place / "checkpoint").exists():
        raise RuntimeError(f"{name} {limit or kill}: the checkpoint is still there")
    counts["the same work again ends with the same weights and output"] += 1
    shutil.rmtree(place)
    return counts


def kills_of(n: int, began: dict[str, float], operations: list[int], seed: int) -> list[Kill]:
    """Return random moments, the same number in each phase, alternately by time and by operations."""
    moments, times = random.Random(seed), list(began.values())
    kills = []
    for k in range(n):
        index = k % len(PHASES)
        if k // len(PHASES) % 2:
            after = moments.uniform(0, times[index + 1] - times[index])
            kills.append(Kill(PHASES[index], after=after))
        else:
            operation = moments.randint(1, max(operations[index], 1))
            kills.append(Kill(PHASES[index], operation=operation))
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limits", type=int, default=40, help="sizes of files that are swept")
    parser.add_argument("--kills", type=int, default=50, help="random moments")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        encoder = save_tiny(top / "encoder")
        (top / "table.txt").write_text("\n".join(TEXTS * 4) + "\n")
        (top / "corpus").mkdir()
        for k in range(N_SHARDS):
            lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[k::N_SHARDS]]
            (top / "corpus" / f"{k}.jsonl").write_text("".join(lines))
        torch.set_num_threads(1)
        encoder_for(vr.RoutingClassifier(encoder), torch.device("cpu"))  # once for all forks
        undisturbed = top / "undisturbed"
        undisturbed.mkdir()
        ended, began, operations = in_a_fork(encoder, undisturbed)
        assert ended == "ended", ended
        output = (undisturbed / OUTPUT).read_bytes()
        right = Right(weights(undisturbed / "model"), output, answers(undisturbed))
        largest = 400_000  # bytes; the largest file, a checkpoint, is smaller
        limits = [round(largest ** (k / max(asked.limits - 1, 1))) for k in range(asked.limits)]
        faults: dict[str, list[tuple[int | None, Kill | None]]] = {
            "limits": [(limit, None) for limit in limits],
            "kills": [(None, kill) for kill in kills_of(asked.kills, began, operations, asked.seed)],
        }
        for name, some in faults.items():
            counts: Counter = Counter()
            for k, (limit, kill) in enumerate(some):
                counts += one_round(name, encoder, top / f"{name}-{k}", limit, kill, right)
            print(
                json.dumps({"faults": name, "rounds": len(some), **dict(sorted(counts.items()))}), flush=True
            )


if __name__ == "__main__":
    main()
