"""Tables of explanations: how faithful they are, how they agree, and maps of images."""

from table_rows import CPU, GPU, TASKS, read, record, row, rows, table

METHODS = (
    "states",
    "states, class",
    "states, bias in votes",
    "integrated gradients, margin",
    "integrated gradients, class",
    "gradient x input",
    "attention rollout",
    "phi",
    "random",
)


def measured(task: str, method: str, measure: str, device: str, interval: bool = False) -> str:
    """Write a measure of faithfulness, with its interval if asked; empty if it was not measured."""
    wanted = {"task": task, "method": method, "measure": measure, "device": device}
    found = read("faithfulness", wanted)
    if not found or not found[-1]["mean"]:
        return ""
    record("faithfulness", found[-1:])
    numbers = {name: float(found[-1][name] or 0) for name in ("mean", "low", "high")}
    if measure == "completeness_error":
        return f"{numbers['mean']:.0e}"
    if measure == "seconds":
        return f"{numbers['mean']:.2g}"
    text = f"{numbers['mean']:.2f}" if measure == "leave_one_out" else f"{numbers['mean']:.3f}"
    return f"{text} ({numbers['low']:.3f} to {numbers['high']:.3f})" if interval else text


def faithfulness(task: str) -> str:
    """Tabulate every method on one data set."""
    lines = []
    for method in METHODS:
        cells = [measured(task, method, m, GPU, True) for m in ("comprehensiveness", "sufficiency")]
        others = ("deletion", "insertion", "comprehensiveness_masked", "sufficiency_masked", "leave_one_out")
        cells += [measured(task, method, m, GPU) for m in (*others, "completeness_error", "seconds")]
        lines.append((method, *cells))
    head = "method | comprehensiveness | sufficiency | deletion | insertion | masked: compr."
    return table(f"{head} | masked: suff. | leave one out | completeness error | seconds", lines)


def beside_words(task: str, method: str, measure: str) -> tuple[float, float, str]:
    """Return the mean of a measure, the mean of words on the same texts, and their difference as interval."""
    own = {"task": task, "method": method, "measure": measure}
    mean = float(row("words", of="mean", **own)["mean"])
    ahead = rows("words", of="words less this", **own)
    if not ahead:
        return mean, mean, ""
    low, high = (float(ahead[-1][name]) for name in ("low", "high"))
    return mean, mean + float(ahead[-1]["mean"]), f"{low:+.3f} to {high:+.3f}"


def texts_of(task: str, method: str) -> str:
    """Return the number of texts on which a method was measured."""
    return row("words", task=task, of="mean", method=method, measure="comprehensiveness")["texts"]


def faithfulness_short() -> str:
    """Tabulate the methods that the README compares, on sentences of SST-2."""
    names = {
        "words": "**words** (ours, the default)",
        "words, 24 samples": "words, mean over 24 sub-texts (ours)",
        "states": "hidden states (ours)",
        "SHAP, 500 evaluations": "SHAP, 500 evaluations",
        "leave one out": "leave one out",
        "phi": "`phi` alone",
        "random": "chance",
    }
    lines, task = [], "sst2"
    for method, name in names.items():
        cells = []
        for measure, n in {"comprehensiveness": 3, "sufficiency": 3, "leave_one_out": 2}.items():
            own, words, _ = beside_words(task, method, measure)
            cells.append(f"{own:.{n}f}" if method == "words" else f"{own:.{n}f} ({words:.{n}f})")
        own, words, _ = beside_words(task, method, "seconds")
        lines.append((name, texts_of(task, method), *cells, f"{own / words:.2g}"))
    head = "method | sentences | comprehensiveness (more is better) | sufficiency (less is better)"
    return table(f"{head} | correlation with leaving a token out | time, words = 1", lines)


def faithfulness_words(task: str, texts: str) -> str:
    """Tabulate every method on one task: means, and how far words are ahead, with paired intervals.

    Args:
        task: name of the task in the rows.
        texts: what the table calls its texts.
    """
    lines = []
    for method in dict.fromkeys(found["method"] for found in rows("words", task=task, of="mean")):
        cells = []
        for measure in ("comprehensiveness", "sufficiency", "leave_one_out"):
            if not rows("words", of="mean", task=task, method=method, measure=measure):
                cells += ["", ""]  # not measured
                continue
            own, words, interval = beside_words(task, method, measure)
            cells += [f"{own:.3f}", f"{words - own:+.3f} ({interval})" if interval else ""]
        own, words, _ = beside_words(task, method, "seconds")
        lines.append((method, texts_of(task, method), *cells, f"{own / words:.2g}"))
    head = f"method | {texts} | comprehensiveness | words less this | sufficiency | words less this"
    return table(f"{head} | leave one out | words less this | time, words = 1", lines)


def shap() -> str:
    """Tabulate contributions and SHAP, on one thread of a CPU."""
    methods = (
        "states",
        "SHAP, 4 evaluations",
        "SHAP, 50 evaluations",
        "SHAP, 500 evaluations",
        "integrated gradients, margin",
    )
    lines = []
    for task in ("sst2", "imdb"):
        for method in methods:
            found = rows("faithfulness", task=task, method=method, device=CPU)
            if found:
                texts = found[0]["texts"]
                on = next(
                    device
                    for device in (CPU, GPU)
                    if rows(
                        "faithfulness",
                        task=task,
                        method=method,
                        device=device,
                        texts=texts,
                        measure="comprehensiveness",
                    )
                )
                cells = [measured(task, method, m, on, True) for m in ("comprehensiveness", "sufficiency")]
                lines.append((method, TASKS[task], texts, *cells, measured(task, method, "seconds", CPU)))
    return table("method | task | texts | comprehensiveness | sufficiency | seconds", lines)


def agreement() -> str:
    """Tabulate how explanations of several seeds agree, with each other and with random weights."""
    lines = []
    for found in sorted(rows("faithfulness_checks"), key=lambda r: -float(r["agreement_over_seeds"])):
        cells = [f"{float(found[k]):.2f}" for k in ("agreement_over_seeds", "agreement_with_random_weights")]
        lines.append((found["method"], *cells, f"{float(found['memory_mb']):.1f} MB"))
    return table("method | between seeds | with random weights | memory of one explanation", lines)


def images_maps() -> str:
    """Tabulate deletion and insertion of patches by every method, and the lead of contributions."""
    lines = []
    for method in dict.fromkeys(found["method"] for found in rows("patches")):
        cells = []
        for measure in ("deletion", "insertion"):
            ahead = row("patches", method=method, measure=f"{measure}_ahead")
            told = [f"{float(ahead[k]):.3f}" for k in ("mean", "low", "high")]
            difference = "" if method == "states" else f"{told[0]} ({told[1]} to {told[2]})"
            cells += [f"{float(row('patches', method=method, measure=measure)['mean']):.3f}", difference]
        for measure, digits in (("seconds", 3), ("seconds_in_batch", 4)):
            found = rows("patches", method=method, measure=measure)
            cells.append(f"{float(found[-1]['mean']):.{digits}f}" if found and found[-1]["mean"] else "")
        lines.append((method, *cells))
    head = "method | deletion | states ahead by | insertion | states ahead by"
    return table(f"{head} | seconds, alone | in a batch of 100", lines)


def planted() -> str:
    """Tabulate how often a method names the word first that alone decides the class."""
    lines = []
    for method in dict.fromkeys(one["method"] for one in read("planted", {"task": "word"})):
        found = rows("planted", task="word", method=method)
        first = [100 * float(one["all_first"]) for one in found]
        texts = f"{sum(int(one['texts']) for one in found):,}"
        cells = (method, str(len(found)), texts, f"{sum(first) / len(first):.1f}", f"{min(first):.1f}")
        lines.append(cells)
    return table("method | seeds | texts | planted word first, % | worst seed, %", lines)
