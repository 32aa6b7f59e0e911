"""Folders of tables: every row once, every column kept, resumed after a stop, errors in one line."""

import csv
import gzip
import json
import os
import pickle
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from sklearn.exceptions import NotFittedError

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.corpora import explain_folder, folders, predict_folder, shards

CLASSES = ["neg", "pos"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    encoder = save_tiny(folder / "encoder")
    classifier = vr.RoutingClassifier(encoder, max_epochs=2, cache=False, estimate=False, verbose=False).fit(
        TEXTS, LABELS
    )
    classifier.save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def classifier(model):
    return vr.RoutingClassifier.from_pretrained(model, verbose=False)


def frame(k: int) -> pd.DataFrame:
    """Five rows of a corpus; the last has no text."""
    texts = [*TEXTS[4 * k : 4 * k + 4], None]
    return pd.DataFrame(
        {"id": range(5 * k, 5 * k + 5), "text": texts, "label": "old", "when": pd.Timestamp(k)}
    )


@pytest.fixture
def corpus(tmp_path):
    """Three shards of Parquet, two of them in a subfolder."""
    folder = tmp_path / "corpus"
    for k, name in enumerate(["a.parquet", "more/b.parquet", "more/c.parquet"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        frame(k).to_parquet(folder / name)
    (folder / "_SUCCESS").touch()
    (folder / "notes.txt").write_text("no shard")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_every_row_and_column_of_parquet_stays_and_new_ones_follow(classifier, corpus, tmp_path):
    report = predict_folder(classifier, corpus, tmp_path / "out")
    assert report == (3, 0, 15, {})
    assert names(tmp_path / "out") == ["_vecroute.json", "a.parquet", "more/b.parquet", "more/c.parquet"]
    found = parquet.read_table(tmp_path / "out" / "more" / "b.parquet")
    before = parquet.read_table(corpus / "more" / "b.parquet")
    assert found.column_names == ["id", "text", "label", "when", "label_predicted", "neg", "pos"]
    assert found.select(before.column_names).equals(before)
    rows = found.to_pandas()
    expected = classifier.predict_proba(TEXTS[4:8])
    assert rows[CLASSES][:4].to_numpy() == pytest.approx(expected, abs=1e-6)
    assert rows["label_predicted"].tolist() == [*classifier.predict(TEXTS[4:8]), ""]
    assert rows[CLASSES][4:].isna().all(axis=None)


def test_json_lines_and_csv_keep_their_formats(classifier, tmp_path):
    folder, out = tmp_path / "corpus", tmp_path / "out"
    folder.mkdir()
    rows = [{"id": k, "text": text, "deep": {"a": [k]}} for k, text in enumerate(TEXTS[:3])]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = "".join(f"{k};{text};=1\n" for k, text in enumerate(TEXTS[:3]))
    (folder / "c.csv").write_text(f"id;text;sum\n{table}")
    (folder / "d.csv.gz").write_bytes(gzip.compress(f"id,text,sum\n{table.replace(';', ',')}".encode()))
    assert predict_folder(classifier, folder, out).failed == {}
    p = classifier.predict_proba(TEXTS[:3])
    for text in ((out / "a.jsonl").read_text(), gzip.decompress((out / "b.jsonl.gz").read_bytes()).decode()):
        found = [json.loads(line) for line in text.splitlines()]
        assert [{name: row[name] for name in rows[0]} for row in found] == rows
        assert [row["probabilities"]["pos"] for row in found] == pytest.approx(p[:, 1], abs=1e-6)
    for text in ((out / "c.csv").read_text(), gzip.decompress((out / "d.csv.gz").read_bytes()).decode()):
        found = list(csv.DictReader(text.splitlines()))
        assert list(found[0]) == ["id", "text", "sum", "label", "neg", "pos"]
        assert [row["sum"] for row in found] == ["'=1"] * 3
        assert [float(row["neg"]) for row in found] == pytest.approx(p[:, 0], abs=1e-6)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv"])
def test_explanations_come_as_a_column(classifier, tmp_path, name):
    (tmp_path / "corpus").mkdir()
    rows = pd.DataFrame({"id": [0, 1, 2], "text": [TEXTS[0], None, TEXTS[1]]})
    path = tmp_path / "corpus" / name
    if name == "a.jsonl":
        rows.to_json(path, orient="records", lines=True)
    else:
        rows.to_parquet(path) if name == "a.parquet" else rows.to_csv(path, index=False)
    assert explain_folder(classifier, path, tmp_path / "out", unit="token").failed == {}
    written = tmp_path / "out" / name
    if name == "a.parquet":
        found = parquet.read_table(written).to_pylist()
    elif name == "a.jsonl":
        found = [json.loads(line) for line in written.read_text().splitlines()]
    else:
        found = list(csv.DictReader(written.read_text().splitlines()))
    assert [row["explanation"] or None for row in found][1] is None
    why = found[2]["explanation"]
    why = json.loads(why) if name == "a.csv" else why
    expected = classifier.explain(TEXTS[1])
    assert [part["values"]["pos"] for part in why["parts"]] == pytest.approx(
        expected.values.sum(1)[:, 1].tolist(), abs=1e-5
    )
    total = sum(part["values"]["pos"] for part in why["parts"]) + why["base_values"]["pos"]
    assert total == pytest.approx(why["scores"]["pos"], abs=1e-4)


def test_a_stopped_run_resumes_with_the_missing_shards(classifier, corpus, tmp_path, monkeypatch):
    out, copied = tmp_path / "out", []

    def dies(source, target, columns, answer):
        if copied:
            target.parent.mkdir()
            (target.parent / f".{target.name}.{'0' * 32}").write_bytes(b"half of it")
            raise KeyboardInterrupt
        copied.append(source.name)
        return copy(source, target, columns, answer)

    copy = shards.copy_shard
    monkeypatch.setattr(folders, "copy_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        predict_folder(classifier, corpus, out)
    assert "a.parquet" in names(out)
    assert "more/b.parquet" not in names(out)
    monkeypatch.setattr(folders, "copy_shard", copy)
    before = (out / "a.parquet").stat().st_mtime_ns
    assert predict_folder(classifier, corpus, out) == (2, 1, 10, {})
    assert (out / "a.parquet").stat().st_mtime_ns == before
    assert names(out) == ["_vecroute.json", "a.parquet", "more/b.parquet", "more/c.parquet"]
    assert predict_folder(classifier, corpus, out) == (0, 3, 0, {})
    os.utime(corpus / "a.parquet", (before / 1e9 + 10, before / 1e9 + 10))  # it was changed
    assert predict_folder(classifier, corpus, out) == (1, 2, 5, {})


def test_a_write_that_fails_leaves_nothing(classifier, corpus, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet.ParquetWriter, "write_batch", full)
    report = predict_folder(classifier, corpus, tmp_path / "out")
    assert sorted(report.failed) == ["a.parquet", "more/b.parquet", "more/c.parquet"]
    assert names(tmp_path / "out") == ["_vecroute.json"]


DAMAGES = {
    "cut": ("more/b.parquet", lambda path: path.write_bytes(path.read_bytes()[:-100])),
    "empty": ("more/b.parquet", lambda path: path.write_bytes(b"")),
    "pages": ("more/b.parquet", lambda path: path.write_bytes(garbled(path.read_bytes()))),
    "a number": ("z.jsonl", lambda path: path.write_text('{"text": "good"}\n{"text": 3}\n')),
    "a pipe": ("z.csv", os.mkfifo),
    "a pipe called Parquet": ("z.parquet", os.mkfifo),
    "no gzip": ("z.jsonl.gz", lambda path: path.write_text('{"text": "good"}\n')),
    "cut gzip": ("z.csv.gz", lambda path: path.write_bytes(gzip.compress(b"text\ngood\n")[:-9])),
    "no JSON": ("z.jsonl", lambda path: path.write_text('{"text": "good"}\n{"text"\n')),
    "no rows": ("z.csv", lambda path: path.write_bytes(b"")),
    "many cells": ("z.csv", lambda path: path.write_text("id,text\n1,good\n1,2,3\n")),
    "no UTF-8": ("z.csv", lambda path: path.write_bytes(b"id,text\n1,\xff\n")),
}


def garbled(data: bytes) -> bytes:
    """Zeros where the pages begin; the footer stays."""
    return data[:4] + bytes(200) + data[204:]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_the_others_are_done(model, corpus, tmp_path, run, damage):
    name, harm = DAMAGES[damage]
    harm(corpus / name)
    done = run("predict", model, corpus, "--out", tmp_path / "out")
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith(f"vecroute: {name} could not be done: ")
    others = {"a.parquet", "more/b.parquet", "more/c.parquet"} - {name}
    assert set(names(tmp_path / "out")) == others | {"_vecroute.json"}
    explained = run("explain", model, "--data", corpus, "--out", tmp_path / "why")
    assert (explained.code, explained.err.splitlines()[-1]) == (1, done.err.splitlines()[-1])
    assert names(tmp_path / "why") == names(tmp_path / "out")
    frame(1).to_parquet(corpus / "more" / "b.parquet")  # it is mended
    (corpus / name).unlink() if name.startswith("z") else None
    assert run("predict", model, corpus, "--out", tmp_path / "out").code == 0


def change(table: pa.Table, path: Path) -> None:
    parquet.write_table(table, path)


MISTAKES = {
    "empty": (
        lambda c: [p.unlink() for p in c.rglob("*.parquet")],
        "is not a corpus: it has no file that ends",
    ),
    "missing": (lambda c: None, "has no column 'words', it has 'id', 'text', 'label', 'when'"),
    "schema": (
        lambda c: change(parquet.read_table(c / "a.parquet").drop_columns("id"), c / "more" / "c.parquet"),
        "a.parquet: it lacks the column 'id'",
    ),
    "type": (
        lambda c: change(pa.table({"id": ["x"], "text": ["good"]}), c / "more" / "c.parquet"),
        "a.parquet: its column 'id' is string, not int64",
    ),
    "header": (
        lambda c: [(c / f"{len(head)}.csv").write_text(f"{head}\n1\n") for head in ("text", "text,x")],
        "4.csv: it has the column 'x'",
    ),
    "missing in lines": (
        lambda c: (c / "b.jsonl").write_text('{"words": "good"}\n'),
        "b.jsonl has no column 'text', it has 'words'",
    ),
    "missing in CSV": (
        lambda c: (c / "b.csv").write_text("id,words\n1,good\n"),
        "b.csv has no column 'text', it has 'id', 'words'",
    ),
    "numbers": (
        lambda c: [change(pa.table({"text": [1, 2]}), p) for p in c.rglob("*.parquet")],
        "must have texts, it has int64",
    ),
    "gpu": (lambda c: None, "device is cuda, but there is no GPU that torch can use"),
    "inside": (lambda c: None, "must lie outside of the folder of the corpus"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_found_before_work_writes_nothing(model, corpus, tmp_path, run, mistake):
    if mistake == "gpu" and vr.encoders.loading.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    harm, message = MISTAKES[mistake]
    harm(corpus)
    more = {"missing": ["--text", "words"], "gpu": ["--device", "cuda"]}.get(mistake, [])
    out = corpus / "out" if mistake == "inside" else tmp_path / "out"
    for command in (["predict", model, corpus], ["explain", model, "--data", corpus]):
        done = run(*command, "--out", out, *more)
        assert done.code == 2
        assert message in done.err
        assert len(done.err.splitlines()) == 1
        assert not out.exists()


def test_folders_of_other_results_are_left_alone(model, classifier, corpus, tmp_path, run):
    out = tmp_path / "out"
    predict_folder(classifier, corpus, out)
    done = run("explain", model, "--data", corpus, "--out", out)
    assert (done.code, "results of another run (what" in done.err) == (2, True)
    (out / "_vecroute.json").write_text("[")
    assert "is damaged" in run("predict", model, corpus, "--out", out).err
    (out / "_vecroute.json").unlink()
    assert "not results of vecroute" in run("predict", model, corpus, "--out", out).err
    (tmp_path / "file").touch()
    assert "it is a file" in run("predict", model, corpus, "--out", tmp_path / "file").err


def test_results_of_one_file_may_lie_beside_it(classifier, corpus):
    assert predict_folder(classifier, corpus / "a.parquet", corpus / "out").done == 1
    with pytest.raises(ValueError, match="must lie outside"):
        predict_folder(classifier, corpus / "a.parquet", corpus)


def test_pickled_classifiers_find_their_encoder_again(classifier, corpus, tmp_path):
    pickled = pickle.dumps(classifier)
    report = predict_folder(pickle.loads(pickled), corpus, tmp_path / "predicted")
    assert (report.done, report.failed) == (3, {})
    report = explain_folder(pickle.loads(pickled), corpus, tmp_path / "explained")
    assert (report.done, report.failed) == (3, {})


@pytest.mark.parametrize("given", [{"of": "pixels"}, {"unit": "depth"}], ids=str)
def test_explanations_that_cannot_be_are_refused_before_work(classifier, corpus, tmp_path, given):
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got '{value}'"):
        explain_folder(classifier, corpus, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_classifier_that_is_not_fitted(corpus, tmp_path):
    with pytest.raises(NotFittedError):
        predict_folder(vr.RoutingClassifier(), corpus, tmp_path / "out")


def test_the_command_line(model, corpus, tmp_path, run):
    done = run("explain", model, "--data", corpus / "a.parquet", "--out", tmp_path / "why")
    assert (done.code, done.out) == (0, "")
    assert "1 of 1 shards written, 0 were there, 5 rows" in done.err
    assert "go together, got --data alone" in run("explain", model, "--data", corpus).err
    with_text = run("explain", model, "good", "--data", corpus, "--out", tmp_path / "x")
    assert "TEXT is for single texts" in with_text.err
    assert "a folder and --out" in run("predict", model, corpus).err
    by = run("explain", model, "--data", corpus, "--out", tmp_path / "x", "--by", "depth")
    assert "--by must be token, word, sentence or chunk" in by.err
    assert run("predict", model, tmp_path / "nowhere", "--out", tmp_path / "x").code == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "nowhere does not exist"), ("a.xlsx", r"a.xlsx must end with .parquet")]
)
def test_no_corpus(classifier, tmp_path, name, message):
    (tmp_path / "a.xlsx").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        predict_folder(classifier, tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()
