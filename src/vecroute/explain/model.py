"""Explain an existing Hugging Face classifier: what each word or patch adds to each of its scores."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vecroute.compose.contribution import check_complete, completeness_error
from vecroute.encoders.text import Chunk, Tokenized, every, length_batches, most_padding, position_limit
from vecroute.encoders.vision import VisionEncoder
from vecroute.explain.classes import class_numbers
from vecroute.explain.explanation import Explanation, where_from
from vecroute.explain.image import N_EXPLAINED, ImageExplanation, places_of
from vecroute.explain.rows import Rows, TextSplit, rows_of
from vecroute.explain.samples import check_samples, split_samples
from vecroute.explain.text import ALL_DEPTHS, fields_of
from vecroute.explain.through import HeldEncoder, patch_filter, positions_at_once, word_table
from vecroute.io.images import Picture, check_images, is_image


def explain_model(
    model: Any, processor: Any, inputs: Any, *, classes: Sequence[Any] | None = None, samples: int = 0
) -> Any:
    """Explain the scores of an existing Hugging Face classifier of texts or images. The model is not changed.

        scores = base_values + not_explained + sum over words or patches of values

    Args:
        model: a model in eval mode, for example from ``AutoModelForSequenceClassification`` or
            ``AutoModelForImageClassification``.
        processor: the fast tokenizer or the image processor of the model.
        inputs: one text or image, or a list of them.
        classes: the labels to explain, as in ``model.config.id2label``, or their numbers. None for all; for
            images, the ten with the highest scores.
        samples: see ``RoutingClassifier.explain``; for texts only.

    Returns:
        An ``Explanation``, or a list of them if inputs is a list.

    Raises:
        TypeError: the model, the processor or an input has another type.
        ValueError: the model has an operation that is not affine and that no rule holds fixed, it is in
            training mode, a text is empty or too long for the model, or a class does not exist.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"model must be a Hugging Face model, got {type(model).__name__}")
    if model.training:
        raise ValueError("model must be in eval mode, got training mode: call model.eval()")
    images = hasattr(processor, "image_processor_type") or hasattr(processor, "do_resize")
    check_samples(samples, images=images)
    config: Any = model.config
    labels = {int(j): str(name) for j, name in config.id2label.items()}
    explain = _explain_images if images else _explain_texts
    outputs = class_numbers(classes, [labels[j] for j in sorted(labels)], by_number=True)
    single = is_image(inputs) if images else isinstance(inputs, str)
    found = explain(model, processor, [inputs] if single else inputs, outputs, samples)
    several = config.problem_type == "multi_label_classification"
    explained = []
    for fields, chosen, scores in found:
        scores = scores.double()  # [n_cls]
        shares = scores.sigmoid() if several else scores.softmax(-1)  # [n_cls]
        names = {"output_names": [labels[j] for j in chosen], "probabilities": shares[chosen]}
        about = where_from(str(getattr(model, "name_or_path", "") or type(model).__name__))
        kind: Any = ImageExplanation if images else Explanation
        explained.append(kind(**fields, **names, multi_label=several, about=about))
    return explained[0] if single else explained


def _explain_texts(model: Any, tokenizer: Any, inputs: Any, outputs: list[int] | None, samples: int):
    texts = tokenize(model, tokenizer, inputs)
    rows = [rows_of(text, 1) for text in texts]
    chosen = outputs or list(range(model.config.num_labels))

    def split(
        texts: Sequence[Tokenized], outputs: Sequence[Sequence[int]], rows: Sequence[Rows]
    ) -> list[TextSplit]:
        return _split_logits(model, texts, chosen, rows)

    each = [chosen] * len(texts)
    if samples:
        splits = split_samples(split, texts, each, rows, samples)
    else:
        splits = [(one, torch.zeros_like(one.scores)) for one in split(texts, each, rows)]
    for text, own, (one, missing) in zip(texts, rows, splits, strict=True):
        fields = fields_of(tokenizer, text.text, own, one, [ALL_DEPTHS])
        yield {**fields, "not_explained": missing}, chosen, one.all_scores


def tokenize(model: Any, tokenizer: Any, inputs: Any) -> list[Tokenized]:
    """Tokenize texts, each in one chunk.

    Raises:
        TypeError: inputs are not texts, or the tokenizer has no character offsets.
        ValueError: there is no text, or one is empty or longer than the model allows.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise TypeError(
            f"processor must be an image processor or a fast tokenizer, got {type(tokenizer).__name__}"
        )
    texts, limit = text_list(inputs), position_limit(model, tokenizer)
    for k, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"inputs must be texts, input {k} is {type(text).__name__}")
        if not text.strip():
            raise ValueError(f"inputs must be texts with at least one word, input {k} is {text!r}")
    options = {"return_offsets_mapping": True, "return_special_tokens_mask": True, "verbose": False}
    encoded = tokenizer(texts, truncation=False, padding=False, **options)
    found = []
    for k, text in enumerate(texts):
        ids = encoded["input_ids"][k]
        if len(ids) > limit:
            raise ValueError(f"inputs must be at most {limit} tokens long, input {k} has {len(ids)}")
        special, spans = encoded["special_tokens_mask"][k], encoded["offset_mapping"][k]
        found.append(Tokenized(text, [Chunk(ids, special, spans)], [every(len(ids))]))
    return found


def text_list(inputs: Any) -> list[Any]:
    """Return several inputs as a list. Refuse what has other things than texts as its elements."""
    expected = "inputs must be one text or a list of texts"
    if hasattr(inputs, "columns"):  # a data frame, whose elements are the names of its columns
        raise TypeError(f"{expected}, got {type(inputs).__name__}: give one of its columns")
    if not isinstance(inputs, Iterable) or isinstance(inputs, Mapping | bytes):
        raise TypeError(f"{expected}, got {type(inputs).__name__}")
    texts = list(inputs)
    if not texts:
        raise ValueError(f"{expected}, got none")
    return texts


def logits_of(output: Any, name: str) -> Tensor:
    """Return the scores [b, n_cls] in the output of a model."""
    if getattr(output, "logits", None) is None:
        expected = "as a model for sequence or image classification does"
        raise ValueError(f"{name} must return logits, {expected}, got {type(output).__name__}")
    return output.logits


def _split_logits(
    model: Any, texts: Sequence[Tokenized], outputs: Sequence[int], rows: Sequence[Rows]
) -> list[TextSplit]:
    """Split the scores of texts that fit one chunk, in batches of similar length; see ``Splitter``."""
    device, name = model.device, type(model).__name__
    source, found = word_table(model, name), [None] * len(texts)
    # Decoders score the last token that is not their padding token. Without one they take one text at a time.
    pad = getattr(model.config, "pad_token_id", None)
    limit = 0 if pad is None or pad < 0 else positions_at_once(model, device)
    for which in length_batches([len(t.keep[0]) for t in texts], limit, most_padding(limit, device)):
        chunks = [texts[k].chunks[0] for k in which]
        longest = max(map(len, chunks))
        ids = torch.tensor([chunk + [pad] * (longest - len(chunk)) for chunk in chunks], device=device)
        lengths = torch.tensor([len(chunk) for chunk in chunks], device=device)[:, None]  # [b, 1]
        attended = (torch.arange(longest, device=device) < lengths).long()  # [b, n]

        def call(ids: Tensor = ids, attended: Tensor = attended) -> list[Tensor]:
            return [logits_of(model(input_ids=ids, attention_mask=attended), name)]

        values, base, scores = split_scores(call, source, name, outputs)
        for b, k in enumerate(which):
            own = values.new_zeros(len(rows[k].start), 1, len(outputs))  # [n_rows, 1, k]
            index = torch.tensor(rows[k].of[0], dtype=torch.long, device=device)
            own.index_add_(0, index, values[b, : len(index), None])
            found[k] = TextSplit(own, base[b], scores[b, list(outputs)], scores[b])  # type: ignore[call-overload]
    return found  # type: ignore[return-value]


def split_scores(
    call: Any, source: Tensor, name: str, outputs: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what each position of a batch adds [b, n, k], the base [b, k], and all scores [b, n_cls].

    Args:
        call: runs the model and returns a list with its scores [b, n_cls].
        source, name: see ``HeldEncoder``.
        outputs: numbers of the k classes to explain.
    """
    held = HeldEncoder(call, source, name)
    (scores,) = held.states  # [b, n_cls]
    parts = []
    for left, j in zip(reversed(range(len(outputs))), outputs, strict=True):
        weights = torch.zeros_like(scores)  # [b, n_cls]
        weights[:, j] = 1
        parts.append(held.pull([scores], [weights], keep=left > 0))  # [b, n]
    values = torch.stack(parts, -1)  # [b, n, k]
    (zero,) = held.at_zero()  # [b, n_cls]
    base, scores = zero[:, list(outputs)].to(values), scores.detach()  # [b, k], [b, n_cls]
    error = completeness_error(values.mT, base, scores[:, list(outputs)].to(values))  # [b, k]
    check_complete(name, error, scores.dtype)
    return values, base, scores.to(values)


class PatchGrid(VisionEncoder):
    """Find the places of patches for an image model, without changing the model."""

    def __init__(self, model: Any, processor: Any):
        self.name, self.processor, self.model = type(model).__name__, processor, model
        config = getattr(model.config, "vision_config", model.config)
        size = getattr(config, "patch_size", None)
        if size is None:
            raise ValueError(f"{self.name} must be a vision Transformer, which has a patch_size")
        self.patch_size = (size, size) if isinstance(size, int) else tuple(size)
        self.image_size = self._check_processor()  # height, width
        self.grid = self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]
        self.n_special, self.special_tokens = 0, False
        self.n_pos = self.grid[0] * self.grid[1]


def _explain_images(model: Any, processor: Any, inputs: Any, outputs: list[int] | None, samples: int):
    pictures: list[Picture] = check_images(inputs, "inputs")
    grid = PatchGrid(model, processor)
    source, n_cls = patch_filter(model, grid.name), model.config.num_labels
    for picture in pictures:
        pixels = grid.pixels([picture]).to(model.device, model.dtype)  # [1, channels, height, width]

        def call(pixels: Tensor = pixels) -> list[Tensor]:
            return [logits_of(model(pixel_values=pixels), grid.name)]

        chosen = outputs or list(range(n_cls))
        if outputs is None and n_cls > N_EXPLAINED:
            with torch.no_grad():
                chosen = call()[0][0].topk(N_EXPLAINED).indices.tolist()
        values, base, scores = split_scores(call, source, grid.name, chosen)
        fields = {"of": "words", "values": values[0][:, None], "depths": [ALL_DEPTHS]}
        fields |= {"base_values": base[0], "scores": scores[0, chosen], **places_of(grid, picture)}
        yield fields, chosen, scores[0]
