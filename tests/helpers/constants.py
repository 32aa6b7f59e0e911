"""Read the constants of a kernel in CUDA C++."""

import re
from importlib.resources import files


def named_constants(name: str, given: dict[str, int]) -> dict[str, int]:
    """Return all ``constexpr int`` constants of a file. A constant may use earlier ones."""
    values = dict(given)
    text = files("vecroute.ops.paths.long").joinpath(name).read_text()
    for declared in re.findall(r"^constexpr int ([^;]+);", text, re.MULTILINE):
        for constant, formula in re.findall(r"(\w+) =\s+([^,]+)", declared):
            formula = re.sub(r"^(.+) \? (.+) : (.+)$", r"(\2) if \1 else (\3)", formula)
            values[constant] = eval(formula.replace("/", "//"), {}, values)
    return values
