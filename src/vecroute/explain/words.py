"""Compute what each word of a text, or patch of an image, adds to scores of a head on a frozen encoder."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vecroute.compose.contribution import check_complete, completeness_error
from vecroute.compose.held import Held
from vecroute.compose.probe import precision
from vecroute.encoders.text import TextEncoder, Tokenized, length_batches, most_padding
from vecroute.encoders.vision import VisionEncoder
from vecroute.explain.through import HeldEncoder, patch_filter, positions_at_once, word_table
from vecroute.io.images import Picture


class Run(NamedTuple):
    """Rows, such as chunks of texts, that go through the encoder together."""

    call: Callable[[], Sequence[Tensor]]  # returns the hidden states [r, n, d] at each depth that is read
    keep: Tensor  # [r, n] True at the positions that go to the head
    tokens: tuple[Tensor, ...] = ()  # token ids of texts, and which of them are no padding, [r, n] each


class Reading(NamedTuple):
    """A batch of samples to explain. The kept positions of its runs are the samples' positions, in order.

    Often there is one run, whose rows are the samples. Its ``keep`` is then the ``mask`` itself, which saves
    selecting and padding.
    """

    runs: list[Run]
    source: Tensor  # the weight that produces the embeddings
    name: str  # name of the encoder
    mask: Tensor  # [b, n_pos] True at the positions of each sample, which come first


class Split(NamedTuple):
    """An exact split of scores: scores = base + sum over positions and depths of values."""

    values: list[Tensor]  # one for each run, [r, n, depth or 1, k]
    base: Tensor  # [b, k]
    scores: Tensor  # [b, k]
    all_scores: Tensor  # [b, n_cls]
    error: Tensor  # [b, k] completeness error
    dtype: torch.dtype  # in which the parts were computed


class HeldHead:
    """A head whose gates are held fixed at their values for some hidden states. It is then an affine map.

    Args:
        head: hidden states [b, n_pos, depth, d_emb] -> scores [b, n_cls].
        hidden, mask: its inputs; mask is [b, n_pos].
        outputs: [b, k] indices of the classes to explain.
        margin: True to explain the score of the first of two classes minus the second; then k = 1.

    Attributes:
        hidden: the hidden states that the head received.
        all_scores: [b, n_cls].
        scores: [b, k].
        gradients: the gradient of each of the k scores, [b, n_pos, depth, d_emb].
    """

    def __init__(self, head: nn.Module, hidden: Tensor, mask: Tensor, outputs: Tensor, margin: bool = False):
        weight = next(head.parameters())
        self.outputs, self.margin, self.shape = outputs.to(weight.device), margin, hidden.shape
        with torch.inference_mode(False), torch.enable_grad():
            given = hidden.to(weight.device, weight.dtype, copy=True)  # [b, n_pos, depth, d]
            self.held = Held(head, given, mask.to(weight.device, copy=True))
            self.all_scores = self.held.x_out[..., 0]  # [b, n_cls]
            chosen = self._chosen(self.held.x_out)  # [b, k]
            (x_inp,) = self.held.inputs  # [b, i, d]
            self.gradients = [
                torch.autograd.grad(chosen[:, k].sum(), x_inp, retain_graph=k + 1 < chosen.shape[1])[
                    0
                ].reshape(self.shape)
                for k in range(chosen.shape[1])
            ]
        self.all_scores, self.scores = self.all_scores.detach(), chosen.detach()
        self.hidden = x_inp.detach().reshape(self.shape)  # [b, n_pos, depth, d]

    def base(self, hidden: Tensor | None = None) -> Tensor:
        """Return the scores [b, k] of the affine map at other hidden states; None for zeros."""
        with torch.no_grad():
            if hidden is None:
                return self._chosen(self.held.at_zero())  # [b, k]
            return self._chosen(self.held.at(hidden.to(self.hidden).flatten(-3, -2)))  # [b, k]

    def _chosen(self, x_out: Tensor) -> Tensor:
        """Select the explained scores [b, k] from x_out [b, n_cls, 1]."""
        chosen = x_out[..., 0].gather(1, self.outputs)  # [b, k]
        return chosen[:, :1] - chosen[:, 1:] if self.margin else chosen


def split_words(
    reading: Reading, head: nn.Module, outputs: Tensor, *, by_depth: bool = False, margin: bool = False
) -> Split:
    """Split scores into the contributions of the words or patches that the encoder read.

    Args:
        reading: the batch to explain.
        head: the head on the hidden states.
        outputs, margin: see ``HeldHead``.
        by_depth: True to split values by the depth of the hidden states, with a backward pass for each depth.

    Raises:
        ValueError: the parts do not add up to the scores, or the encoder or the head cannot be split.
    """
    split = unchecked_split(reading, head, outputs, by_depth=by_depth, margin=margin)
    check_complete(reading.name, split.error, split.dtype)
    return split


def unchecked_split(
    reading: Reading, head: nn.Module, outputs: Tensor, *, by_depth: bool = False, margin: bool = False
) -> Split:
    """Do the same as ``split_words``, without waiting for the device to check that the parts add up.

    If there are several runs, each goes through the encoder twice, so that memory holds the gates of only one
    run at a time.
    """
    runs, mask, alone = reading.runs, reading.mask, len(reading.runs) == 1
    helds = [_hold(reading, run) for run in runs] if alone else []
    kept = []
    for k, run in enumerate(runs):
        with torch.no_grad():
            kept.append(_kept(helds[k].states if alone else run.call(), run.keep, mask))  # [m, depth, d]
    hidden = _padded(kept, mask)  # [b, n_pos, depth, d]
    held_head = HeldHead(head, hidden, mask, outputs, margin)
    gradients = held_head.gradients  # k tensors [b, n_pos, depth, d]
    if runs[0].keep is not mask:
        gradients = [g[mask.to(g.device)] for g in gradients]  # k tensors [all m, depth, d]
    at, values, zeros = 0, [], []
    for k, run in enumerate(runs):
        held = helds[k] if alone else _hold(reading, run)
        own = slice(at, at + len(kept[k]))
        at = own.stop
        values.append(_pulled(held, run.keep, [g[own] for g in gradients], by_depth))  # [r, n, depth, k]
        zeros.append(_kept(held.at_zero(), run.keep, mask))  # [m, depth, d]
    base = held_head.base(_padded(zeros, mask))  # [b, k]
    many = len(base) > 1  # several samples: there is one run, and each of its rows is a sample
    rows = values[0].flatten(1, 2) if many else torch.cat([v.flatten(0, 2) for v in values])[None]
    error = completeness_error(rows.mT.to(base), base, held_head.scores)  # [b, k]
    return Split(values, base, held_head.scores, held_head.all_scores, error, precision(hidden))


def _hold(reading: Reading, run: Run) -> HeldEncoder:
    return HeldEncoder(run.call, reading.source, reading.name)


def _kept(states: Sequence[Tensor], keep: Tensor, mask: Tensor) -> Tensor:
    """Return the hidden states [m, depth, d] of the positions that go to the head.

    If the rows are the samples, return all hidden states [b, n_pos, depth, d].
    """
    stacked = torch.stack(list(states), 2)  # [r, n, depth, d]
    return stacked if keep is mask else stacked[keep]


def _padded(parts: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Pad the hidden states [m, depth, d] of consecutive samples to [b, n_pos, depth, d], if need be."""
    if parts[0].dim() == 4:
        return parts[0]
    flat = torch.cat(list(parts))  # [all m, depth, d]
    hidden = flat.new_zeros(*mask.shape, *flat.shape[1:])  # [b, n_pos, depth, d]
    hidden[mask] = flat
    return hidden


def _pulled(held: HeldEncoder, keep: Tensor, gradients: Sequence[Tensor], by_depth: bool) -> Tensor:
    """Return what each position of a run adds, [r, n, depth or 1, k].

    Gradients are [m, depth, d], or [r, n, depth, d] if the rows of the run are the samples.
    """
    states = held.states  # [r, n, d] each
    ways = [[level] for level in range(len(states))] if by_depth else [list(range(len(states)))]
    found, left = [], len(gradients) * len(ways)
    for gradient in gradients:
        gradient = gradient.to(keep.device)
        if gradient.dim() == 4:
            full = gradient.where(keep[..., None, None], 0.0)  # [r, n, depth, d]
        else:
            full = gradient.new_zeros(*keep.shape, *gradient.shape[1:])  # [r, n, depth, d]
            full[keep] = gradient
        given, columns = full.unbind(2), []
        for way in ways:
            left -= 1
            chosen = [states[level] for level in way], [given[level] for level in way]
            columns.append(held.pull(*chosen, keep=left > 0))  # [r, n]
        found.append(torch.stack(columns, -1))  # [r, n, depth]
    return torch.stack(found, -1)  # [r, n, depth, k]


def text_readings(encoder: TextEncoder, texts: Sequence[Tokenized]) -> Iterator[tuple[list[int], Reading]]:
    """Yield texts in batches of similar length, long texts one by one, with the indices of the texts."""
    limit = positions_at_once(encoder.model, encoder.device)
    source = word_table(encoder.model, encoder.name)
    short = [k for k, text in enumerate(texts) if len(text.keep) == 1]
    lengths = [len(texts[k].keep[0]) for k in short]
    groups = length_batches(lengths, limit, most_padding(limit, encoder.device))
    for which in [*([short[row] for row in rows] for rows in groups)]:
        yield which, _reading(encoder, [texts[k] for k in which], [list(range(len(which)))], source)
    for k, text in enumerate(texts):
        if len(text.keep) > 1:
            rows = list(length_batches([len(row) for row in text.keep], limit, in_order=True))
            yield [k], _reading(encoder, [text], rows, source)


def _reading(encoder: TextEncoder, texts: Sequence[Tokenized], rows: Sequence[list[int]], source: Tensor):
    chunks = [chunk for text in texts for chunk in text.chunks]
    keep = [row for text in texts for row in text.keep]
    padded = [encoder.padded([chunks[r] for r in group], [keep[r] for r in group]) for group in rows]
    runs = [text_run(encoder, *tensors) for tensors in padded]
    counts = [text.n_pos for text in texts]
    if len(runs) == 1 and counts == list(map(len, keep)):  # each text is a row, and keeps all its positions
        return Reading(runs, source, encoder.name, runs[0].keep)
    lengths = torch.tensor(counts)[:, None]  # [b, 1]
    n_pos = max(int(lengths.max()), 1)  # heads refuse an input without positions
    mask = torch.arange(n_pos) < lengths  # [b, n_pos]
    return Reading(runs, source, encoder.name, mask.to(encoder.device))


def text_run(encoder: TextEncoder, ids: Tensor, attended: Tensor, keep: Tensor) -> Run:
    """Return chunks of texts that go through the encoder together, from the result of its ``padded``."""

    def call() -> list[Tensor]:
        found = encoder.model(input_ids=ids, attention_mask=attended.long(), output_hidden_states=True)
        return [found.hidden_states[depth] for depth in encoder.depths]

    return Run(call, keep, (ids, attended))


def image_readings(
    encoder: VisionEncoder, pictures: Sequence[Picture]
) -> Iterator[tuple[list[int], Reading]]:
    """Yield images in batches, each with the indices of its images."""
    size = max(1, positions_at_once(encoder.model, encoder.device) // encoder.n_pos)
    source = patch_filter(encoder.model, encoder.name)
    for start in range(0, len(pictures), size):
        which = list(range(start, min(start + size, len(pictures))))
        pixels = encoder.pixels([pictures[k] for k in which])  # [b, channels, height, width]
        pixels = pixels.to(encoder.device, encoder.model.dtype)
        n = encoder.grid[0] * encoder.grid[1] + encoder.n_special
        kept = torch.arange(n, device=encoder.device) >= n - encoder.n_pos  # [n] without special positions
        keep = kept.expand(len(which), n)  # [b, n]

        def call(pixels: Tensor = pixels) -> list[Tensor]:
            found = encoder.model(pixel_values=pixels, output_hidden_states=True)
            return [found.hidden_states[depth] for depth in encoder.depths]

        mask = keep if n == encoder.n_pos else keep.new_ones(len(which), encoder.n_pos)  # [b, n_pos]
        yield which, Reading([Run(call, keep)], source, encoder.name, mask)
