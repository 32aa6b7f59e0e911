"""Tables of the paper's claims, of a billion vectors or texts, and of killed processes."""

import sys

from table_rows import GPU, ROOT, TASKS, read, record, row, short, table
from tables_accuracy import score


def fits(quantity: str) -> str:
    """Write R^2 of straight lines over each size, in the newest precision in which they were measured."""
    axes = ("n_inp", "n_out", "d_inp", "d_out", "n_iters")
    found = {axis: row("scaling_fits", case=f"busy {axis}", quantity=quantity, device=GPU) for axis in axes}
    values = ", ".join(f"{axis} {float(fit['r2']):.3f}" for axis, fit in found.items())
    return f"R² of {found['n_inp']['mode']}: {values}"


def crossover(quantity: str) -> str:
    """Write up to which length a routing needs less than an encoder layer, in float32 as in the paper."""
    found = row("attention_crossovers", quantity=quantity, mode="fp32", launch="eager")
    if found["relation"] == "never":
        return "never in fp32"
    until = f"up to {float(found['N']):,.0f}" if found["relation"] == "at" else "up to the longest measured"
    return f"from {int(found['from_N']):,} {until} in fp32, eager"


def paper_claims() -> str:
    """Tabulate every claim of section 5 of the paper, and our measurement of it."""
    million = row("scaling", case="headline", length="fixed", mode="fp32", implementation="fused")
    memory = f"{float(million['forward_mb']) * 2**20 / 1e9:.1f} GB forward in fp32"
    longest = row("scaling", case="longest", mode="fp32", implementation="fused")
    routed = f"yes: {float(longest['forward_ms']):.1f} ms forward in fp32"
    time = row("credit", what="4925 x 1000 end-to-end credit of unit variance: time")
    credited = f"yes: {float(time['value']):.0f} ms on a CPU"
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
        ("routes 89,600 vectors", "yes", routed, command("scaling.py --cases longest")),
        ("end-to-end credit of 4925 x 1000", "yes", credited, command("credit.py --parts images")),
        (
            "end-to-end credit is interpretable",
            "typical examples",
            f"not here: comprehensiveness {compared('phi')} on two heads, chance {compared('random')}",
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
    """Tabulate a step over a billion vectors on several GPUs, simulated by benchmarks/sharded_model.py."""
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
    """Tabulate the time of a billion texts on one GPU and on a hundred."""
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


def killed() -> str:
    """The newest run of each command over made-up texts in which a process is killed."""
    dates = {r["command"]: r["date"] for r in read("million_texts", {})}
    newest = [r for r in read("million_texts", {}) if r["date"] == dates[r["command"]]]
    record("million_texts", newest)
    lines = [(*r["what"].rsplit(": ", 1), f"{short(r['value'])} {r['unit']}") for r in newest]
    return table("corpus and encoder | run | ", lines)
