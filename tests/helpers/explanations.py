"""Explanations for tests: random numbers that add up, for any text."""

import numpy as np

import vecroute as vr


def tokens_of(text: str, size: int = 3) -> list[tuple[int, int]]:
    """Split a text into spans of a few characters without spaces."""
    spans, start = [], 0
    while start < len(text):
        if text[start].isspace():
            start += 1
            continue
        end = start + 1
        while end < min(start + size, len(text)) and not text[end].isspace():
            end += 1
        spans.append((start, end))
        start = end
    return spans


def explain(text: str, *, names=("bad", "good"), depth=3, seed=0, scale=1.0, chunk_size=10, **changes):
    """Build an explanation of a text, with a special token at each end of every chunk."""
    rng = np.random.default_rng(seed)
    spans = tokens_of(text)
    rows = []  # offsets, special, chunk, piece
    for chunk in range(max(1, -(-len(spans) // chunk_size))):
        rows.append(((0, 0), True, chunk, "[CLS]"))
        for start, end in spans[chunk * chunk_size : (chunk + 1) * chunk_size]:
            rows.append(((start, end), False, chunk, f"##{text[start:end]}"))
        rows.append(((0, 0), True, chunk, "[SEP]"))
    offsets, special, chunks, pieces = zip(*rows, strict=True)
    values = (scale * rng.standard_normal((len(rows), depth, len(names)))).astype(np.float32)
    base = (scale * rng.standard_normal(len(names))).astype(np.float32)
    fields = {
        "values": values,
        "phi": rng.standard_normal(values.shape),
        "base_values": base,
        "scores": values.sum((0, 1), dtype=np.float64) + base,
        "output_names": names,
        "text": text,
        "offsets": offsets,
        "pieces": pieces,
        "special": special,
        "chunk": chunks,
    }
    return vr.Explanation(**{**fields, **changes})


HOSTILE = {
    "empty": "",
    "spaces": " \t\n ",
    "script": "<script>alert('x')</script><img src=x onerror=\"alert(1)\">",
    "entities": "&lt;b&gt; &amp; &#x41; & &copy",
    "quotes": '"a" \'b\' `c` \\ " onmouseover="alert(1)',
    "template": "{{ 7 * 7 }} {% raw %} {# c #} $x^2$ [red]markup[/red] %s {0}",
    "comment": "</p></style></title><!-- --> ]]> <?php ?>",
    "rtl": "הסרט הזה נפלא! But not this. وهذا الفيلم رائع",
    "emoji": "I 😀 love 👨‍👩‍👧 and 👍🏽👍🏽 🇩🇪🇫🇷 1️⃣",
    "combining": "e\u0301te\u0301 nai\u0308ve z\u0351\u0352\u0353algo हिन्दी भाषा",
    "zero width": "zero\u200bwidth \u200b \ufeff a\u200db \u2060",
    "bidi controls": "abc \u202edef\u202c \u2067ghi\u2069 \u200f",
    "controls": "a\x00b \x07 \x1b[31mred\x1b[0m \x7f \x85 \x9b1m c",
    "line ends": "one\ntwo\r\nthree\rfour\u2028five\x0bsix",
    "half characters": "a \ud83d b \udc00",
    "chinese": "我喜欢这部电影。很好！ひらがなカタカナ",
    "not assigned": "\ufffe \uffff \ue000 \U0010ffff x",
}
