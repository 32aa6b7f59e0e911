"""The first hour of a new user, from a messy table to a model on the hub, on files that this test makes."""

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

import vecroute as vr
from tests.classifier.test_hub import Hub
from tests.cli.test_cli import failed
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with an encoder and with messy tables: semicolons, empty cells, a typo, notes."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "encoder")
    rows = [f"{k};{text};{label}" for k, (text, label) in enumerate(zip(TEXTS, LABELS, strict=True))]
    (folder / "train.csv").write_text(
        "\n".join(["id;review;stars", *rows[:50], ";;", *rows[50:], "121;;pos", ""])
    )
    tested = ["id;review;stars", *rows[::7], "", "9;a film;"]
    (folder / "test.csv").write_text("\n".join([*tested, ""]))
    (folder / "typo.csv").write_text("\n".join([*tested[:3], "3;a good film;poss", ""]))
    (folder / "notes.txt").write_text("a good film\n\na dull film\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VECROUTE_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(autouse=True)
def at_home(home, monkeypatch):
    monkeypatch.chdir(home)


FIT = ["fit", "train.csv", "--text", "review", "--label", "stars", "--encoder", "encoder", "--epochs", "30"]
FIT += ["--lr", "0.01", "--batch-size", "16"]


def refused(done, message):
    """Check that the last line says what is wrong, after a line about skipped rows."""
    note, error = done.err.splitlines(keepends=True)
    assert note.endswith("skipped\n")
    return failed(done._replace(err=error), message)


def on_a_terminal(*arguments, terminal=True):
    """Run a command in a new process, and return its exit code, output, and the text on the terminal."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "vecroute", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=slave if terminal else subprocess.PIPE
    ) as process:
        os.close(slave)
        shown = b""
        try:
            while terminal and (some := os.read(master, 65536)):
                shown += some
        except OSError:  # the other end is closed
            pass
        out, err = process.communicate()
    os.close(master)
    return process.returncode, out.decode(), (shown if terminal else err).decode()


def test_1_and_7_fit_skips_holes_shows_progress_and_says_what_it_wrote(home):
    code, out, shown = on_a_terminal(*FIT, "--out", "model")
    assert code == 0, shown
    first, accuracy, recall, advice = out.splitlines()
    assert first == "model: 2 classes from 120 texts"
    assert re.fullmatch(
        r"accuracy about \d\.\d\d \(\d\.\d\d to \d\.\d\d\), by cross-validation on 120 texts; "
        r"always 'neg': 0\.50",
        accuracy,
    )
    assert re.fullmatch(r"recall: (neg|pos) \d\.\d\d, (neg|pos) \d\.\d\d", recall)
    assert advice.startswith("next: ")
    assert "train.csv: 2 of 122 rows have no text (lines 52, 123): skipped" in shown.replace("\r\n", "\n")
    assert "hidden states" in shown
    assert "training" in shown
    assert {path.name for path in (home / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }


def test_6_the_model_is_replaced_only_when_asked_and_only_if_it_is_one(run, home):
    assert failed(
        run(*FIT, "--out", "model"), "model exists: choose another --out, or replace a model with --force"
    )
    (home / "mine").mkdir(exist_ok=True)
    (home / "mine/thesis.txt").write_text("years of work")
    assert failed(run(*FIT, "--out", "mine", "--force"), "mine")
    assert (home / "mine/thesis.txt").read_text() == "years of work"
    weights = []
    for _ in range(2):  # in one process: the number of threads changes the last digits
        assert run(*FIT, "--out", "model", "--force").code == 0
        weights.append(load_file(home / "model/model.safetensors"))
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())  # the same seed
    classifier = vr.RoutingClassifier.from_pretrained("model")
    classifier.save_pretrained("again")
    classifier.save_pretrained("again", overwrite=True)
    assert run("--version").out == f"vecroute {vr.__version__}\n"


def test_6_a_page_can_be_had_without_a_file():
    page = vr.RoutingClassifier.from_pretrained("model").explain("a good film").to_html()
    assert "</html>" in page
    assert "good" in page


def test_1_and_2_predict_keeps_rows_and_columns(run, home):
    done = run("predict", "model", "test.csv", "--to", "csv")
    found = pd.read_csv(io.StringIO(done.out), dtype=str, keep_default_na=False)
    given = pd.read_csv(home / "test.csv", sep=";", dtype=str, keep_default_na=False, skip_blank_lines=False)
    assert found[given.columns.tolist()].equals(given)
    assert found.columns.tolist()[3:] == ["label", "neg", "pos"]
    assert [k for k, label in enumerate(found["label"]) if not label] == [18]
    assert done.err == "vecroute: test.csv: 1 row has no text (line 20): its label is empty\n"
    assert failed(run("predict", "model", "test.csv", "--strict"), "test.csv: line 20 has no text")
    rows = [json.loads(line) for line in run("predict", "model", "notes.txt").out.splitlines()]
    assert [row["text"] for row in rows] == ["a good film", "", "a dull film"]
    assert [row["label"] for row in rows] == ["pos", "", "neg"]
    assert (
        run("predict", "model", stdin=(home / "notes.txt").read_bytes()).out
        == run("predict", "model", "notes.txt").out
    )


def test_3_and_7_evaluate_refuses_typos_and_writes_a_report(run, home):
    assert failed(
        run("evaluate", "model", "typo.csv"), "line 4 of typo.csv has the label 'poss', which the model"
    )
    assert "the nearest class is 'pos'" in run("evaluate", "model", "typo.csv").err
    assert refused(run("evaluate", "model", "test.csv", "--label", "id"), "has the label '0'")
    counted = json.loads(run("evaluate", "model", "typo.csv", "--allow-unknown", "--json").out)
    assert counted["accuracy"] == pytest.approx(2 / 3)
    (home / "many.csv").write_text("review;stars\n" + "a good film;pos\na dull film;neg\n" * 50)
    code, _, shown = on_a_terminal("evaluate", "model", "many.csv")
    assert code == 0
    assert "classifying" in shown  # 64 texts or fewer are too quick for a progress bar
    code, out, shown = on_a_terminal("evaluate", "model", "test.csv", "--html", "report.html")
    assert code == 0
    assert "accuracy" in out
    assert "vecroute: wrote report.html" in shown
    assert "</html>" in (home / "report.html").read_text()
    code, out, err = on_a_terminal("explain", "model", "a good film", "--html", "why.html", terminal=False)
    assert (code, out, err) == (0, "", "")  # quiet in a pipe
    assert (
        "vecroute: wrote why.html"
        in on_a_terminal("explain", "model", "a good film", "--html", "why.html")[2]
    )


def test_4_missing_labels_are_no_class():
    with pytest.raises(ValueError, match="row 0 is missing"):
        vr.RoutingClassifier("encoder").fit(TEXTS, [float("nan"), *LABELS[1:]])


def test_5_what_is_not_there_is_said_at_once_and_a_moved_encoder_can_be_named(run, home):
    assert failed(run("fit", "none.csv", "--out", "new"), "none.csv does not exist")
    nowhere = run("fit", "train.csv", *FIT[2:6], "--encoder", "./none", "--out", "new")
    assert refused(nowhere, "encoder './none' could not be loaded: this folder does not exist")
    assert failed(run("predict", "none/model", stdin=b"x"), "none/model")
    moved = Path(shutil.copytree(home / "encoder", home / "moved"))
    shutil.move(home / "encoder", home / "away")
    try:
        gone = run("predict", "model", "notes.txt")
        assert failed(gone, "--encoder")
        assert str(home / "encoder") in gone.err or "'encoder'" in gone.err
        assert run("predict", "model", "notes.txt", "--encoder", moved).code == 0
    finally:
        shutil.move(home / "away", home / "encoder")
    assert failed(
        run(*FIT, "--delimiter", ",", "--out", "new"), "has no column 'review', it has 'id;review;stars'"
    )


def test_5_an_encoder_inside_the_model_moves_with_it(home):
    inside = home / "whole"
    shutil.copytree(home / "encoder", inside / "encoder")
    vr.RoutingClassifier(str(inside / "encoder"), max_epochs=1).fit(TEXTS, LABELS).save_pretrained(inside)
    before = vr.RoutingClassifier.from_pretrained(inside).predict_proba(TEXTS[:2])
    shutil.move(inside, home / "elsewhere")
    found = vr.RoutingClassifier.from_pretrained(home / "elsewhere").predict_proba(TEXTS[:2])
    np.testing.assert_allclose(found, before, atol=1e-6)


def test_5_tables_of_spreadsheets_are_read_as_they_are(run, home):
    rows = (home / "train.csv").read_text()
    expected = "tables: 2 classes from 120 texts"
    (home / "utf-16.csv").write_bytes(rows.replace(";", "\t").encode("utf-16"))  # "Unicode text" of Excel
    (home / "sep.csv").write_text("sep=|\n" + rows.replace(";", "|"))
    (home / "ends.csv").write_bytes(b"\xef\xbb\xbf" + rows.replace("\n", "\r\n").encode())
    for table, first in (("utf-16.csv", 52), ("sep.csv", 53), ("ends.csv", 52)):
        done = run("fit", table, *FIT[2:8], "--epochs", 1, "--out", "tables", "--force")
        assert (done.code, done.out.splitlines()[:1]) == (0, [expected]), done.err
        assert f"lines {first}, {first + 71}" in done.err
    (home / "latin.csv").write_bytes((rows + "7;caf\u00e9;pos\n").encode("latin-1"))
    latin = run("fit", "latin.csv", *FIT[2:8], "--out", "new")
    assert failed(latin, "latin.csv is not UTF-8 text: it has the byte 0xe9 after ")
    assert "caf'; save it as UTF-8 (in Excel: CSV UTF-8)" in latin.err


def test_5_a_model_works_from_another_folder(run, home, monkeypatch):
    (home / "sub").mkdir()
    monkeypatch.chdir(home / "sub")
    assert json.loads(run("predict", "../model", stdin=b"a good film").out)["label"] == "pos"


def test_explain_says_what_it_takes(run, home):
    assert failed(
        run("explain", "model", stdin=b""), "there is no text: give one, or lines on standard input"
    )
    done = run("explain", "model", "notes.txt")
    assert done.code == 0
    told = (
        "notes.txt is explained as a text, not as a file; for its lines: vecroute explain model < notes.txt"
    )
    assert done.err == f"vecroute: {told}\n"


def test_3_compare_refuses_typos_too(run):
    done = run("compare", "train.csv", *FIT[2:8], "--heads", "mean_all", "--test", "typo.csv")
    assert "line 4 of typo.csv has the label 'poss', which train.csv does not know" in done.err
    assert done.code == 2


def test_help_says_what_every_command_is_for(run):
    lines = run("--help").out.splitlines()
    commands = lines[lines.index("Commands:") + 1 :]
    names = ["demo", "fit", "predict", "evaluate", "explain", "serve", "compare", "faithfulness"]
    assert [line.split()[0] for line in commands] == names
    assert all(line.endswith(".") and not line.endswith("...") for line in commands)


def test_mistakes_of_the_demo_are_said_at_once(run):
    assert failed(run("demo", "--out", "notes.txt"), "notes.txt is a file: choose another --out")


def test_8_tables_of_measures_fit_and_name_the_best(run):
    done = run("faithfulness", "model", "test.csv", "--texts", 4)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 100
    assert "comprehensiveness: higher is better, 4 texts" in done.out
    assert "best" in done.out
    done = run("compare", "train.csv", *FIT[2:8], "--heads", "routing,mean_all", "--seeds", 1, "--epochs", 1)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 100
    assert "Higher accuracy" in done.out


def test_9_hugging_face_and_scikit_learn(home, monkeypatch, run):
    hub = Hub(home / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    table = datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS})
    splits = datasets.DatasetDict(train=table, test=table.select(range(5)))
    classifier = vr.RoutingClassifier("encoder", max_epochs=2).fit(splits)
    assert classifier.predict(splits)["test"].tolist() == classifier.predict(TEXTS[:5]).tolist()
    classifier.push_to_hub("someone/films")
    assert json.loads(run("predict", "someone/films", stdin=b"good").out)["label"] in ("pos", "neg")
    card = (hub.folder / "someone/films/main/README.md").read_text()
    assert "## Intended use and limits" in card
    vectors = classifier.transform(TEXTS)
    assert (vectors.dtype, vectors.shape) == (np.float32, (120, len(classifier.get_feature_names_out())))
    pipeline = make_pipeline(vr.RoutingClassifier("encoder", max_epochs=12, lr=0.01), LogisticRegression())
    assert pipeline.fit(TEXTS, LABELS).score(TEXTS, LABELS) > 0.9


def test_10_one_thread_is_respected(home):
    program = "import torch\nfrom vecroute.cli import main\n"
    program += "try:\n    main()\nfinally:\n    print(torch.get_num_threads())"
    command = [sys.executable, "-c", program, "predict", "model", "notes.txt"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.stdout.splitlines()[-1] == "1"
    many = os.environ | {"OMP_NUM_THREADS": "64"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=many)
    assert int(done.stdout.splitlines()[-1]) <= len(os.sched_getaffinity(0))
