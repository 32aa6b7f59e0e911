"""The command line: every command, in pipes too, and every mistake in one clear line that leaves nothing."""

import gzip
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file

import vecroute as vr
from tests.helpers.texts import LABELS, LONG, TEXTS
from tests.helpers.tiny_models import save_tiny
from tests.helpers.typed import Done
from vecroute.cli import main
from vecroute.cli.common import told
from vecroute.training import Trainer, loop


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    """Store the hidden states of the tests in their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VECROUTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# This program forks a process for each command it reads, with files in place of the terminal.
TERMINAL = """
import json, os, resource, signal, sys
import torch
from vecroute.classifier import RoutingClassifier
from vecroute.classifier.parts import encoder_for
from vecroute.io import tables
from vecroute.training import loop
from vecroute.cli import main
torch.set_num_threads(1)
encoder_for(RoutingClassifier(sys.argv.pop()), torch.device("cpu"))  # once for all
for line in sys.stdin:
    asked = json.loads(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    for place, name in enumerate(asked["files"], 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), place)
    os.environ["VECROUTE_CACHE"] = asked["cache"]
    loop.CHECKPOINT_SECONDS = asked["checkpoint_seconds"]
    if asked["limit"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["limit"],) * 2)
    sys.argv[1:] = asked["arguments"]
    main()
"""


@pytest.fixture(scope="module")
def terminal(tiny):
    """Start a process that runs commands. The hub may be asked there, but does not answer."""
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", TERMINAL, tiny]
    with subprocess.Popen(command, env=os.environ | nobody, **pipes, text=True, bufsize=1) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def started(terminal, tmp_path):
    """Run a command in another process."""

    def typed(*arguments, stdout=None, limit=None, checkpoint_seconds=5, cache=None):
        files = [str(stdout or tmp_path / "out"), str(tmp_path / "err")]
        asked = {"arguments": [*map(str, arguments)], "files": files, "limit": limit}
        asked["cache"] = str(cache or os.environ["VECROUTE_CACHE"])
        terminal.stdin.write(json.dumps(asked | {"checkpoint_seconds": checkpoint_seconds}) + "\n")
        code = int(terminal.stdout.readline())
        out = "" if stdout else (tmp_path / "out").read_text()
        return Done(code, out, (tmp_path / "err").read_text())

    return typed


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def table():
    return pd.DataFrame({"id": range(len(TEXTS)), "review": TEXTS, "stars": LABELS})


@pytest.fixture(scope="module")
def data(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.csv"
    table.to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def fitted(tiny, data, tmp_path_factory):
    """Return a model folder that ``vecroute fit`` wrote."""
    out = tmp_path_factory.mktemp("fitted") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vecroute", *map(str, fit_arguments(tiny, data, out))])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0
    return out


def fit_arguments(tiny, data, out, *more):
    columns = ("--text", "review", "--label", "stars", "--encoder", tiny)
    return ["fit", data, *columns, "--out", out, "--epochs", 20, "--lr", 0.01, "--batch-size", 16, *more]


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def failed(done, message, code=2):
    """Check that a command fails with one line that says what is wrong, and prints nothing else."""
    assert done.code == code, done
    assert done.out == ""
    assert done.err.startswith("vecroute: "), done.err
    assert done.err.count("\n") == 1, done.err
    assert message in done.err, done.err
    return True


# Commands


@pytest.mark.parametrize("command", ["fit", "predict", "evaluate", "explain", "demo"])
def test_help_has_an_example(run, command):
    done = run(command, "--help")
    assert done.code == 0
    assert f"vecroute {command}" in done.out.partition("Example:")[2]


def test_help_without_a_command(run):
    assert run() == run("--help")
    assert all(command in run().out for command in ("fit", "predict", "evaluate", "explain", "demo"))


@pytest.mark.parametrize(
    ("ending", "write"),
    [
        ("csv", lambda table, path: table.to_csv(path, index=False)),
        ("csv.gz", lambda table, path: table.to_csv(path, index=False)),
        ("tsv", lambda table, path: table.to_csv(path, index=False, sep="\t")),
        ("jsonl", lambda table, path: table.to_json(path, orient="records", lines=True)),
        ("jsonl.gz", lambda table, path: table.to_json(path, orient="records", lines=True)),
        ("parquet", lambda table, path: table.to_parquet(path)),
    ],
)
def test_tables_of_every_kind_give_the_same_classifier(run, tiny, table, fitted, tmp_path, ending, write):
    write(table, tmp_path / f"train.{ending}")
    done = run(*fit_arguments(tiny, tmp_path / f"train.{ending}", tmp_path / "model"))
    assert done.code == 0, done.err
    assert done.err == ""
    assert done.out.startswith(f"{tmp_path / 'model'}: 2 classes from 120 texts\n")
    assert names(tmp_path) == sorted(
        ["model", "model/README.md", "model/config.json", "model/model.safetensors", f"train.{ending}"]
    )
    expected, found = (load_file(folder / "model.safetensors") for folder in (fitted, tmp_path / "model"))
    assert all((found[name] == expected[name]).all() for name in expected)


def test_predict_lines_of_standard_input(run, fitted):
    lines = ["a good, witty film", "a dull and slow plot", 'it is "fine" über alles']
    done = run("predict", fitted, stdin="\n".join(lines).encode())
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in done.out.splitlines()]
    classifier = vr.RoutingClassifier.from_pretrained(fitted)
    assert [row["text"] for row in rows] == lines
    assert [row["label"] for row in rows] == classifier.predict(lines).tolist()
    for row, p in zip(rows, classifier.predict_proba(lines), strict=True):
        assert row["probabilities"] == pytest.approx({"neg": p[0], "pos": p[1]}, abs=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_predict_a_table_a_few_rows_at_a_time(run, fitted, data, table, rows):
    done = run("predict", fitted, data, "--to", "csv", "--rows", rows)
    assert done.code == 0, done.err
    found = pd.read_csv(io.StringIO(done.out))
    assert found.columns.tolist() == ["id", "review", "stars", "label", "neg", "pos"]
    assert found[["id", "review", "stars"]].to_numpy().tolist() == table.to_numpy().tolist()
    expected = vr.RoutingClassifier.from_pretrained(fitted).predict_proba(table["review"])
    assert abs(found[["neg", "pos"]].to_numpy() - expected).max() < 1e-5


def test_predict_a_table_from_standard_input(run, fitted, table):
    text = "\n".join(json.dumps({"words": text}) for text in table["review"][:5])
    done = run("predict", fitted, "-", "--from", "jsonl", "--text", "words", stdin=text.encode())
    assert [json.loads(line)["words"] for line in done.out.splitlines()] == table["review"][:5].tolist()


def test_evaluate_gives_one_json_object(run, fitted, data, table):
    done = run("evaluate", fitted, data, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    right = vr.RoutingClassifier.from_pretrained(fitted).predict(table["review"]) == table["stars"]
    assert result["accuracy"] == pytest.approx(right.mean())
    assert result["n"] == 120
    assert 0.5 < result["macro_f1"] <= 1
    assert 0 <= result["calibration_error"] <= 1
    assert result["labels"] == ["neg", "pos"]
    assert [sum(row) for row in result["confusion"]] == [60, 60]
    assert set(result["per_class"]["pos"]) == {"precision", "recall", "f1", "n"}


def test_evaluate_shows_tables_and_labels_it_does_not_know(run, fitted, tmp_path):
    (tmp_path / "test.tsv").write_text("stars\treview\npos\ta good film\nmixed\ta fine, dull film\n")
    done = run("evaluate", fitted, tmp_path / "test.tsv", "--allow-unknown")
    assert done.code == 0, done.err
    for word in ("accuracy", "macro F1", "calibration error", "precision", "label \\ predicted", "mixed"):
        assert word in done.out
    assert (
        json.loads(run("evaluate", fitted, tmp_path / "test.tsv", "--allow-unknown", "--json").out)[
            "accuracy"
        ]
        <= 0.5
    )


def test_columns_may_have_other_names_later(run, fitted, data, table, tmp_path):
    table.rename(columns={"review": "words", "stars": "kind"}).to_csv(tmp_path / "test.csv", index=False)
    named = run("evaluate", fitted, tmp_path / "test.csv", "--text", "words", "--label", "kind", "--json")
    assert json.loads(named.out) == json.loads(run("evaluate", fitted, data, "--json").out)
    assert failed(
        run("evaluate", fitted, tmp_path / "test.csv"), "has no column 'review', it has 'id', 'words'"
    )


def test_labels_that_are_numbers(run, tiny, table, tmp_path):
    table = table.assign(stars=table["stars"].map({"neg": 1, "pos": 10}))
    table.to_csv(tmp_path / "train.csv", index=False)
    table.to_parquet(tmp_path / "test.parquet")
    assert run(*fit_arguments(tiny, tmp_path / "train.csv", tmp_path / "model")).code == 0
    results = [
        json.loads(run("evaluate", tmp_path / "model", tmp_path / name, "--json").out)
        for name in ("train.csv", "test.parquet")
    ]
    assert results[0] == results[1]
    assert results[0]["labels"] == ["1", "10"]
    assert [sum(row) for row in results[0]["confusion"]] == [60, 60]


def test_explain_in_the_terminal_as_json_and_as_a_page(run, fitted, tmp_path):
    text = "a good, witty film"
    done = run("explain", fitted, text, "--class", "pos")
    assert done.code == 0, done.err
    assert "witty" in done.out
    done = run("explain", fitted, text, text[::-1], "--json", "--by", "token")
    first, second = map(json.loads, done.out.splitlines())
    assert (first["text"], second["text"]) == (text, text[::-1])
    for name in ("neg", "pos"):
        total = sum(part["values"][name] for part in first["parts"]) + first["base_values"][name]
        assert total == pytest.approx(first["scores"][name], abs=1e-4)
    assert [text[part["start"] : part["end"]] for part in first["parts"]][1:3] == ["a", "good"]
    assert run("explain", fitted, text, "--html", tmp_path / "why.html").code == 0
    html = (tmp_path / "why.html").read_text()
    # The terminal shows what the page shows first, and the page has the hidden states as its second view.
    title = re.search("<h2[^>]*>(Why [^<]*)</h2>", html).group(1)
    assert title in run("explain", fitted, text).out
    assert "Second view: inner states" in html
    states = json.loads(run("explain", fitted, text, "--json", "--of", "states", "--by", "token").out)
    assert (first["of"], states["of"]) == ("words", "states")
    assert states["scores"] == pytest.approx(first["scores"], abs=1e-4)
    assert states["parts"] != first["parts"]
    assert run("explain", fitted, "--json", stdin=text.encode()).out.count("\n") == 1


def test_explain_with_samples(run, fitted, tmp_path):
    text = "a good, witty film"
    plain, sampled = (json.loads(run("explain", fitted, text, "--json", "--samples", k).out) for k in (0, 4))
    assert plain["parts"] != sampled["parts"]
    for name in ("neg", "pos"):
        total = sum(part["values"][name] for part in sampled["parts"])
        total += sampled["base_values"][name] + sampled["not_explained"][name]
        assert total == pytest.approx(plain["scores"][name], abs=1e-4)
    assert run("explain", fitted, text, "--samples", 4, "--html", tmp_path / "why.html").code == 0


def test_a_document_of_100000_characters_goes_through_every_command(run, fitted, tmp_path):
    text = (LONG * 101)[:100_000].strip()
    pd.DataFrame({"review": [text, "good"], "stars": ["pos", "pos"]}).to_csv(tmp_path / "long.csv")
    assert json.loads(run("evaluate", fitted, tmp_path / "long.csv", "--json").out)["n"] == 2
    assert json.loads(run("predict", fitted, stdin=text.encode()).out)["text"] == text
    assert json.loads(run("explain", fitted, "--json", stdin=text.encode()).out)["text"] == text


def test_a_pipe_that_is_closed_early_is_no_error(started, fitted, data, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["head", "-n", "2", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as head:
        done = started("predict", fitted, data, "--rows", 8, stdout=tmp_path / "pipe")
        lines = head.stdout.readlines()
    assert (done.code, done.err) == (0, "")
    assert [json.loads(line)["review"] for line in lines] == TEXTS[:2]


# Mistakes


def put(name, text):
    """Write a table in place of the good one."""

    def change(folder):
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder / name

    return change


GOOD = "review,stars\n" + "a good film,pos\na dull film,neg\n" * 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: folder / "none.csv", "none.csv does not exist"),
        (lambda folder: folder, "must have a folder of images for each of two classes or more"),
        (put("a.xlsx", "?"), "a.xlsx must end with .csv, .tsv, .jsonl, .parquet or .txt, maybe with .gz"),
        (put("a.csv", "words,stars\na,b\n"), "a.csv has no column 'review', it has 'words', 'stars'"),
        (put("a.csv", "review,label\na,b\n"), "a.csv has no column 'stars', it has 'review', 'label'"),
        (put("a.jsonl", '{"review": "a"}\n'), "a.jsonl has no column 'stars', it has 'review'"),
        (put("a.csv", ""), "a.csv is empty"),
        (put("a.jsonl", "\n\n"), "a.jsonl is empty"),
        (put("a.csv", "review,stars\n"), "a.csv is empty: it has no rows"),
        (put("a.csv.gz", gzip.compress(b"")), "a.csv.gz is empty"),
        (put("a.csv.gz", "no gzip"), "a.csv.gz could not be read"),
        (put("a.parquet", "no parquet"), "a.parquet could not be read"),
        (put("a.jsonl", '{"review"'), "a.jsonl could not be read"),
        (put("a.csv", 'review,stars\n"a,b\n'), "a.csv could not be read"),
        (put("a.csv", GOOD.replace("dull", "é").encode("latin-1")), "not UTF-8 text: it has the byte 0xe9"),
        (put("a.jsonl", b'{"review": "caf\xe9", "stars": "pos"}\n'), "not UTF-8 text: it has the byte 0xe9"),
        (put("a.csv", GOOD.replace("neg", "pos")), "two classes or more, all have the label pos"),
        (put("a.csv", GOOD + "a film,mixed\n"), "two examples or more of each class, got one of: mixed"),
        (put("a.csv", GOOD + "a,b,c\n"), "line 22 has 3 cells, the header has 2"),
        (put("a.csv", GOOD + '"a" b,c\n'), "line 22: ',' expected after '\"'; a quote inside"),
        (put("a.csv", GOOD + '"a,\nb,c\n'), "the row of line 22 has a quote that is not closed"),
        (put("a.csv", "\nreview,stars\n"), "a.csv has no column names: its first line is empty"),
        (put("a.jsonl", '{"review": null, "stars": "pos"}\n'), "1 of 1 rows have no text (line 1)"),
        (put("a.jsonl", '\n{"review": 7, "stars": "pos"}\n'), "must have texts, line 2 has 7 (int)"),
        (put("a.jsonl", "[" * 200_000 + "\n"), "line 1 is nested too deep"),
        (put("a.jsonl", "[1]\n"), "line 1 is not a JSON object, but list"),
        (put("a.txt", "a good film\n"), "a.txt has no column 'stars', it has 'text'"),
        (put("a.txt", ""), "a.txt is empty: it has no rows"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_fitted(run, tiny, tmp_path, change, message):
    path = change(tmp_path)
    before = names(tmp_path)
    assert failed(run(*fit_arguments(tiny, path, tmp_path / "new" / "model")), message)
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--encoder", "someone/model-that-is-nowhere"), "could not be loaded"),
        (("--encoder", "nowhere/at/all"), "encoder 'nowhere/at/all' could not be loaded"),
        (("--head", "nonsense"), "head must be one of 'routing', 'wide', 'paper'"),
        (("--device", "nonsense"), "device must be cpu, cuda, cuda:0, ..., got 'nonsense'"),
        (("--max-length", "9999"), "at most the 40 positions"),
        (("--stride", "100"), "stride must be from 0 to"),
        (("--validation", "2"), "validation_fraction must be from 0 to less than 1, got 2.0"),
        (("--lr", "fast"), "'--lr'"),
        (("--nonsense",), "--nonsense"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(run, tiny, data, tmp_path, arguments, message):
    assert failed(run(*fit_arguments(tiny, data, tmp_path / "new" / "model", *arguments)), message)
    assert names(tmp_path) == []


def test_commands_that_are_none(run):
    assert failed(run("nonsense"), "No such command 'nonsense'")
    assert failed(run("fit"), "Missing argument")


@pytest.mark.slow  # the library of the hub retries
def test_no_network_for_a_name_on_the_hub(started, data, tmp_path):
    done = started(*fit_arguments("someone/some-model", data, tmp_path / "model"))
    assert failed(done, "encoder 'someone/some-model' could not be loaded")
    assert names(tmp_path) == ["err", "out"]


def test_an_output_folder_that_exists_or_cannot_be(run, tiny, data, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("no folder")
    assert failed(run(*fit_arguments(tiny, data, tmp_path / "model")), "model exists: choose another --out")
    assert failed(run(*fit_arguments(tiny, data, tmp_path / "file")), "file exists: choose another --out")
    assert failed(
        run(*fit_arguments(tiny, data, tmp_path / "file" / "model")), "file is not a folder to write to"
    )
    assert names(tmp_path) == ["file", "model"]


def rewrite(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


@pytest.mark.parametrize("command", ["predict", "evaluate", "explain"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is not a folder with a classifier"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (rewrite("config.json", lambda data: data[:-40]), "is damaged"),
        (rewrite("config.json", lambda data: data.replace(b'"neg"', b'"bad"')), "config.json in"),
        (rewrite("model.safetensors", lambda data: data[:-40]), "is damaged"),
        (rewrite("model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])), "or was changed"),
    ],
)
def test_a_model_folder_that_is_not_as_it_was_written(run, fitted, data, tmp_path, command, damage, message):
    model = Path(shutil.copytree(fitted, tmp_path / "model"))
    damage(model)
    arguments = {"predict": [], "evaluate": [data], "explain": ["a good film"]}[command]
    assert failed(run(command, model, *arguments, stdin=b"a good film"), message)


def test_another_encoder(run, fitted, data, tmp_path):
    other = save_tiny(tmp_path / "other", seed=1)
    done = run("evaluate", fitted, data, "--encoder", other)
    assert failed(done, "is not the one that")
    assert failed(
        run("predict", fitted, "--encoder", tmp_path / "gone", stdin=b"good"), "could not be loaded"
    )


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["predict", "--from", "csv"], b"review\na film\n\xe9\n", "it has the byte 0xe9"),
        (["predict"], b"caf\xe9s\n", "is not UTF-8 text: it has the byte 0xe9 after 'caf'; save it as UTF-8"),
        (["predict"], b"\xff\xfea\x00\n", "standard input is not UTF-16 text: it has the byte 0x0a"),
        (["predict", "--from", "json"], b"", "Invalid value for '--from': 'json' is not one of"),
        (["predict", "--strict"], b"good\n\n", "standard input: line 2 has no text"),
        (["predict", "--from", "csv"], b"words\na film\n", "no column 'review', it has 'words'"),
        (["explain"], b"", "there is no text: give one, or lines on standard input"),
        (["explain", "good", " "], b"", "text 2 is empty"),
        (["explain", "good", "bad", "--html", "why.html"], b"", "--html takes one text, got 2"),
        (["explain", "good", "--samples", "3"], b"", "--samples must be an even number, 0 for none, got 3"),
        (["explain", "good", "--samples", "-2"], b"", "--samples must be an even number, 0 for none, got -2"),
        (["explain", "good", "--samples", "2", "--of", "states"], b"", "must be 0 unless --of words"),
        (["explain", "good", "--samples", "2", "--by", "depth"], b"", "--samples must be 0 with --by depth"),
        (["explain", "--samples", "2", "--data", "a", "--out", "b"], b"", "--samples is for single texts"),
        (["explain", "good", "--class", "x"], b"", "--class must be one of 'neg', 'pos', got 'x'"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_classified(run, fitted, arguments, stdin, message):
    command, *rest = arguments
    rest = ["-", *rest] if rest and command == "predict" else rest
    assert failed(run(command, fitted, *rest, stdin=stdin), message)


def test_rows_are_counted_from_the_beginning_of_the_file(run, fitted):
    done = run("predict", fitted, "-", "--strict", "--rows", 2, stdin=b"a\nb\nc\nd\n\n")
    assert done.code == 2
    assert done.out.count("\n") == 4  # earlier rows are written
    assert "line 5 has no text" in done.err


@pytest.mark.parametrize("checkpoint_seconds", [0, 1000])
def test_no_room_on_the_disk(started, tiny, data, tmp_path, checkpoint_seconds):
    """The system refuses to write more than 2000 bytes to a file. Every file of weights is larger."""
    arguments = fit_arguments(tiny, data, tmp_path / "model", "--seed", checkpoint_seconds)
    done = started(*arguments, limit=2000, checkpoint_seconds=checkpoint_seconds, cache=tmp_path / "cache")
    assert (done.code, done.out) == (2, "")
    *warnings, error = done.err.splitlines()
    assert all(re.search("continu(ing|es) without", line) for line in warnings)  # the cache is optional
    assert error.startswith("vecroute: [Errno 27] File too large")
    assert [name for name in names(tmp_path) if not name.startswith("cache")] == ["err", "out"]
    assert list((tmp_path / "cache").rglob("*.*")) == []


def test_no_room_for_the_output(started, fitted, data):
    assert failed(started("predict", fitted, data, stdout="/dev/full"), "No space left on device")


@pytest.fixture
def ctrl_c():
    """Let SIGINT interrupt, as in a terminal. Shells start background processes that ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_interrupted_the_same_command_goes_on_to_the_same_weights(
    run, tiny, data, fitted, tmp_path, monkeypatch
):
    step, done = Trainer.train_step, []

    def interrupted(self, which):
        if len(done) == 9:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does
        done.append(which)
        return step(self, which)

    def counted(self, which):
        if self.checkpoint is not None:  # the heads of the estimate have no checkpoint
            resumed.append(which)
        return step(self, which)

    arguments = fit_arguments(tiny, data, tmp_path / "model")
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(Trainer, "train_step", interrupted)
    message = f"interrupted: the same command resumes from {tmp_path / '.model.partial'}"
    assert failed(run(*arguments), message, code=130)
    assert names(tmp_path) == [".model.partial"]
    resumed = []
    monkeypatch.setattr(Trainer, "train_step", counted)
    assert run(*arguments).code == 0
    history = json.loads((tmp_path / "model/config.json").read_text())["history"]
    assert len(done) + len(resumed) == 8 * len(history)
    assert names(tmp_path) == ["model", "model/README.md", "model/config.json", "model/model.safetensors"]
    expected, found = (load_file(folder / "model.safetensors") for folder in (fitted, tmp_path / "model"))
    assert all((found[name] == expected[name]).all() for name in expected)


@pytest.mark.usefixtures("ctrl_c")
def test_interrupted_before_there_is_anything_to_go_on_from(run, tiny, data, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", lambda *_: signal.raise_signal(signal.SIGINT))
    assert failed(run(*fit_arguments(tiny, data, tmp_path / "model")), "interrupted", code=130)
    assert names(tmp_path) == []


def test_without_its_packages_the_command_names_the_extra(tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(name='typer')")
    done = subprocess.run(
        [sys.executable, "-m", "vecroute", "fit"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert failed(Done(done.returncode, done.stdout, done.stderr), "needs typer: pip install 'vecroute[cli")


def test_the_command_line_leaves_the_levels_of_loggers_as_they_were():
    loggers = [logging.getLogger(name) for name in ("vecroute", "vecroute.training")]
    before = [logger.level for logger in loggers]
    with told():
        assert loggers[1].level == logging.WARNING
    assert [logger.level for logger in loggers] == before == [logging.NOTSET] * 2
