"""Explanations of texts: what each token at each depth adds to the scores of a head on a frozen encoder."""

from collections.abc import Sequence

from torch import nn

from vecroute.encoders.text import TextEncoder
from vecroute.explain.explanation import Explanation
from vecroute.explain.hidden import explain_hidden


def explain_text(
    encoder: TextEncoder, head: nn.Module, text: str, outputs: Sequence[int], names: Sequence[str]
) -> Explanation:
    """What each token at each depth adds to some outputs of a head.

    Args:
        encoder: a ``TextEncoder``.
        head: a ``RoutingHead`` on its hidden states.
        text: the text.
        outputs: which classes, by number.
        names: what they are called.
    """
    (tokenized,) = encoder.tokenize([text])
    (hidden,) = encoder.encode([text])
    values, phi, base, scores = explain_hidden(head, hidden, outputs)
    tokens = tokenized.tokens()
    spans = list(zip(tokens.start, tokens.end, strict=True))
    tokens_of_model = encoder.tokenizer.convert_ids_to_tokens(tokens.ids)
    pieces = [
        name if special else text[start:end]
        for name, special, (start, end) in zip(tokens_of_model, tokens.special, spans, strict=True)
    ]
    return Explanation(
        values=values,
        phi=phi,
        base_values=base,
        scores=scores,
        output_names=names,
        text=text,
        offsets=spans,
        pieces=pieces,
        special=tokens.special,
        chunk=tokens.chunk,
        depths=encoder.depths,
    )
