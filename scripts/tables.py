"""Write the tables of the documents from the rows of benchmarks: ``python scripts/tables.py [--check]``.

A table is between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; NAME is one of ``TABLES``. With
--check nothing is written, and the exit code is 1 if a table differs from its rows. A table of figures that
has no rows comes after ``<!-- by hand: REASON -->``.
"""

import csv
import functools
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
TASKS = {"sst2": "SST-2", "sst5": "SST-5", "imdb": "IMDB"}
GPU, CPU = "NVIDIA H200", "1 threads of AMD EPYC"

Row = dict[str, str]


# Summaries have no commits. These are the files that they were made from.
MADE_FROM = {
    "accuracy_summary": "accuracy",
    "faithfulness": "faithfulness_texts",
    "patches": "patches_images",
    "words": "words_texts",
}
# The commits of the rows in the current table, for each file.
commits: dict[str, set[str]] = {}


def rows(name: str, **wanted: str) -> list[Row]:
    """Return the rows of a file in which every named column has the wanted value."""
    found = read(name, wanted)
    record(name, found)
    return found


def row(name: str, **wanted: str) -> Row:
    """Return the last such row, which is the newest. A file keeps all measurements of a case."""
    found = read(name, wanted)
    if not found:
        raise ValueError(f"{name}.csv has no row with {wanted}")
    record(name, found[-1:])
    return found[-1]


def read(name: str, wanted: dict[str, str]) -> list[Row]:
    """Return such rows without recording their commits, for tables that show only some of them."""
    return [row for row in read_file(name) if wanted.items() <= row.items()]


@functools.cache
def read_file(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def record(name: str, shown: list[Row]) -> None:
    """Record the commits of the rows that a table shows."""
    source = MADE_FROM.get(name, name)
    columns = [c for c in ("task", "head", "method", "device") if c in read_file(source)[0]]
    for each in shown:
        same = {c: each[c] for c in columns if each.get(c)}
        found = [each] if source == name else read(source, same)
        commits.setdefault(source, set()).update(one.get("commit") or "unknown" for one in found)


def commits_line() -> str:
    """Write which commits the rows of a table come from, and which of them had uncommitted changes."""
    parts = []
    for name, found in commits.items():
        words = [c.removesuffix("+") + " with uncommitted changes" * c.endswith("+") for c in sorted(found)]
        parts.append(f"`{name}.csv`, commit {', '.join(words)}")
    return f"\nRows: {'; '.join(parts)}.\n"


def table(head: str, lines: Iterable[Iterable[str]]) -> str:
    """Write a Markdown table. ``head`` has the names of the columns, separated by |."""
    names = [name.strip() for name in head.split("|")]
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *lines]) + "\n"


def short(value: str | float, digits: int = 3) -> str:
    """Write a number with three digits, or with all digits before the point."""
    number = float(value)
    return f"{number:,.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:#.{digits}g}"


def size(case: Row) -> str:
    """Write the sizes of a routing: batch x n_inp x d_inp -> n_out x d_out."""
    batch = f"{case['batch']} x " if int(case["batch"]) else ""
    return f"{batch}{int(case['n_inp']):,} x {case['d_inp']} -> {case['n_out']} x {case['d_out']}"


# Speed


def eager() -> str:
    """Tabulate eager forward + backward, compared with the authors' code, also eager."""
    lines = []
    for theirs in rows("eager", implementation="official", kind="plain"):
        same = {name: theirs[name] for name in ("case", "n_out", "d_inp", "n_iters")}
        ours = [r for r in rows("eager", implementation="fused", **same) if r["kind"] == "plain"]
        if ours:
            times = [float(r["whole_ms"]) for r in (theirs, ours[-1])]
            length = "any" if theirs["variable"] == "True" else "fixed"
            cells = (size(theirs), length, theirs["n_iters"], *(f"{t:.2f} ms" for t in times))
            lines.append((*cells, f"{times[0] / times[1]:.1f}x"))
    return table("sizes | length | iterations | authors' code | vecroute | faster", lines)


def eager_kinds() -> str:
    """Tabulate the same samples as a full batch, as a padded batch with a mask, and packed."""
    lines = []
    for masked in rows("eager", implementation="fused", kind="masked"):
        same = {name: masked[name] for name in ("case", "n_out", "d_inp", "n_iters", "implementation")}
        packed = row("eager", kind="packed", **same)
        plain = rows("eager", kind="plain", **same)
        cells = [f"{float(r['whole_ms']):.2f} ms" for r in (*plain[-1:], masked, packed)]
        lines.append((size(masked), *([] if plain else ["-"]), *cells))
    return table("sizes | all inputs | padded, with a mask | packed", lines)


def million() -> str:
    """Tabulate a million vectors, compared with the authors' code in the same run."""
    lines = []
    for length in ("fixed", "variable"):
        for mode in ("tf32", "bf16", "fp32"):
            case = {"case": "headline", "length": length, "mode": mode}
            theirs = row("scaling", implementation="official", **case)
            ours = row("scaling", implementation="fused", **case)

            def pair(which: str, r: Row) -> str:
                return f"{short(r['forward' + which])} / {short(r['both' + which])}"

            def over(which: str, r: Row, digits: int = 2) -> str:
                parts = (
                    f"{float(r[k + which]) / float(r[f'floor_{k}{which}']):.{digits}f}"
                    for k in ("forward", "both")
                )
                return " / ".join(parts)

            faster = f"{float(ours['forward_speedup']):.2f}x / {float(ours['both_speedup']):.2f}x"
            cells = (length, mode, pair("_ms", theirs), pair("_ms", ours), faster, over("_ms", ours))
            lines.append((*cells, over("_mb", theirs), over("_mb", ours, 3)))
    head = "length | precision | official ms | fused ms | faster | fused / floor"
    return table(f"{head} | memory / floor, official | memory / floor, fused", lines)


def heads() -> str:
    """Tabulate heads on a GPU: eager compared with eager, captured with captured."""
    lines = []
    for case in ("small", "text-head", "image"):
        for mode in ("tf32", "bf16"):
            cells = []
            for launch in ("eager", "captured"):
                wanted = {"case": case, "mode": mode, "launch": launch, "device": GPU}
                theirs = row("heads", implementation="official", **wanted)
                ours = row("heads", implementation="fused", **wanted)
                cells += [
                    short(theirs["both_ms"]),
                    short(ours["both_ms"]),
                    f"{float(ours['both_speedup']):.1f}x",
                ]
            sizes = f"{ours['batch']} x {ours['n_inp']} x {ours['d_inp']} -> {ours['network']}"
            lines.append((sizes, ours["length"], mode, *cells))
    head = "sizes | length | precision | official, eager (ms) | fused, eager (ms) | faster"
    return table(f"{head} | official, captured (ms) | fused, captured (ms) | faster", lines)


def on_a_cpu() -> str:
    """Tabulate heads on two cores, compared with the authors' code."""
    lines = []
    for case in ("long", "batch", "fixed"):
        found = {
            name: row("heads", case=case, implementation=name, device="2 threads of AMD EPYC")
            for name in ("official", "reference", "chunked")
        }
        ours, theirs = found["chunked"], found["official"]
        shares = [f"{float(r['both_matmul_share']):.0%}" for r in (theirs, ours)]
        memory = [f"{short(r['both_extra_mb'])} MB" for r in (theirs, ours)]
        times = [f"{short(r['both_ms'])} ms" for r in found.values()]
        faster = f"{float(ours['both_speedup']):.2f}x"
        lines.append((size(ours), ours["length"], *times, faster, *shares, *memory))
    head = "sizes | length | authors' code | reference | chunked | chunked faster"
    more = "share of the matmul rate, theirs | ours | memory on top, theirs | ours"
    return table(f"{head} | {more}", lines)


def attention() -> str:
    """Tabulate one routing layer and one Transformer encoder layer, N vectors to N."""
    lines = []
    for n in ("100", "400", "1000", "1500", "2000", "3000", "4000", "6000", "8000"):
        cells = [n]
        for launch in ("eager", "captured"):
            for mode in ("tf32", "bf16"):
                for model in ("encoder", "fused"):
                    found = row("attention", N=n, model=model, mode=mode, launch=launch)
                    cells.append(short(found["both_ms"]))
        lines.append(cells)
    head = " | ".join(
        f"{launch}, {mode}: {model}"
        for launch in ("eager", "captured")
        for mode in ("tf32", "bf16")
        for model in ("encoder", "routing")
    )
    return table(f"N | {head}", lines)


def out_of_core(device: str) -> str:
    """Tabulate streaming of 20 GB, from the newest rows of a kind of device."""
    with_gpu = [r for r in read("out_of_core", {}) if bool(r["peak_gpu_mb"]) == (device == "gpu")]
    newest = [r for r in with_gpu if r["commit"] == with_gpu[-1]["commit"]]
    record("out_of_core", newest)
    lines = []
    for r in newest:
        what = "forward" if r["which"] == "forward" else "forward + backward"
        peak = r["peak_gpu_mb"] or r["peak_mb"]
        parts = [r[f"parts_{n}_s"] for n in ("reading", "copying", "arithmetic", "in_memory", "streaming")]
        seconds = [f"{short(s)} s" if s else "" for s in (r["streamed_s"], *parts)]
        shares = [f"{float(r[name]):.2f}" for name in ("share", "share_in_memory")]
        cells = (what, f"{r['gigabytes']} GB from the {r['read_from']}", seconds[0], f"{short(peak)} MB")
        lines.append((*cells, f"{r['parts_gb']} GB", *seconds[1:], *shares))
    head = "| data | in one call | peak memory | parts of | reading | copying | arithmetic | in memory"
    return table(f"{head} | streaming | `share` | `share_in_memory`", lines)


def classifier() -> str:
    """Epochs and predictions of the demo's classifier on 2048 sentences."""
    names = {
        "epoch of 2048 sentences: from the cache": "an epoch from the cache",
        "epoch of 2048 sentences: with the encoder": "an epoch with the encoder",
        "2048 sentences: predict_proba": "`predict_proba`",
        "2048 sentences: encoder alone": "the encoder alone",
        "2048 sentences: predict_proba / encoder alone": "`predict_proba` / encoder alone",
    }
    lines = []
    for what, name in names.items():
        found = [row("classifier", what=what, device=device) for device in ("2 threads of AMD EPYC", GPU)]
        units = {"s": " s", "texts/s": " sentences/s", "x": "x"}
        lines.append((name, *(f"{short(r['value'])}{units[r['unit']]}" for r in found)))
    return table("| two idle CPU cores | one H200, half precision", lines)


# Accuracy

HEADS = {  # of accuracy_summary.csv, as a reader knows them, best first
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


# Faithfulness

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


def faithfulness_words(task: str) -> str:
    """Tabulate every method on one task: means, and how far words are ahead, with paired intervals."""
    lines = []
    for method in dict.fromkeys(found["method"] for found in rows("words", task=task, of="mean")):
        cells = []
        for measure in ("comprehensiveness", "sufficiency", "leave_one_out"):
            own, words, interval = beside_words(task, method, measure)
            cells += [f"{own:.3f}", f"{words - own:+.3f} ({interval})" if interval else ""]
        own, words, _ = beside_words(task, method, "seconds")
        lines.append((method, texts_of(task, method), *cells, f"{own / words:.2g}"))
    head = "method | sentences | comprehensiveness | words less this | sufficiency | words less this"
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
    """How explanations of several seeds agree, and with those of random weights."""
    lines = []
    for found in sorted(rows("faithfulness_checks"), key=lambda r: -float(r["agreement_over_seeds"])):
        cells = [f"{float(found[k]):.2f}" for k in ("agreement_over_seeds", "agreement_with_random_weights")]
        lines.append((found["method"], *cells, f"{float(found['memory_mb']):.1f} MB"))
    return table("method | between seeds | with random weights | memory of one explanation", lines)


# Images

IMAGE_HEADS = {
    "probe, MLPs": "attentive probe with a gated MLP of 512 for each vector",
    "routing, wide": "**routing, wide**",
    "probe": "attentive probe",
    "routing, plain MLPs": "routing, plain MLPs",
    "linear, mean of all": "linear probe, mean patches of all layers",
    "linear, mean of last": "linear probe, mean patch of the last layer",
}


def images_accuracy() -> str:
    """Test accuracy on CIFAR-10, and by how much the wide routing head is ahead."""
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


def images_maps() -> str:
    """Deletion and insertion of patches by every method, and how far contributions are ahead."""
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


# The server


def serve() -> str:
    """Requests per second of 64 clients, one by one and in batches."""
    lines = []
    for texts, name in {"phrases": "six words", "sentences": "sentences of 21 words"}.items():
        single, batched = (row("serve", texts=texts, max_batch=n, max_waiting="256") for n in ("1", "64"))
        rates = [float(r["per_second"]) for r in (single, batched)]
        p99 = [f"{float(r['p99_ms']) / 1000:.2f} s" for r in (single, batched)]
        cells = (*(short(rate) for rate in rates), f"{rates[1] / rates[0]:.1f}x", *p99)
        lines.append((name, *cells, f"{short(batched['peak_mb'])} MB"))
    head = "texts | requests per second, one by one | in batches | faster"
    return table(f"{head} | p99 latency, one by one | in batches | peak memory", lines)


# The paper's claims, and scale


def fits(quantity: str) -> str:
    """Write R^2 of straight lines over each size, in the newest precision in which they were measured."""
    axes = ("n_inp", "n_out", "d_inp", "d_out", "n_iters")
    found = {axis: row("scaling_fits", case=f"busy {axis}", quantity=quantity, device=GPU) for axis in axes}
    values = ", ".join(f"{axis} {float(fit['r2']):.3f}" for axis, fit in found.items())
    return f"R² of {found['n_inp']['mode']}: {values}"


def crossover(quantity: str) -> str:
    """Write up to which length a routing needs less than an encoder layer, in tf32."""
    found = row("attention_crossovers", quantity=quantity, mode="tf32", launch="eager")
    if found["relation"] == "never":
        return "never in tf32"
    until = f"up to {float(found['N']):,.0f}" if found["relation"] == "at" else "up to the longest measured"
    return f"from {int(found['from_N']):,} {until} in tf32, eager"


def paper_claims() -> str:
    """Every claim of section 5 of the paper, beside what was measured here."""
    million = row("scaling", case="headline", length="fixed", mode="fp32", implementation="fused")
    memory = f"{float(million['forward_mb']) * 2**20 / 1e9:.1f} GB forward in fp32"
    later = "not measured yet"

    def compared(method: str) -> str:
        old = row("faithfulness", task="sst2", method=method, measure="comprehensiveness", device=GPU)
        new = row("words", task="sst2", of="mean", method=method, measure="comprehensiveness")
        return f"{float(old['mean']):.3f} and {float(new['mean']):.3f}"

    def command(text: str) -> str:
        return f"`python benchmarks/{text}`"

    sizes, lengths = (
        command("scaling.py --modes fp32 --cases axes busy"),
        command("attention.py --modes fp32"),
    )
    lines = [
        ("parameters are linear in each size", "linear", fits("parameters"), sizes),
        ("memory of forward is linear in each size and in iterations", "linear", fits("forward_mb"), sizes),
        ("time of forward is linear in each size and in iterations", "linear", fits("forward_ms"), sizes),
        ("fewer parameters than an encoder layer", "up to 600 vectors", crossover("parameters"), lengths),
        ("less memory than an encoder layer", "up to 800 vectors", crossover("forward_mb"), lengths),
        ("less time than an encoder layer", "up to 1700 vectors", crossover("forward_ms"), lengths),
        ("a million vectors of 1024, fp32", "under 18 GB", memory, command("scaling.py --cases headline")),
        ("routes 89,600 vectors", "yes", later, command("scaling.py --cases longest")),
        ("end-to-end credit of 4925 x 1000", "yes", later, command("credit.py --parts images")),
        (
            "end-to-end credit is interpretable",
            "typical examples",
            f"in part: comprehensiveness {compared('phi')} on two heads, chance {compared('random')}",
            command("faithfulness.py --data DATA --weights build/heads --fit 6920"),
        ),
    ]
    theirs = {"imdb": "96.2", "sst5": "59.8", "sst2": "96.0"}
    for task, name in TASKS.items():
        ours = f"{later}; {score(task, 'paper')} with MiniLM and our recipe"
        run = command(f"paper.py --task {task} --data DATA")
        lines.append((f"accuracy on {name}, RoBERTa-large", f"{theirs[task]} %", ours, run))
    for task, value in (("imagenet-1k", "86.7"), ("cifar100", "93.8"), ("cifar10", "99.2")):
        run = command(f"paper.py --task {task} --data DATA")
        lines.append((f"accuracy on {task}, BEiT-large", f"{value} %", later, run))
    return table("claim | the paper | here | command", lines)


def billion() -> str:
    """One step over a billion vectors on several GPUs, by the simulation of benchmarks/sharded_model.py."""
    sys.path.append(str(ROOT / "benchmarks"))
    from floor import Case
    from sharded_model import Network, simulate

    measured_row = row("scaling", case="ten-million", device=GPU)
    per_input = [float(measured_row[k]) / 1000 / 1e7 for k in ("forward_ms", "both_ms")]  # seconds
    case, network, lines = Case(10**9, variable=True), Network(2e-5, 5e10), []
    for ranks in (1, 8, 100, 1000):
        own = case.n_inp / ranks
        work = per_input[0] * own, (per_input[1] - per_input[0]) * own
        found = simulate(case, ranks, network, work, jitter=0.05)
        gigabytes = own * 1024 * 2 / 1e9
        hours = found["step_s"] * ranks / 3600
        cells = (f"{gigabytes:,.1f} GB", f"{found['step_s']:.3g} s", f"{found['bytes'] / 1e6:.2f} MB")
        network_s = f"{1000 * found['travelling_s']:.2f} ms"
        waiting = f"{1000 * found['waiting_s']:.0f} ms"
        cost = f"{1000 * 3 * hours:.0f}"
        lines.append((f"{ranks:,}", *cells, network_s, waiting, cost))
    head = "GPUs | inputs of each | step | messages of a step | their time | waiting for the slowest"
    return table(f"{head} | US$ for 1000 steps", lines)


def sharded() -> str:
    """Write predicted and measured bytes and times of a sharded step."""
    lines = []
    for ranks in ("1", "2", "4"):
        found = row("sharded_model", ranks=ranks)
        times = [f"{short(found[k])} ms" if found[k] else "" for k in ("predicted_ms", "measured_ms")]
        both = [f"{int(found[k]):,}" for k in ("bytes_predicted", "bytes_counted")]
        lines.append((ranks, *both, *times, found["load"]))
    return table("processes | bytes predicted | bytes counted | predicted | measured | load", lines)


def corpus() -> str:
    """A billion texts on one GPU and on a hundred."""
    rate = row("classifier", what="2048 sentences: predict_proba", device=GPU)
    times = row("credit", what="words, MiniLM, 32 sentences: one margin")
    predict = float(rate["value"])
    lines = []
    for name, per_second in (
        ("predict", predict),
        ("predict and explain words", predict / (1 + float(times["value"]))),
    ):
        hours = 1e9 / per_second / 3600
        cells = (f"{per_second:,.0f}", f"{hours:,.0f} h", f"{60 * hours / 100:,.0f} min", f"{3 * hours:,.0f}")
        lines.append((name, *cells))
    return table("work | texts/s of one GPU | one GPU | 100 GPUs | US$", lines)


TABLES = {
    "accuracy": accuracy,
    "accuracy-short": accuracy_short,
    "agreement": agreement,
    "attention": attention,
    "classifier": classifier,
    "cpu": on_a_cpu,
    "eager": eager,
    "eager-kinds": eager_kinds,
    "faithfulness-imdb": lambda: faithfulness("imdb"),
    "faithfulness-short": faithfulness_short,
    "faithfulness-sst2": lambda: faithfulness("sst2"),
    "faithfulness-words": lambda: faithfulness_words("sst2"),
    "faithfulness-words-2000": lambda: faithfulness_words("sst2-2000"),
    "heads": heads,
    "images-accuracy": images_accuracy,
    "images-maps": images_maps,
    "million": million,
    "billion": billion,
    "corpus": corpus,
    "paper-claims": paper_claims,
    "out-of-core-cpu": lambda: out_of_core("cpu"),
    "out-of-core-gpu": lambda: out_of_core("gpu"),
    "serve": serve,
    "sharded-model": sharded,
    "shap": shap,
}


def filled(text: str, *, with_commits: bool = True) -> str:
    """Return a document with its tables written from the rows, and the commits of the rows below each.

    The README shows no commits. Its tables are also on other pages, or show rows of a longer table.
    """

    def made(match: re.Match[str]) -> str:
        commits.clear()
        content = TABLES[match[2]]()
        return f"{match[1]}{content}{commits_line() if with_commits else ''}{match[3]}"

    return MARKED.sub(made, text)


def documents() -> list[Path]:
    """Return the pages that have tables between markers."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(page for page in pages if MARKED.search(page.read_text()))


def main() -> int:
    check, stale = "--check" in sys.argv[1:], []
    for page in documents():
        before = page.read_text()
        after = filled(before, with_commits=page.name != "README.md")
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(after)
    for name in stale:
        print(f"{name}: {'differs from its rows' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
