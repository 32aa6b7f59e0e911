"""Explanations of small batches of texts as CUDA graphs: the host starts all kernels of a batch by one call.

The 700 kernels of a small batch keep a GPU busy for a few milliseconds, and the host for ten times as long.
A CUDA graph repeats the same kernels on the same memory. So the inputs of a batch are in buffers of fixed
size: texts are padded to one of a few lengths, and batches to one of a few sizes. Each of these shapes has
its own graph.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from vecroute.compose.contribution import check_complete
from vecroute.encoders.text import TextEncoder
from vecroute.explain.through import positions_at_once
from vecroute.explain.words import Reading, Split, split_words, text_run, unchecked_split
from vecroute.training.graphs import SHORTEST, padded

logger = logging.getLogger(__name__)

DEVICES = ("cuda",)  # tests add "cpu", where batches are padded too, but run without a graph
MOST_POSITIONS = 16_384  # of a batch with its padding; larger ones keep the GPU busy longer than the host
MOST_GRAPHS = 64  # of one head
EAGER = 2  # batches of a shape before its graph is captured, which takes as long as several batches
WARM_UPS = 2  # batches before a capture, in which kernels are compiled and libraries allocate memory
NOT_CAPTURED = "explanations cannot be CUDA graphs (%s): they are computed eagerly"


def split_reading(
    encoder: TextEncoder, head: nn.Module, reading: Reading, outputs: Tensor, **options: bool
) -> Split:
    """Do the same as ``split_words`` for texts, with a graph if there is one for batches of this shape."""
    device = reading.mask.device
    here = device.type in DEVICES and next(head.parameters()).device == device
    rows_are_texts = len(reading.runs) == 1 and reading.runs[0].keep is reading.mask
    # Autocast keeps its copies of weights only while it is on, so no graph may read them.
    if here and rows_are_texts and not torch.is_autocast_enabled(device.type):
        split = graphs_of(head).split(encoder, head, reading, outputs, options)
        if split is not None:
            check_complete(reading.name, split.error, split.dtype)
            return split
    return split_words(reading, head, outputs, **options)


class Captured(NamedTuple):
    """The explanations of batches of one shape."""

    buffers: list[Tensor]  # ids, attended and used positions [b, n], outputs [b, k]
    replay: Callable[[], Split]  # explains the texts in the buffers; the next replay overwrites the result


class Graphs:
    """The graphs of one head, for all shapes of batches. Threads take turns."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.state: tuple = ()
        self.captured: dict[tuple, Captured] = {}  # by shape and options
        self.seen: Counter[tuple] = Counter()
        self.failed = False  # a capture has failed
        self.memory: tuple[torch.cuda.Stream, Any] | None = None  # a stream and a pool for all captures

    def split(
        self,
        encoder: TextEncoder,
        head: nn.Module,
        reading: Reading,
        outputs: Tensor,
        options: dict[str, bool],
    ) -> Split | None:
        """Return a split on the CPU, whose errors are not checked yet, or None if there is no graph."""
        b, n = reading.mask.shape
        rows = padded(b) if b > SHORTEST else 1 << (b - 1).bit_length()
        columns = min(padded(n), encoder.max_length)
        most = min(MOST_POSITIONS, positions_at_once(encoder.model, reading.mask.device))
        if rows * columns > most:
            return None
        key = rows, columns, outputs.shape[1], *sorted(options.items())
        with self.turn, torch.inference_mode(False):  # buffers made in that mode could not be written later
            if self.failed:
                return None
            self.forget_others(state_of(encoder, head))
            self.seen[key] += 1
            if key not in self.captured and (self.seen[key] <= EAGER or len(self.captured) >= MOST_GRAPHS):
                return None
            inputs = inputs_of(encoder, reading, outputs, rows, columns)
            if key not in self.captured:
                with torch.cuda.device_of(inputs[0]):
                    replay = self.capture(encoder, head, reading, inputs, options)
                if replay is None:
                    self.failed = True
                    self.captured.clear()  # gives the memory of earlier graphs back
                    return None
                self.captured[key] = Captured(inputs, replay)
            captured = self.captured[key]
            torch._foreach_copy_(captured.buffers, inputs)
            return on_host(captured.replay(), b, n)

    def forget_others(self, state: tuple) -> None:
        """Forget all graphs if they belong to another state of the weights or the settings."""
        if state != self.state:
            self.state = state
            self.captured.clear()
            self.seen.clear()
            self.memory = None  # PyTorch refuses a pool whose graphs have all gone

    def capture(
        self,
        encoder: TextEncoder,
        head: nn.Module,
        reading: Reading,
        buffers: Sequence[Tensor],
        options: dict[str, bool],
    ) -> Callable[[], Split] | None:
        """Return a function that explains the texts in the buffers, None if that cannot be a graph."""
        ids, attended, mask, outputs = buffers
        reading = reading._replace(runs=[text_run(encoder, ids, attended, mask)], mask=mask)
        run = partial(unchecked_split, reading, head, outputs, **options)
        if ids.device.type != "cuda":
            return run
        # The default stream of captures belongs to the device of the first capture in this process.
        self.memory = self.memory or (torch.cuda.Stream(ids.device), torch.cuda.graph_pool_handle())
        side, pool = self.memory
        current, graph = torch.cuda.current_stream(ids.device), torch.cuda.CUDAGraph()
        try:
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run()
            current.wait_stream(side)
            # The outer context restores the stream after a failed capture. The mode is thread_local, because
            # another thread may use the device meanwhile.
            with torch.cuda.stream(current), torch.cuda.graph(graph, pool, side, "thread_local"):
                split = run()
        except RuntimeError as error:  # the model needs values on the host, or memory runs out
            logger.warning(NOT_CAPTURED, error)
            return None

        def replay() -> Split:
            graph.replay()
            return split

        return replay


def inputs_of(
    encoder: TextEncoder, reading: Reading, outputs: Tensor, rows: int, columns: int
) -> list[Tensor]:
    """Return what the buffers hold: ids, attended and used positions [rows, columns], outputs [rows, k].

    Further rows are copies of the last text, because a text without positions may give NaN.
    """
    b, n = reading.mask.shape
    row = torch.arange(rows, device=reading.mask.device).clamp(max=b - 1)  # [rows]
    ids, attended, mask = (t[row] for t in (*reading.runs[0].tokens, reading.mask))  # [rows, n] each
    fill = encoder.tokenizer.pad_token_id or 0
    wide = [pad(t, (0, columns - n), value=v) for t, v in ((ids, fill), (attended, False), (mask, False))]
    return [*wide, outputs.to(row.device)[row]]


def on_host(split: Split, b: int, n: int) -> Split:
    """Copy the split of the first b texts, with n positions each, to the CPU."""
    values = [split.values[0][:b, :n].cpu()]  # [b, n, depth or 1, k]
    base, scores, all_scores, error = (
        t[:b].cpu() for t in (split.base, split.scores, split.all_scores, split.error)
    )
    return Split(values, base, scores, all_scores, error, split.dtype)


def state_of(encoder: TextEncoder, head: nn.Module) -> tuple:
    """Return all on which a graph depends beside the contents of its buffers and of the weights."""
    state: list[object] = [
        *encoder.depths,
        str(head),  # its options, such as the number of iterations
        # get_float32_matmul_precision() would raise if somebody has set this name to "tf32".
        torch.backends.cuda.matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    ]
    for module in chain(encoder.model.modules(), head.modules()):
        tensors = chain(module._parameters.values(), module._buffers.values())
        state += [tensor.data_ptr() for tensor in tensors if tensor is not None]
        state += [module.training, *module._forward_pre_hooks, *module._forward_hooks]
    return tuple(state)


_graphs: WeakKeyDictionary[nn.Module, Graphs] = WeakKeyDictionary()
_new_head = threading.Lock()


def graphs_of(head: nn.Module) -> Graphs:
    """Return the graphs of a head. They go when the head does."""
    with _new_head:
        if head not in _graphs:
            _graphs[head] = Graphs()
        return _graphs[head]
