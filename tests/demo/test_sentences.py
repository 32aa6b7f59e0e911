"""The demo on sentences: a small run, and the second run from the first."""

import json
import shlex
import subprocess
import urllib.request

import pytest

from vecroute.demo import sentences
from vecroute.training import Trainer


def test_the_demo_runs_and_the_second_run_uses_the_first(run, tmp_path, monkeypatch):
    monkeypatch.setenv("VECROUTE_CACHE", str(tmp_path / "cache"))
    some = sentences.sentence_polarity().iloc[::60]
    monkeypatch.setattr(sentences, "sentence_polarity", lambda: some)
    first = run("demo", "--out", tmp_path / "demo")
    assert first.code == 0, first.err
    found = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"model", "report.md", "results.json", "why-1.html", "why-2.html"} <= found
    accuracies = json.loads((tmp_path / "demo/results.json").read_text())["accuracies"]
    for name, accuracy in accuracies.items():
        assert f"| {name} | {accuracy:.1%} |" in (tmp_path / "demo/report.md").read_text()
        assert f"{accuracy:.1%}" in first.out
    assert "Why positive rather than negative? Score: " in first.out
    assert "review, classified right" in first.out
    assert "negative - positive" not in first.out
    monkeypatch.setattr(Trainer, "train_step", None)  # training again would fail
    assert run("demo", "--out", tmp_path / "demo").out == first.out
    examples = json.loads((tmp_path / "demo/model/config.json").read_text())["examples"]
    assert set(examples) <= set(some["text"])  # the examples on the page of `serve`
    assert len(examples) == 3
    steps = [
        shlex.split(line) for line in first.out.partition("Try next:")[2].splitlines() if line[:2] == "  "
    ]
    assert [step[1] for step in steps] == ["explain", "evaluate", "serve"]
    for step in steps[:2]:  # as printed, but not `serve`, which runs until it is stopped
        done = run(*step[1:])
        assert done.code == 0, done.err
        assert "</html>" in (tmp_path / "demo" / step[-1]).read_text()
    assert steps[2][2:] == [str(tmp_path / "demo/model")]


@pytest.mark.slow
def test_the_page_of_the_demo_opens_as_printed(run, tmp_path, monkeypatch):
    monkeypatch.setenv("VECROUTE_CACHE", str(tmp_path / "cache"))
    some = sentences.sentence_polarity().iloc[::60]
    monkeypatch.setattr(sentences, "sentence_polarity", lambda: some)
    command = run("demo", "--out", tmp_path / "demo").out.splitlines()[-1]
    # Use a free port, because 8000 may be in use.
    with subprocess.Popen(
        [*shlex.split(command), "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            address = server.stdout.readline().split()[-1]
            with urllib.request.urlopen(address) as page:
                assert b"vecroute" in page.read()
            with urllib.request.urlopen(f"{address}/model") as about:
                assert len(json.load(about)["examples"]) == 3
        finally:
            server.terminate()
