"""The constants of a kernel in CUDA C++, as Python reads them."""

import re
from importlib.resources import files


def named_constants(name: str, given: dict[str, int]) -> dict[str, int]:
    """All that a file declares ``constexpr int``, from those that come before it."""
    values = dict(given)
    text = files("vecroute.ops.paths.long").joinpath(name).read_text()
    for declared in re.findall(r"^constexpr int ([^;]+);", text, re.MULTILINE):
        for constant, formula in re.findall(r"(\w+) =\s+([^,]+)", declared):
            formula = re.sub(r"^(.+) \? (.+) : (.+)$", r"(\2) if \1 else (\3)", formula)
            values[constant] = eval(formula.replace("/", "//"), {}, values)
    return values
