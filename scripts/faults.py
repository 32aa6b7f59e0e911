"""Fill disks and kill processes while a classifier is fitted and saved, and check the files that remain.

    python scripts/faults.py --limits 40 --kills 50

Each round runs ``fit`` with a cache and a checkpoint, then ``save_pretrained`` twice: into a new folder, then
over it. A round either limits the size of every file that is written (the system refuses to write more, as
on a full disk), or kills the process (SIGKILL) at a random moment. After each round, every folder of a
classifier that is there must load, and be the old or the new one; then the same work without faults must end
with the weights of a run that was never disturbed. Prints a row of counts for each kind of fault.
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
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import vecroute as vr  # noqa: E402
from tests.helpers.texts import LABELS, TEXTS  # noqa: E402
from tests.helpers.tiny_models import save_tiny  # noqa: E402
from vecroute.encoders import cache  # noqa: E402
from vecroute.training import loop  # noqa: E402

OPTIONS = {"max_epochs": 2, "batch_size": 32, "mixup": 0.2, "device": "cpu", "verbose": False}


def work(encoder: str, place: Path) -> None:
    """Write hidden states, checkpoints, a folder, and the same folder again."""
    loop.CHECKPOINT_SECONDS = 0.0
    cache.SEGMENT_BYTES = 4_000  # many small segments
    classifier = vr.RoutingClassifier(
        encoder, cache=place / "cache", checkpoint=place / "checkpoint", **OPTIONS
    ).fit(TEXTS, LABELS)
    if not (place / "model").exists():
        classifier.save_pretrained(place / "model", about={"time": "first"})
    classifier.save_pretrained(place / "model", overwrite=True, about={"time": "second"})


def in_a_fork(encoder: str, place: Path, limit: int | None, kill_after: float | None) -> str:
    """Do the work in a new process, and return how it ended."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            work(encoder, place)
        except OSError:
            os._exit(2)
        except BaseException:
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: "ended", 2: "told that it cannot write", -signal.SIGKILL: "killed"}.get(
        status, f"failed: {status}"
    )


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


def rounds(
    name: str, faults: list[tuple[int | None, float | None]], encoder: str, top: Path, expected: dict
) -> Counter:
    counts: Counter = Counter()
    for k, (limit, kill_after) in enumerate(faults):
        place = top / f"{name}-{k}"
        place.mkdir()
        ended = in_a_fork(encoder, place, limit, kill_after)
        counts[ended] += 1
        if ended.startswith("failed"):
            raise RuntimeError(f"{name} {limit or kill_after}: {ended}")
        counts[f"left: {look(place, expected)}"] += 1
        again = in_a_fork(encoder, place, None, None)
        if again != "ended" or look(place, expected) != "the second folder":
            raise RuntimeError(f"{name} {limit or kill_after}: the same work again {again}")
        if (place / "checkpoint").exists():
            raise RuntimeError(f"{name} {limit or kill_after}: the checkpoint is still there")
        counts["the same work again ends with the same weights"] += 1
        shutil.rmtree(place)
    return counts


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
        torch.set_num_threads(1)
        vr.RoutingClassifier(encoder)._load_encoder(torch.device("cpu"))  # once for all forks
        undisturbed = top / "undisturbed"
        undisturbed.mkdir()
        start = time.monotonic()
        assert in_a_fork(encoder, undisturbed, None, None) == "ended"
        seconds = time.monotonic() - start
        expected = weights(undisturbed / "model")
        largest = 400_000  # bytes; a checkpoint, the largest file, has less
        limits = [(round(largest ** (k / max(asked.limits - 1, 1))), None) for k in range(asked.limits)]
        random_moments = random.Random(asked.seed)
        kills = [(None, random_moments.uniform(0, seconds)) for _ in range(asked.kills)]
        for name, faults in (("limits", limits), ("kills", kills)):
            counts = rounds(name, faults, encoder, top, expected)
            print(
                json.dumps({"faults": name, "rounds": len(faults), **dict(sorted(counts.items()))}),
                flush=True,
            )


if __name__ == "__main__":
    main()
