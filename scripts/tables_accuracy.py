"""Tables of test accuracy, for texts and for images."""

import statistics

from table_rows import TASKS, Row, row, rows, table

HEADS = {  # heads of accuracy_summary.csv and their names for readers, best first
    "routing": "**routing** (`RoutingHead`)",
    "routing, wide": "routing, wide",
    "PMA": "PMA",
    "probe, MLPs": "probe, MLPs",
    "paper": "the paper's head",
    "probe, 4 queries": "probe, 4 queries",
    "probe": "**probe**",
    "Hopfield": "Hopfield",
    "mean of all": "mean of all",
    "scalar mix": "scalar mix",
    "mean of last": "mean of last",
    "CLS": "CLS",
}


def score(task: str, head: str) -> str:
    found = rows("accuracy_summary", task=task, head=head, routing="routing")
    return f"{float(found[0]['mean']):.2f} ± {float(found[0]['spread']):.2f}" if found else "not run"


def accuracy() -> str:
    """Tabulate the test accuracy of every head, and by how much routing is ahead."""
    lines = []
    for head, name in HEADS.items():
        cells = [name, f"{int(row('accuracy', task='sst2', head=head)['parameters']):,}"]
        for task in TASKS:
            found = rows("accuracy_summary", task=task, head=head, routing="routing")
            ahead = (
                [f"{float(found[0][k]):+.2f}" for k in ("ahead", "low", "high")]
                if found and found[0]["ahead"]
                else None
            )
            cells += [score(task, head), f"{ahead[0]} ({ahead[1]} to {ahead[2]})" if ahead else ""]
        lines.append(cells)
    columns = " | ".join(f"{task} | routing ahead by" for task in TASKS.values())
    return table(f"head | parameters | {columns}", lines)


def accuracy_short() -> str:
    """Tabulate the heads that the README compares."""
    names = {
        "routing": "`RoutingHead`",
        "probe, MLPs": "attentive probe with MLPs",
        "probe": "attentive probe",
    }
    names |= {"paper": "the paper's head", "mean of last": "mean of the last layer"}
    lines = [(name, *(score(task, head) for task in TASKS)) for head, name in names.items()]
    return table(f"head | {' | '.join(TASKS.values())}", lines)


IMAGE_HEADS = {
    "probe, MLPs": "attentive probe with a gated MLP of 512 for each vector",
    "routing, wide": "**routing, wide**",
    "probe": "attentive probe",
    "routing, plain MLPs": "routing, plain MLPs",
    "linear, mean of all": "linear probe, mean patches of all layers",
    "linear, mean of last": "linear probe, mean patch of the last layer",
}


def images_accuracy() -> str:
    """Tabulate test accuracy on CIFAR-10, and the lead of the wide routing head."""
    lines = []
    for head, name in IMAGE_HEADS.items():
        found = row("accuracy_summary", task="cifar10", head=head)
        seeds = rows("accuracy", task="cifar10", head=head)
        top_5 = sum(100 * float(r["test_top5"]) for r in seeds) / len(seeds)
        ahead = [f"{float(found[k]):+.2f}" for k in ("ahead", "low", "high")] if found["ahead"] else None
        top_1 = f"{float(found['mean']):.2f} ± {float(found['spread']):.2f}"
        difference = f"{ahead[0]} ({ahead[1]} to {ahead[2]})" if ahead else ""
        lines.append((name, f"{int(seeds[-1]['parameters']):,}", top_1, difference, f"{top_5:.2f}"))
    return table("head | parameters | top 1 | `wide` ahead by | top 5", lines)


CORPORA = {
    "sentences": "SST-2",
    "reviews": "IMDB, first 200 words",
    "grades": "SST-5",
    "words": "removed words",
    "topics": "made-up topics",
}


def little_data() -> str:
    """Tabulate classifiers of few texts: accuracy beside logistic regression, calibration, and estimates."""
    lines = []
    for corpus, name in CORPORA.items():
        found = rows("little_data", corpus=corpus)
        for n in sorted({int(one["n"]) for one in found}):
            draws = [one for one in found if one["n"] == str(n)]
            lines.append((f"{n:,} of {name}", draws[0]["classes"], str(len(draws)), *few_texts(draws)))
    columns = "texts | classes | draws | accuracy, % | logistic regression, % | ahead by (standard error) | "
    columns += "confidence less accuracy | calibration error | the same at T = 1 | estimate holds"
    return table(columns, lines)


def few_texts(draws: list[Row]) -> list[str]:
    """Return the cells of one corpus and number of texts: means over the draws."""

    def values(name: str) -> list[float]:
        return [float(one[name]) for one in draws]

    accuracy, logistic = values("accuracy"), values("logistic")
    ahead = [100 * (ours - theirs) for ours, theirs in zip(accuracy, logistic, strict=True)]
    error = f" ({statistics.stdev(ahead) / len(ahead) ** 0.5:.1f})" if len(ahead) > 1 else ""
    sure = statistics.mean(values("confidence")) - statistics.mean(accuracy)
    bounds = zip(values("low"), accuracy, values("high"), strict=True)
    held = sum(low <= right <= high for low, right, high in bounds)
    return [
        f"{100 * statistics.mean(accuracy):.1f}",
        f"{100 * statistics.mean(logistic):.1f}",
        f"{statistics.mean(ahead):+.1f}{error}",
        f"{sure:+.3f}",
        f"{statistics.mean(values('calibration_error')):.3f}",
        f"{statistics.mean(values('calibration_error_at_1')):.3f}",
        f"{held} of {len(draws)}",
    ]
