"""Frozen text Transformers: they map texts to the hidden states of every token at every depth."""

import copy
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vecroute.encoders.finding import find, first_line
from vecroute.encoders.identity import identify, states_key, tokenizer_sha256
from vecroute.encoders.loading import commit, default_dtype, load_model, load_tokenizer, pick_device

UNLIMITED = 1_000_000  # a tokenizer without a limit reports a huge number


class Tokens(NamedTuple):
    """The characters, chunk and token id of each routed position of a text."""

    start: list[int]  # first character in the text; 0 for special tokens
    end: list[int]  # one past the last character; 0 for special tokens
    special: list[bool]  # True if the tokenizer added the token
    chunk: list[int]  # the chunk of the text in which it was encoded
    ids: list[int]  # ids in the vocabulary


class Chunk(NamedTuple):
    """A chunk of a text, with the names that a tokenizer gives to its values for every position."""

    ids: list[int]  # token ids
    special_tokens_mask: list[int]  # 1 at special tokens
    offsets: list[tuple[int, int]]  # first character in the text and one past the last


@lru_cache(1024)
def every(n: int) -> tuple[bool, ...]:
    """Return True for every position of a chunk of length n. Texts share these tuples."""
    return (True,) * n


@lru_cache(1024)
def every_of(*lengths: int) -> tuple[tuple[bool, ...], ...]:
    """Return ``every`` of each chunk. Texts of one chunk share these tuples too."""
    return tuple(map(every, lengths))


class Tokenized(NamedTuple):
    """A text ready for the encoder.

    Values for every position are read from the tokenizer when they are asked for: predictions need token ids
    only, and many objects keep the garbage collector busy.
    """

    text: str
    encodings: Sequence[Any]  # the tokenizer's encoding of each chunk, or a ``Chunk``
    keep: Sequence[Sequence[bool]]  # True at the positions of each chunk that are routed

    @property
    def chunks(self) -> list[list[int]]:
        """The token ids of each chunk, including special tokens."""
        return [encoding.ids for encoding in self.encodings]

    @property
    def special(self) -> list[list[int]]:
        """For each chunk, 1 at special tokens."""
        return [encoding.special_tokens_mask for encoding in self.encodings]

    @property
    def spans(self) -> list[list[tuple[int, int]]]:
        """For each chunk, the first character of each token in the text and one past the last."""
        return [encoding.offsets for encoding in self.encodings]

    @property
    def n_pos(self) -> int:
        """The number of routed positions."""
        return sum(map(sum, self.keep))

    def tokens(self) -> Tokens:
        """Return the origin of each routed position, in order."""
        rows = [
            (*((0, 0) if special else strip_span(self.text, *span)), bool(special), chunk, token)
            for chunk, columns in enumerate(
                zip(self.keep, self.special, self.spans, self.chunks, strict=True)
            )
            for keep, special, span, token in zip(*columns, strict=True)
            if keep
        ]
        return Tokens(*map(list, zip(*rows, strict=True))) if rows else Tokens([], [], [], [], [])


class Batch(NamedTuple):
    """Hidden states of some texts, padded to the longest of them."""

    which: list[int]  # indices of the texts
    hidden: Tensor  # [b, n_pos, depth, d_emb]
    mask: Tensor  # [b, n_pos], False at padding and at positions left out


class TextEncoder:
    """A frozen Hugging Face encoder that returns all its hidden states.

    Texts longer than the limit of the encoder are split into chunks, and the hidden states of the chunks are
    concatenated at every depth. With a stride, chunks overlap. A token in several chunks is used once, from
    the chunk in which it has more context.

    Args:
        model: "minilm", a name on the Hugging Face hub, a folder, or a loaded model (frozen in place).
        tokenizer: a loaded tokenizer, None for the tokenizer of the model.
        depths: the hidden states to return: 0 for the embeddings, negative from the end, None for all.
        max_length: positions per chunk, including special tokens, None for the limit of the encoder.
        stride: number of tokens that neighbouring chunks share.
        special_tokens: True to route the special tokens of each chunk too, as in the paper.
        revision: branch, tag or commit on the hub.
        device: None for the GPU if there is one, or for the device of a loaded model.
        dtype: None for bfloat16 on GPUs (float16 on those without it) and float32 on the CPU.

    Raises:
        ValueError, TypeError: the encoder is missing or incomplete, or an argument is out of range.
    """

    model: Any
    filled = 128  # positions per batch where batches have a fixed shape; small, since texts have many lengths

    def __init__(
        self,
        model: Any = "minilm",
        *,
        tokenizer: Any = None,
        depths: Sequence[int] | None = None,
        max_length: int | None = None,
        stride: int = 0,
        special_tokens: bool = True,
        revision: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.name, given = str(model), tokenizer
        if isinstance(model, nn.Module):
            self.name = str(getattr(model, "name_or_path", "") or type(model).__name__)
            folder = None if tokenizer else find(self.name, revision)
            self.model = model
            device, dtype = device or self.model.device, dtype or self.model.dtype
        else:
            folder = find(self.name, revision)
            self.model = load_model(self.name, folder)
        if folder is not None and tokenizer is None:
            tokenizer = load_tokenizer(self.name, folder)
        if not getattr(tokenizer, "is_fast", False):
            raise TypeError(f"tokenizer of {self.name} must be a fast one, which knows character offsets")
        self.tokenizer = tokenizer
        self.revision = commit(self.model, folder, revision)
        objects = given is not None or isinstance(model, nn.Module)
        self.identity = identify(
            self.model, self.model.config, None if objects else folder, tokenizer_sha256(tokenizer)
        )
        self.weights_sha256 = self.identity.weights
        self.device = pick_device(device)
        self.dtype = dtype or default_dtype(self.device)
        self.model = self.model.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)
        self.stride, self.special_tokens = stride, special_tokens
        self.max_length = self._check_length(max_length)
        self.backend = self._own_backend()
        try:
            probe = self._states(torch.tensor([self.tokenizer("a")["input_ids"]]))
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"encoder {self.name!r} does not take a text: {first_line(error)}") from error
        if len({state.shape for state in probe}) > 1:
            raise ValueError(f"hidden states of {self.name} must all have one shape")
        self.depths = check_depths(depths, len(probe))
        self.depth, self.d_emb = len(self.depths), probe[0].shape[-1]

    def _check_length(self, max_length: int | None) -> int:
        limit = position_limit(self.model, self.tokenizer)
        max_length = max_length or limit
        n_special = self.tokenizer.num_special_tokens_to_add(pair=False)
        if not n_special < max_length <= limit:
            raise ValueError(
                f"max_length must be more than the {n_special} special tokens and at most the {limit} "
                f"positions that {self.name} takes, got {max_length}"
            )
        self._content = max_length - n_special
        if not 0 <= self.stride < self._content:
            raise ValueError(f"stride must be from 0 to {self._content - 1}, got {self.stride}")
        return max_length

    def _own_backend(self) -> Any:
        """Return a copy of the tokenizer's backend, with the settings of this encoder.

        What transformers adds to the backend takes longer, and other threads wait meanwhile. The tokenizer's
        own backend has the settings of its last use, which may be in another thread.
        """
        backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        backend.no_padding()
        # Chunks are in the order of the text, even if the tokenizer itself drops the start of long texts.
        backend.enable_truncation(self.max_length, stride=self.stride, direction="right")
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return backend

    def __repr__(self) -> str:
        return f"TextEncoder({self.name!r}, depth={self.depth}, d_emb={self.d_emb})"

    def __deepcopy__(self, memo) -> "TextEncoder":
        return self  # frozen, so it can be shared

    @property
    def key(self) -> str:
        """A key that changes with all that affects hidden states: encoder, options, dtype, versions."""
        options = [self.depths, self.max_length, self.stride, self.special_tokens]
        batches = [] if self.device.type == "cpu" else ["batches of similar length"]
        return states_key(self.identity, *options, self.dtype, self.device.type, *batches)

    def tokenize(self, texts: Sequence[str]) -> list[Tokenized]:
        """Split every text into chunks of token ids, with the origin of each routed position.

        Raises:
            TypeError: texts is one string, or a text is not a string.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a list of texts, got one string: put it in a list")
        for k, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"texts must be a list of texts, row {k} is {text!r} ({type(text).__name__})")
        if not texts:
            return []
        encoded = self.backend.encode_batch(list(texts))
        pairs = zip(texts, encoded, strict=True)
        return [self._tokenized(text, (one, *one.overflowing)) for text, one in pairs]

    def _tokenized(self, text: str, encodings: Sequence[Any]) -> Tokenized:
        if self.special_tokens and not (self.stride and len(encodings) > 1):
            return Tokenized(text, encodings, every_of(*map(len, encodings)))
        special = [encoding.special_tokens_mask for encoding in encodings]
        keep = [[self.special_tokens or not s for s in row] for row in special]
        if self.stride and len(encodings) > 1:
            drop_overlaps(keep, special, self._content - self.stride)
        return Tokenized(text, encodings, keep)

    def batches(self, texts: Sequence[Tokenized], batch_positions: int | None = None) -> Iterator[Batch]:
        """Encode texts in batches of similar length, long texts one by one. Every text comes exactly once.

        Args:
            texts: the result of ``tokenize``.
            batch_positions: greatest number of positions per batch, including padding.
        """
        limit = batch_positions or (65_536 if self.device.type == "cuda" else 4_096)
        short = [k for k, text in enumerate(texts) if len(text.keep) == 1]
        lengths = [len(texts[k].keep[0]) for k in short]
        for rows in length_batches(lengths, limit, most_padding(limit, self.device)):
            index = [short[row] for row in rows]
            yield Batch(
                index, *self._run([texts[k].chunks[0] for k in index], [texts[k].keep[0] for k in index])
            )
        for k, text in enumerate(texts):
            if len(text.keep) > 1:
                hidden = self._join(text, limit)[None]  # [1, n_pos, depth, d_emb]
                yield Batch([k], hidden, torch.ones(hidden.shape[:2], dtype=torch.bool, device=self.device))

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the hidden states [n_pos, depth, d_emb] of each text, without padding."""
        tokenized = self.tokenize(texts)
        found: list[Tensor] = [torch.empty(0)] * len(tokenized)
        for batch in self.batches(tokenized):
            for row, k in enumerate(batch.which):
                found[k] = batch.hidden[row][batch.mask[row]]  # [n_pos, depth, d_emb]
        return found

    def _join(self, text: Tokenized, limit: int) -> Tensor:
        """Return the hidden states of all chunks of a long text, concatenated, [n_pos, depth, d_emb]."""
        chunks = text.chunks
        joined = torch.empty(text.n_pos, self.depth, self.d_emb, dtype=self.dtype, device=self.device)
        filled = 0
        for rows in length_batches([len(chunk) for chunk in chunks], limit, in_order=True):
            hidden, mask = self._run([chunks[r] for r in rows], [text.keep[r] for r in rows])
            kept = hidden[mask]  # [n, depth, d_emb]
            joined[filled : filled + len(kept)] = kept
            filled += len(kept)
        return joined

    def _run(self, chunks: list[list[int]], keep: Sequence[Sequence[bool]]) -> tuple[Tensor, Tensor]:
        """Encode some chunks. Return hidden states [b, n, depth, d_emb] and the mask to route [b, n]."""
        ids, attended, mask = self.padded(chunks, keep)  # [b, n] each
        return self.states(ids, attended), mask

    def states(self, ids: Tensor, attended: Tensor | None = None) -> Tensor:
        """Return the hidden states [b, n, depth, d_emb] of token ids [b, n]."""
        states = self._states(ids, attended)
        return torch.stack([states[depth] for depth in self.depths], dim=2)

    def padded(
        self, chunks: Sequence[Sequence[int]], keep: Sequence[Sequence[bool]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, which are no padding, and which positions are routed: [b, n], on the device."""
        ids, attended, mask = padded(chunks, keep, self.tokenizer.pad_token_id or 0)  # [b, n] each
        return to_device(ids, self.device), to_device(attended, self.device), to_device(mask, self.device)

    @torch.inference_mode()
    def _states(self, ids: Tensor, attended: Tensor | None = None) -> Sequence[Tensor]:
        """Return the hidden states [b, n, d_emb] of every depth, from token ids [b, n]."""
        ids = ids.to(self.device)
        attended = torch.ones_like(ids) if attended is None else attended.to(self.device, torch.long)
        return self.model(input_ids=ids, attention_mask=attended, output_hidden_states=True).hidden_states


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device, through pinned memory, so that nothing waits for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def padded(
    chunks: Sequence[Sequence[int]], keep: Sequence[Sequence[bool]], pad: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, which of them are no padding, and which positions are routed, [b, n] each."""
    lengths = np.array([len(chunk) for chunk in chunks])  # [b]
    longest = max(lengths.max(), 1)  # models refuse an input without positions
    attended = np.arange(longest) < lengths[:, None]  # [b, n]
    ids, mask = np.full(attended.shape, pad, np.int64), np.zeros_like(attended)  # [b, n] each
    ids[attended] = np.fromiter(chain.from_iterable(chunks), np.int64)  # reads numbers faster than torch
    mask[attended] = np.fromiter(chain.from_iterable(keep), np.bool_)
    return torch.from_numpy(ids), torch.from_numpy(attended), torch.from_numpy(mask)


def position_limit(model: nn.Module, tokenizer: Any) -> int:
    """Return the position limit of an encoder, from its position table, configuration and tokenizer."""
    limits = [
        # RoBERTa and similar models count positions from one past the padding index.
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    limits = limits or [getattr(model.config, "max_position_embeddings", None) or UNLIMITED]
    limit = min([*limits, tokenizer.model_max_length])
    return limit if limit < UNLIMITED else 512


def check_depths(depths: Sequence[int] | None, total: int) -> list[int]:
    """Return the chosen hidden states counted from 0, in the given order."""
    if depths is None:
        return list(range(total))
    if not depths or not all(isinstance(d, int) and -total <= d < total for d in depths):
        raise ValueError(f"depths must be numbers from {-total} to {total - 1}, at least one, got {depths!r}")
    return [d % total for d in depths]


def strip_span(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the characters of a token without the spaces that some tokenizers include."""
    stripped = text[start:end].strip()
    if not stripped:
        return start, end
    start = text.index(stripped, start)
    return start, start + len(stripped)


def drop_overlaps(keep: list[list[bool]], special: Sequence[list[int]], step: int) -> None:
    """Use each token of overlapping chunks once, in the chunk where it is farther from the nearest end.

    Args:
        keep: one row per chunk, changed in place.
        special: 1 at special tokens. Every chunk has its own.
        step: number of tokens between the starts of two chunks.
    """
    best: dict[int, tuple[float, int, int]] = {}  # token of the text -> context, chunk, position there
    for chunk, row in enumerate(special):
        content = [position for position, is_special in enumerate(row) if not is_special]
        for k, position in enumerate(content):
            # If the ends are equally near in two chunks, the longer chunk has more context.
            context = min(k, len(content) - 1 - k) + len(content) / (len(content) + 1)
            token = chunk * step + k
            keep[chunk][position] = token not in best or context > best[token][0]
            if keep[chunk][position]:
                if token in best:
                    _, other, place = best[token]
                    keep[other][place] = False
                best[token] = (context, chunk, position)


def most_padding(limit: int, device: torch.device) -> int:
    """Return how many of the positions of a batch may be padding.

    On a CPU, more padding costs more than another pass. On a GPU, launching another pass takes longer than
    some thousand positions.
    """
    return limit // (16 if device.type == "cuda" else 64)


def length_batches(
    lengths: Sequence[int], limit: int, padding: int | None = None, *, in_order: bool = False
) -> Iterator[list[int]]:
    """Group rows so that the padded size of each group stays within the limit, with little padding.

    Args:
        lengths: the length of each row.
        limit: positions per group, including padding. A longer row is a group of its own.
        padding: greatest number of positions of padding per group, None for a 64th of the limit.
        in_order: keep the rows in order instead of sorting them by length.
    """
    padding = limit // 64 if padding is None else padding
    order = range(len(lengths)) if in_order else sorted(range(len(lengths)), key=lengths.__getitem__)
    group: list[int] = []
    longest, total = 0, 0
    for row in order:
        size = (len(group) + 1) * max(longest, lengths[row])
        if group and (size > limit or size - total - lengths[row] > padding):
            yield group
            group, longest, total = [], 0, 0
        group.append(row)
        longest, total = max(longest, lengths[row]), total + lengths[row]
    if group:
        yield group
