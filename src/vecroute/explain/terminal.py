"""Show explanations on terminals, with rich."""

from typing import TYPE_CHECKING, Any

from vecroute.explain.shown import account, pieces, shown, strongest, visible
from vecroute.explain.told import Question, asked, chance, decided, meaning, predicted
from vecroute.storage import require

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation

UP, DOWN = (120, 175, 230), (245, 175, 95)
N_MARKED = 8  # words whose number is shown in the text
BAR = 30  # longest bar, in characters


def renderable(explanation: "Explanation", output: Any = None, k: int = 10, unit: str = "word") -> Any:
    """Return an object for rich to print: the prediction, the text with coloured words, and the account.

    It can be read without colours: the strongest words show their numbers, and bars consist of + or -.
    """
    text, table = require("rich.text", "cli"), require("rich.table", "cli")
    whole = explanation.aggregate(unit) if explanation.unit == "token" else explanation
    question = decided(explanation) if output is None else Question(str(output))
    rows = asked(whole, question)
    numbers = shown(rows)
    head = text.Text(visible(f"{predicted(explanation)}\n"))
    head.append(visible(f"{question.title} Score: {numbers.number(numbers.score)}"), style="bold")
    told = chance(explanation, question)
    if told:
        formula = "\n{what}: {percent} = {formula}, with T = {temperature}".format(**told)
        head.append(visible(formula), style="dim")
    head.append(f"\n{meaning(explanation, rows.unit)}", style="dim")

    grid = table.Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    lines = account(rows, numbers, k)
    longest = max(abs(line.value) for line in lines) or 1
    for line in lines:
        length = round(BAR * abs(line.value) / longest)
        bar = text.Text.assemble((("+" if line.value > 0 else "-") * length, style(line.value, longest)))
        label = text.Text(visible(line.label), style="italic" if line.is_sum else "")
        grid.add_row(label, numbers.number(line.value, "+"), bar)
    grid.add_row(text.Text("score", style="bold"), text.Text(numbers.number(numbers.score), style="bold"))

    heat = text.Text()
    found = [(piece, sum(numbers.values[i] for i in members)) for piece, members in pieces(rows)]
    largest = max((abs(value) for _, value in found), default=0)
    marked = strongest([value for _, value in found], N_MARKED)
    for position, (piece, value) in enumerate(found):
        heat.append(visible(piece), style=style(value, largest))
        if position in marked:
            heat.append(f"({numbers.number(value, '+')})", style="dim")
    return require("rich.console", "cli").Group(head, text.Text(), heat, text.Text(), grid)


def style(value: float, largest: float) -> str:
    """Return a background colour for black letters, by the strength of a value."""
    strength = min(abs(value) / largest, 1.0) if largest else 0.0
    if strength < 0.05:
        return ""
    red, green, blue = (round(255 - strength * (255 - part)) for part in (UP if value > 0 else DOWN))
    return f"black on rgb({red},{green},{blue})"
