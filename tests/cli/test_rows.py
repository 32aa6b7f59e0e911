"""Incomplete rows, unknown labels, impossible numbers, and the text that reaches a terminal."""

import io
import json
import os
import subprocess
import sys

import pandas as pd
import pytest
import torch

import vecroute as vr
from tests.cli.test_cli import failed
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.classifier.compare import show as show_compared
from vecroute.cli import threads
from vecroute.cli.evaluate import check_known
from vecroute.explain.faithfulness import show as show_measured
from vecroute.explain.rivals import METHODS
from vecroute.training import Recipe

COLUMNS = ("--text", "review", "--label", "stars")


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VECROUTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def fitted(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted") / "model"
    classifier = vr.RoutingClassifier(tiny, max_epochs=4, lr=0.01, batch_size=16)
    about = {"text column": "review", "label column": "stars"}
    classifier.fit(TEXTS, LABELS).save_pretrained(folder, about=about)
    return folder


# Rows

ROWS = "id;review;stars\n" + "".join(
    f"{k};{text};{label}\n" for k, (text, label) in enumerate(zip(TEXTS, LABELS, strict=True))
)
HOLES = ROWS + ";;\n121;  ;pos\n\n123;a film;\n"


def test_fit_skips_rows_and_says_which(run, tiny, tmp_path):
    (tmp_path / "train.csv").write_text(HOLES)
    out = tmp_path / "model"
    arguments = ["fit", tmp_path / "train.csv", *COLUMNS, "--encoder", tiny, "--epochs", 1]
    refused = run(*arguments, "--out", out, "--strict")
    message = "3 of 124 rows have no text (lines 122, 123, 124), 1 of 124 rows have no label (line 125)"
    assert failed(refused, f"{message}; without --strict")
    done = run(*arguments, "--out", out, "--keep-examples")
    assert done.code == 0
    assert done.out.splitlines()[0] == f"{out}: 2 classes from 120 texts"
    assert done.err == f"vecroute: {tmp_path / 'train.csv'}: {message}: skipped\n"
    examples = vr.RoutingClassifier.from_pretrained(out).examples_
    assert len(examples) == 3
    assert {LABELS[TEXTS.index(text)] for text in examples} == {"pos", "neg"}
    assert json.loads((out / "config.json").read_text())["examples"] == examples
    again = run(*arguments, "--out", out, "--force", "--seed", 1)
    assert again.code == 0, again.err
    assert vr.RoutingClassifier.from_pretrained(out).examples_ == []
    assert failed(run(*arguments, "--out", out), "exists: choose another --out")
    assert failed(run(*arguments, "--out", tmp_path, "--force"), "")
    assert (tmp_path / "train.csv").read_text() == HOLES


def test_evaluate_skips_rows_and_says_which(run, fitted, tmp_path):
    (tmp_path / "test.csv").write_text(HOLES)
    done = run("evaluate", fitted, tmp_path / "test.csv", "--json")
    result = json.loads(done.out)
    assert (result["n"], result["skipped"]) == (120, 4)
    assert "(lines 122, 123, 124)" in done.err
    assert failed(run("evaluate", fitted, tmp_path / "test.csv", "--strict"), "without --strict")


@pytest.mark.parametrize("to", ["csv", "jsonl"])
@pytest.mark.parametrize("rows", [1, 512])
def test_predict_gives_a_row_for_each_row(run, fitted, tmp_path, to, rows):
    (tmp_path / "test.csv").write_text(HOLES)
    done = run("predict", fitted, tmp_path / "test.csv", "--to", to, "--rows", rows)
    assert done.code == 0
    assert "4 rows" not in done.err
    assert "3 rows have no text (lines 122, 123, 124): their label is empty" in done.err
    if to == "csv":
        found = pd.read_csv(io.StringIO(done.out), dtype=str, keep_default_na=False)
        assert found.columns.tolist() == ["id", "review", "stars", "label", "neg", "pos"]
        assert found.iloc[120:123][["label", "neg", "pos"]].to_numpy().tolist() == [["", "", ""]] * 3
    else:
        found = pd.DataFrame([json.loads(line) for line in done.out.splitlines()])
        assert found["note"].tolist()[120:123] == ["no text"] * 3
        assert found["probabilities"].tolist()[120:123] == [{}] * 3
    expected = [*map(str, range(120)), "", "121", "", "123"]
    assert found["id"].tolist() == expected
    assert found["label"].tolist()[120:123] == ["", "", ""]
    texts = [*TEXTS, "a film"]
    classifier = vr.RoutingClassifier.from_pretrained(fitted)
    labels = found["label"].tolist()
    assert labels[:120] + labels[123:] == classifier.predict(texts).tolist()


def test_lines_of_a_file_and_of_standard_input_are_the_same(run, fitted, tmp_path):
    content = b"a good film\n\n \na dull film\r\n"
    (tmp_path / "some.txt").write_bytes(content)
    from_file, from_input = (
        run("predict", fitted, tmp_path / "some.txt"),
        run("predict", fitted, stdin=content),
    )
    assert from_file.out == from_input.out
    rows = [json.loads(line) for line in from_file.out.splitlines()]
    assert [row["text"] for row in rows] == ["a good film", "", " ", "a dull film"]
    assert [row["label"] == "" for row in rows] == [False, True, True, False]
    assert "standard input: 2 rows have no text (lines 2, 3)" in from_input.err
    assert run("predict", fitted, stdin=b"") == (0, "", "")


def test_columns_that_clash_get_a_suffix(run, fitted, tmp_path):
    row = {"review": "good", "label": "mine", "pos": 3, "probabilities": None}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    done = json.loads(run("predict", fitted, tmp_path / "a.jsonl").out)
    assert row.items() <= done.items()
    assert list(done)[4:] == ["label_predicted", "probabilities_predicted"]
    header = run("predict", fitted, tmp_path / "a.jsonl", "--to", "csv").out.splitlines()[0]
    assert header == "review,label,pos,probabilities,label_predicted,neg,pos_predicted"


def test_formulas_in_predictions(run, fitted):
    texts = b"=HYPERLINK(1)\n-5\n+good\n"
    csv_out, raw = (
        run("predict", fitted, "-", "--to", "csv", *more, stdin=texts).out for more in ([], ["--raw"])
    )
    assert [line.split(",")[0] for line in csv_out.splitlines()] == ["text", "'=HYPERLINK(1)", "-5", "'+good"]
    assert raw.splitlines()[1].startswith("=HYPERLINK(1),")
    assert json.loads(run("predict", fitted, stdin=texts).out.splitlines()[0])["text"] == "=HYPERLINK(1)"


# Labels


def test_labels_that_the_model_does_not_know(run, fitted, tmp_path):
    (tmp_path / "a.csv").write_text('review,stars,id\n"a\nfilm",pos,1\na film,Negg,2\na film,mixed,3\n')
    arguments = ("evaluate", fitted, tmp_path / "a.csv")
    message = (
        f"line 4 of {tmp_path / 'a.csv'} has the label 'Negg', which the model does not know; the nearest "
    )
    assert failed(run(*arguments), f"{message}class is 'neg' (1 more labels are unknown)")
    assert failed(run(*arguments, "--label", "id"), "line 2 of")
    allowed = json.loads(run(*arguments, "--allow-unknown", "--json").out)
    assert allowed["n"] == 3
    assert allowed["accuracy"] <= 1 / 3
    with pytest.raises(ValueError, match=r"the label 'postive', .* the nearest class is 'positive'"):
        check_known(
            ["negative", "postive"],
            ["line 2", "line 3"],
            ["negative", "positive", "mixed"],
            "it",
            "correct it",
        )


@pytest.mark.parametrize("missing", [float("nan"), None, pd.NA, pd.NaT])
def test_missing_labels_are_no_class(tiny, missing):
    with pytest.raises(ValueError, match="y must be one label for each text, row 1 is missing"):
        vr.RoutingClassifier(tiny).fit(TEXTS, ["pos", missing, *LABELS[2:]])
    with pytest.raises(ValueError, match="row 1 has a missing label"):
        vr.RoutingClassifier(tiny, multi_label=True).fit(TEXTS, [["a"], ["a", missing], *[["b"]] * 118])


# Numbers, devices, streams


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("fit", "a.csv", "--out", "m", "--epochs", 0),
            "'--epochs': Input should be greater than or equal to 1",
        ),
        (
            ("fit", "a.csv", "--out", "m", "--epochs", -1),
            "'--epochs': Input should be greater than or equal to 1",
        ),
        (
            ("fit", "a.csv", "--out", "m", "--batch-size", 0),
            "'--batch-size': Input should be greater than or equal to 1",
        ),
        (("fit", "a.csv", "--out", "m", "--lr", "nan"), "'--lr': nan is not a finite number"),
        (
            ("fit", "a.csv", "--out", "m", "--seed", -1),
            "'--seed': Input should be greater than or equal to 0",
        ),
        (("fit", "a.csv", "--out", "m", "--delimiter", "xy"), "'xy' is not one character"),
        (("compare", "a.csv", "--seeds", 0), "'--seeds': Input should be greater than or equal to 1"),
        (("predict", "m", "--rows", 0), "'--rows': Input should be greater than or equal to 1"),
        (
            ("faithfulness", "m", "a.csv", "--texts", -1),
            "'--texts': Input should be greater than or equal to 1",
        ),
        (("explain", "m", "a", "--top", 0), "'--top': Input should be greater than or equal to 1"),
        (("serve", "m", "--seconds", "inf"), "'--seconds'"),
        (("serve", "m", "--seconds", "nan"), "'--seconds'"),
        (("serve", "m", "--port", 70000), "'--port': Input should be less than or equal to 65535"),
        (("fit", "none.csv", "--out", "m"), "none.csv does not exist"),
        (("evaluate", "m", "none.csv"), "none.csv does not exist"),
        (("predict", "none", "none.csv"), "none.csv does not exist"),
        (("explain", "m", "a", "--html", "none/why.html"), "none is not a folder"),
        (("predict", "none"), "none is not a folder with a classifier"),
    ],
)
def test_what_cannot_be_is_said_at_once(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert failed(run(*arguments), message)


def test_a_device_that_holds_nothing(run, fitted):
    assert failed(run("predict", fitted, "--device", "meta", stdin=b"good"), "which computes nothing")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_epochs": 0}, "max_epochs must be a positive int, got 0"),
        ({"max_epochs": -1}, "max_epochs must be a positive int, got -1"),
        ({"batch_size": 0}, "batch_size must be a positive int, got 0"),
        ({"lr": 0.0}, "lr must be a finite number, more than 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"weight_decay": float("inf")}, "weight_decay must be a finite number, at least 0, got inf"),
        ({"drop_inputs": 1.5}, "drop_inputs must be from 0 to less than 1, got 1.5"),
        ({"label_smoothing": -0.1}, "label_smoothing must be from 0 to less than 1, got -0.1"),
        ({"patience": 0}, "patience must be a positive int, got 0"),
        ({"mixed_precision": "fp8"}, "mixed_precision must be one of 'auto', 'bf16', 'no', got 'fp8'"),
        ({"lr": "0.1"}, r"lr must be a number, got '0.1' \(str\)"),
        ({"label_smoothing": None}, r"label_smoothing must be a number, got None \(NoneType\)"),
    ],
)
def test_recipes_that_cannot_be(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Recipe(**given)


@pytest.mark.parametrize(
    ("streams", "code", "message"),
    [
        ("<&-", 2, "vecroute: standard input is closed: name a file to read\n"),
        ("</dev/null >&-", 2, "vecroute: standard output is closed\n"),
        ("</dev/null 2>&-", 2, ""),
    ],
)
def test_closed_streams(fitted, streams, code, message):
    """``predict`` gets a table that does not exist, or a closed stream."""
    arguments = f"{fitted}" if "<&-" in streams else f"{fitted} none.csv"
    line = f"{sys.executable} -m vecroute predict {arguments} {streams}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=os.environ, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", message)


def test_the_version(run):
    done = run("--version")
    assert (done.code, done.out) == (0, f"vecroute {vr.__version__}\n")


# Terminals


def test_control_characters_of_data_do_not_reach_the_terminal(run, tiny, tmp_path):
    hostile = "neg\x1b]0;owned\x07\x9b2J[bold]"
    labels = [hostile if label == "neg" else label for label in LABELS]
    table = pd.DataFrame({"review": TEXTS, "stars": labels})
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    model = tmp_path / "model"
    arguments = (tmp_path / "a.jsonl", *COLUMNS)
    shown = [run("fit", *arguments, "--encoder", tiny, "--epochs", 1, "--out", model)]
    shown += [run("evaluate", model, tmp_path / "a.jsonl"), run("explain", model, TEXTS[-1])]
    shown += [run("predict", model, tmp_path / "a.jsonl")]
    table.replace(hostile, "x\x1b[31m").to_json(tmp_path / "b.jsonl", orient="records", lines=True)
    shown += [
        run("evaluate", model, tmp_path / "b.jsonl"),
        run("evaluate", model, tmp_path / "a.jsonl", "--label", "\x1b"),
    ]
    shown.append(run("explain", model, "a good \u202e film", "--json"))
    assert [done.code for done in shown] == [0, 0, 0, 0, 2, 2, 0]
    for done in shown:
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*done.out, *done.err}
    assert json.loads(shown[-1].out)["text"] == "a good \u202e film"
    assert "\\x1b]0;owned\\x07\\x9b2J[bold]" in shown[1].out


def test_tables_fit_100_columns_and_name_the_best(capsys, monkeypatch):
    measures = ("comprehensiveness_masked", "completeness_error", "seconds")
    same = {"low": -0.12345, "high": 123456.7, "texts": 10_000}
    summary = [
        {"method": method, "measure": measure, "mean": 0.123456 * k} | same
        for measure in measures
        for k, method in enumerate(METHODS, 1)
    ]
    show_measured(summary)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    legend = ["comprehensiveness", "completeness_error", "_masked", "seconds"]
    assert [line.split(":")[0] for line in lines[-4:]] == legend
    assert len(lines) == 1 + len(measures) + len(summary) + len(legend)  # no line is wrapped
    best = [line for line in lines if line.rstrip().endswith("best")]
    assert len(best) == 3
    assert "random" in best[0]  # the last method has the highest value
    assert best[1].split()[0] == next(iter(METHODS))
    ways = [line.split()[1] for line in lines if "is better" in line]
    assert ways == ["higher", "lower", "lower"]
    row = {"spread": 0.01, "difference": 0.1, "p": 0.5, "seconds": 12345.6, "parameters": 123_456_789}
    rows = [
        row | {"head": head, "accuracy": accuracy}
        for head, accuracy in (("scalar_mix", 0.8), ("routing", 0.9))
    ]
    show_compared(rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[2].split()[0] == "routing"
    assert lines[2].rstrip().endswith("best")
    assert "Higher accuracy" in lines[3]
    monkeypatch.setenv("FORCE_COLOR", "1")
    show_compared(rows)
    assert "\x1b[1m0.9000\x1b[0m" in capsys.readouterr().out


def test_no_more_threads_than_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "CGROUPS", tmp_path)
    monkeypatch.setattr(threads, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    (tmp_path / "own").write_text("0::/a/b\n")
    (tmp_path / "a/b").mkdir(parents=True)
    assert threads.usable_cores() == 8
    (tmp_path / "a/cpu.max").write_text("350000 100000\n")
    (tmp_path / "a/b/cpu.max").write_text("max 100000\n")
    assert threads.usable_cores() == 4
    (tmp_path / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert threads.usable_cores() == 1
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for now in (1, 8):  # OMP_NUM_THREADS=1 stays
        monkeypatch.setattr(torch, "get_num_threads", lambda now=now: now)
        threads.limit_threads()
    assert asked == [1]


def test_the_library_itself_leaves_the_threads(fitted, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", None)
    vr.RoutingClassifier.from_pretrained(fitted).predict(TEXTS[:2])
