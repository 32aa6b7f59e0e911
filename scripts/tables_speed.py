"""Tables of times and memory: routings, heads, streaming, the classifier and the server."""

from table_rows import GPU, Row, read, record, row, short, size, table

CALL = ("case", "batch", "n_inp", "n_out", "d_inp", "n_iters")  # tell the eager calls of a mode apart
BOTH = ("official", "fused")
EAGER_HEADS = ("routing", "probe, MLPs", "probe")


def eager(*, others: bool = True) -> str:
    """Tabulate eager forward + backward, compared with the authors' code, also eager.

    Args:
        others: False to leave out the shapes for which nothing was tuned.
    """
    lines = []
    for same in calls_of(implementation="official", kind="plain"):
        if (others or same["case"] != "others") and read(
            "eager", {"implementation": "fused", "kind": "plain", **same}
        ):
            theirs, ours = (row("eager", implementation=name, kind="plain", **same) for name in BOTH)
            times = [float(r["whole_ms"]) for r in (theirs, ours)]
            length = "any" if theirs["variable"] == "True" else "fixed"
            cells = (size(theirs), length, theirs["n_iters"], *(f"{t:.2f} ms" for t in times))
            lines.append((*cells, f"{times[0] / times[1]:.1f}x"))
    return table("sizes | length | iterations | authors' code | vecroute | faster", lines)


def calls_of(**wanted: str) -> list[Row]:
    """Return the sizes of the measured eager calls, each once."""
    found = (tuple(r[name] for name in CALL) for r in read("eager", {"mode": "tf32", **wanted}))
    return [{"mode": "tf32", **dict(zip(CALL, each, strict=True))} for each in dict.fromkeys(found)]


def eager_kinds() -> str:
    """Tabulate the same samples as a full batch, as a padded batch with a mask, and packed."""
    lines = []
    for same in calls_of(implementation="fused", kind="masked"):
        cells = []
        for kind in ("plain", "masked", "packed"):
            of_kind = {"kind": kind, "implementation": "fused", **same}
            found = row("eager", **of_kind) if read("eager", of_kind) else None
            cells.append(f"{float(found['whole_ms']):.2f} ms" if found else "-")
        lines.append((size(row("eager", kind="masked", implementation="fused", **same)), *cells))
    return table("sizes | all inputs | padded, with a mask | packed", lines)


def eager_heads() -> str:
    """Tabulate whole heads on padded hidden states with masks: eager, as one CUDA graph, and compiled."""
    lines = []
    found = {(r["batch"], r["n_inp"], r["d_inp"], r["mode"]) for r in read("eager", {"case": "heads"})}
    for batch, n_inp, d, mode in sorted(found, key=lambda key: (int(key[2]), key[3] != "tf32")):
        same = {"case": "heads", "batch": batch, "n_inp": n_inp, "mode": mode}
        heads = [row("eager", kind="masked", implementation=name, **same) for name in EAGER_HEADS]
        cells = [f"{float(r['whole_ms']):.1f} / {float(r['captured_ms']):.2f} ms" for r in heads]
        compiled = read("eager", {"kind": "compiled", **same})
        whole = f"{float(compiled[-1]['whole_ms']):.1f} ms" if compiled else "-"
        lines.append((f"{batch} x {int(n_inp):,} x {d}", mode, *cells, whole))
    names = "`RoutingHead` | probe with MLPs | probe | `RoutingHead`, compiled"
    return table(f"hidden states | precision | {names}", lines)


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


def linear() -> str:
    """Tabulate R^2 of straight lines over each size, while the GPU is busy."""
    lines = []
    for axis in ("n_inp", "n_out", "d_inp", "d_out", "n_iters"):
        found = [
            row("scaling_fits", case=f"busy {axis}", implementation=name, quantity=quantity, mode="fp32")
            for name in BOTH
            for quantity in ("forward_ms", "both_ms", "forward_mb")
        ]
        lines.append((axis, *(f"{float(fit['r2']):.4f}" for fit in found)))
    parts = "forward | forward + backward | memory of forward"
    names = " | ".join(f"{name}: {part}" for name in ("official", "fused") for part in parts.split(" | "))
    return table(f"over | {names}", lines)


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
    """Tabulate epochs and predictions of the demo's classifier on 2048 sentences."""
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


def throughput() -> str:
    """Tabulate training, hidden states, predictions and explanations on a GPU."""
    names = {
        "2047 phrases: later epoch, with validation": "an epoch of 2,047 phrases",
        "2047 phrases: first epoch, with captures and validation": "the same, with the captures of graphs",
        "2047 phrases: later epoch of three members, with validation": "an epoch of three members",
        "67000 phrases: later epoch, with validation": "an epoch of 67,000 phrases",
        "fit of 67000 phrases, 3 epochs, members 1: time": "`fit` of 67,000 phrases, 3 epochs, one member",
        "fit of 67000 phrases, 3 epochs, members 1: share of time in which the GPU works": (
            "share of this time in which the GPU works"
        ),
        "20000 texts: bare encoder, tokens given": "the encoder alone, tokens given",
        "20000 texts: bare encoder, tokenizing first": "the tokenizer, then the encoder",
        "20000 texts: predict_proba": "`predict_proba`",
        "20000 texts: first pass with cache": "hidden states into the cache",
        "words of 2048 sentences, bfloat16: one margin, batch 32": "words explained, 32 at a time",
        "words of 2048 sentences, bfloat16: explain_iter of one class": "words explained by `explain_iter`",
    }
    lines = []
    for what, name in names.items():
        found = row("throughput", what=what)
        lines.append((name, f"{short(found['value'])} {found['unit']}"))
    return table("| one H200", lines)


def serve() -> str:
    """Tabulate requests per second of 64 clients, one by one and in batches."""
    lines = []
    for texts, name in {"phrases": "six words", "sentences": "sentences of 21 words"}.items():
        single, batched = (row("serve", texts=texts, max_batch=n, max_waiting="256") for n in ("1", "64"))
        rates = [float(r["per_second"]) for r in (single, batched)]
        p99 = [f"{float(r['p99_ms']) / 1000:.2f} s" for r in (single, batched)]
        cells = (*(short(rate) for rate in rates), f"{rates[1] / rates[0]:.1f}x", *p99)
        lines.append((name, *cells, f"{short(batched['peak_mb'])} MB"))
    head = "texts | requests per second, one by one | in batches | faster"
    return table(f"{head} | p99 latency, one by one | in batches | peak memory", lines)
