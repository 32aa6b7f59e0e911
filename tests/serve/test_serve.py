"""The server: answers that add up, text as text, limits, a bounded queue, batches, a graceful end."""

import asyncio
import contextlib
import json
import os
import pickle
import re
import signal
import socket
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.helpers.explanations import HOSTILE
from tests.helpers.pages import Parser
from tests.helpers.served import check_sums, served, tiny_classifier, wait_for
from vecroute import serve
from vecroute.explain.explanation import UNITS
from vecroute.explain.shown import visible
from vecroute.explain.told import meaning
from vecroute.serve import schemas
from vecroute.serve.answers import EXAMPLES, Answers, Explain, Predict
from vecroute.serve.batching import Batcher, QueueFull

TEXT = "The film is good, and so witty! But the plot is dull ."


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return tiny_classifier(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def client(classifier):
    with TestClient(serve.create_app(classifier, name="<tiny>")) as client:
        yield client


def explained(client, **asked):
    response = client.post("/explain", json={"text": TEXT, **asked})
    assert response.status_code == 200, response.text
    return schemas.Explained.model_validate(response.json(), strict=True).model_dump()


# Answers


def test_predictions_are_those_of_the_classifier(client, classifier):
    answer = client.post("/predict", json={"text": TEXT}).json()
    (expected,) = classifier.predict_proba([TEXT])
    assert list(answer["probabilities"]) == ["bad", "good", "odd"]
    assert np.allclose(list(answer["probabilities"].values()), expected, atol=1e-6)
    assert answer["label"] == classifier.predict([TEXT])[0]


def test_a_pickled_classifier_finds_its_encoder_again(classifier):
    with TestClient(serve.create_app(pickle.loads(pickle.dumps(classifier)))) as client:
        assert client.post("/predict", json={"text": TEXT}).json()["label"] == classifier.predict([TEXT])[0]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("depth", [None, 0, 2])
def test_explanations_add_up(client, unit, depth):
    answer = explained(client, unit=unit, depth=depth, output="good")
    check_sums(answer)
    assert (answer["unit"], answer["depth"], answer["output"]) == (unit, depth, "good")


def test_explanations_are_those_of_the_classifier(client, classifier):
    why = classifier.explain(TEXT)
    answer = explained(client)
    assert answer["output"] == why.output_names[int(why.scores.argmax())] == answer["label"]
    words = why.aggregate("word")
    assert [(part["piece"], part["start"], part["end"]) for part in answer["parts"]] == [
        (words.label(i), *words.offsets[i]) for i in range(len(words))
    ]
    assert np.allclose([part["value"] for part in answer["parts"]], words.totals(), atol=1e-5)
    for part in answer["parts"]:
        if part["start"] < part["end"]:
            assert TEXT[part["start"] : part["end"]] == part["piece"]


def test_margins_between_classes(client, classifier):
    why = classifier.explain(TEXT)
    scores = dict(zip(why.output_names, why.scores.tolist(), strict=True))
    answer = explained(client, output="good", against="odd")
    assert answer["score"] == pytest.approx(scores["good"] - scores["odd"], abs=1e-5)
    check_sums(answer)
    first, second, _ = sorted(scores, key=lambda name: -scores[name])
    answer = explained(client, margin=True)
    assert (answer["output"], answer["against"]) == (first, second)
    assert answer["score"] == pytest.approx(scores[first] - scores[second], abs=1e-5)
    answer = explained(client, output=second, against=second)
    assert (answer["against"], answer["score"]) == (None, pytest.approx(scores[second], abs=1e-5))


def test_words_and_states_are_told_apart(client, classifier):
    for of in ("words", "states"):
        answer = explained(client, of=of, output="good", against="bad")
        why = classifier.explain(TEXT, of=of).aggregate("word").margin("good", "bad")
        assert answer["of"] == of
        assert [part["value"] for part in answer["parts"]] == pytest.approx(why.totals().tolist(), abs=1e-5)
        assert answer["told"]["meaning"] == meaning(why, "word")
    assert answer["told"]["title"] == "Why good rather than bad?"
    assert len(answer["shown"]["depths"]["names"]) == 3
    both = classifier.explain(TEXT)
    share = 1 / (1 + np.exp((both.scores[0] - both.scores[1]) / both.temperature))
    assert answer["told"]["chance"]["percent"] == f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def test_examples_are_those_of_the_model_if_it_has_some(client, classifier, monkeypatch):
    assert client.get("/model").json()["examples"] == list(EXAMPLES)
    monkeypatch.setattr(classifier, "examples_", ["one", "two", "three", "four"], raising=False)
    assert Answers(classifier).examples == ["one", "two", "three"]


def test_one_depth_has_its_contributions_alone(client, classifier):
    why = classifier.explain(TEXT, by_depth=True).aggregate("word")["good"]
    answer = explained(client, output="good", depth=1)
    assert np.allclose([part["value"] for part in answer["parts"]], why.values[:, 1, 0], atol=1e-5)
    assert answer["shown"]["depths"]["names"] == ["embeddings", "layer 1", "layer 2"]


def test_classifiers_that_give_several_labels():
    several = SimpleNamespace(
        classes_=np.array([3, 5, 7]),
        multi_label=True,
        predict_proba=lambda texts: np.array([[0.9, 0.1, 0.6]] * len(texts)),
    )
    (answer,) = Answers(several).answer([Predict("x")])
    assert answer == {"label": ["3", "7"], "probabilities": {"3": 0.9, "5": 0.1, "7": 0.6}}


def test_a_text_looked_at_again_is_explained_once(classifier, monkeypatch):
    calls = []
    real = type(classifier).explain
    monkeypatch.setattr(type(classifier), "explain", lambda *a, **k: (calls.append(a[1]), real(*a, **k))[1])
    answers = Answers(classifier)
    answers.answer([Explain(TEXT), Explain(TEXT, unit="token")])
    assert calls == [TEXT]
    answers.answer([Explain(TEXT, of="states"), Explain(TEXT, of="states", depth=1, unit="depth")])
    assert calls == [TEXT, TEXT]
    answers.answer([Explain(f"film {k}") for k in range(40)])
    assert len(answers.kept) == 16


# Hostile texts


def segments_of(answer):
    return "".join(segment["text"] for segment in answer["shown"]["segments"])


@pytest.mark.parametrize(
    "name", [name for name in HOSTILE if HOSTILE[name].strip() and name != "half characters"]
)
def test_hostile_texts_come_back_as_they_are(client, name):
    text = HOSTILE[name]
    for unit in ("token", "word", "sentence"):
        answer = explained(client, text=text, unit=unit)
        check_sums(answer)
        assert segments_of(answer) == visible(text)
        for part in answer["parts"]:
            assert 0 <= part["start"] <= part["end"] <= len(text)
            if not part["special"] and unit != "token":
                assert text[part["start"] : part["end"]] == part["piece"]


def test_a_text_of_50000_characters(client):
    text = ("<b>the film</b> is good & dull 😀 . " * 1500)[:50_000]
    answer = explained(client, text=text)
    check_sums(answer, rest=2)  # the sum of 17,000 tokens in float32
    assert segments_of(answer) == text


@pytest.mark.parametrize("text", ["", " \t\n ", "\x1c", "\u2028"])
def test_texts_of_nothing_are_refused(client, text):
    response = client.post("/explain", json={"text": text})
    assert response.status_code == 422
    assert "text" in response.json()["detail"]


def test_halves_of_characters_are_refused_and_not_sent_back(client):
    bodies = {
        b'{"text": "a \\ud83d b"}': "text: Input should be",
        b'{"text": "a", "\\udc00": 1}': "Input should be",
    }
    for body, told in bodies.items():
        response = client.post("/explain", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 422
        assert response.json()["detail"].startswith(told)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(min_size=1, max_size=40))
def test_any_text_is_answered(client, text):
    response = client.post("/explain", json={"text": text})
    if response.status_code == 200:
        assert segments_of(response.json()) == visible(text)
    else:
        assert response.status_code == 422
        assert not text.strip() or not re.search(r"\S", text)


@pytest.mark.parametrize("name", ["script", "quotes", "comment", "template"])
def test_saved_pages_hold_text_as_text(client, name):
    response = client.post("/page", json={"texts": [HOSTILE[name], TEXT]})
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    parsed = Parser(response.text)
    assert not {element.name for element in parsed.every} & {"script", "img", "link"}
    texts = {paragraph.text for paragraph in parsed.root.all("p", **{"class": "text"})}
    assert texts == {HOSTILE[name], TEXT}


# The page, its headers, and paths that do not exist


def test_the_page_runs_its_own_script_alone(client):
    for path in ("/", "/docs"):
        response = client.get(path)
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        parsed = Parser(response.text)
        for script in parsed.root.all("script"):
            assert not script.text
            assert client.get(script.attributes["src"]).status_code == 200
        for link in parsed.root.all("link"):
            assert client.get(link.attributes["href"]).status_code == 200
        names = {name for element in parsed.every for name in element.attributes}
        assert not [name for name in names if name.startswith("on") or name == "style"]


def test_scripts_put_nothing_into_the_page_but_text():
    for file in (Path(serve.__file__).parent / "static").glob("*"):
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", text)
        addresses = set(re.findall(r"https?://[^\s\"']+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name


def test_the_description_of_the_api(client):
    api = client.get("/openapi.json").json()
    assert set(api["paths"]) == {"/predict", "/explain", "/page", "/health", "/model"}
    for path in ("/predict", "/explain"):
        assert set(api["paths"][path]["post"]["responses"]) >= {"200", "413", "422", "503", "504"}


def test_health_and_model(client):
    assert client.get("/health").json()["status"] == "ok"
    about = client.get("/model").json()
    assert (about["name"], about["classes"]) == ("<tiny>", ["bad", "good", "odd"])
    assert (about["depths"], about["depth_numbers"]) == (["embeddings", "layer 1", "layer 2"], [0, 1, 2])


@pytest.mark.parametrize(
    "path",
    ["/static/page.js", "/../pyproject.toml", "/%2e%2e/app.py", "/app.py", "//etc/passwd"],
)
def test_no_file_can_be_reached(client, path):
    assert client.get(path).status_code in (404, 405)


def test_names_of_other_sites_are_refused(classifier):
    app = serve.create_app(classifier, hosts=serve.hosts_for("127.0.0.1"))
    with TestClient(app, base_url="http://localhost:8000") as client:
        assert client.get("/health").status_code == 200
        refused = client.get("/health", headers={"Host": "evil.example"})
        assert refused.status_code == 400
        assert "content-security-policy" in refused.headers
    assert serve.hosts_for("0.0.0.0") is None


# Mistakes and limits


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "text: Field required"),
        ({"text": 3}, "text: Input should be a valid string"),
        ({"text": "a", "unit": "letter"}, "unit: Input should be 'token'"),
        ({"text": "a", "output": "ugly"}, 'output must be one of ["bad", "good", "odd"]'),
        ({"text": "a", "against": "ugly"}, "against must be one of"),
        ({"text": "a", "depth": 9}, "depth must be one of [0, 1, 2]"),
        ({"text": "a", "path": "/etc/passwd"}, "path: Extra inputs are not permitted"),
    ],
)
def test_mistakes_are_told_in_a_line(client, asked, told):
    response = client.post("/explain", json=asked)
    assert response.status_code == 422
    assert told in response.json()["detail"]


@pytest.mark.parametrize("body", [b"{", b"", b"[" * 100_000, b'{"text": "\xff"}', b"NaN"])
def test_what_is_no_json_is_refused(client, body):
    response = client.post("/predict", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)


def test_long_texts_and_bodies_are_refused(classifier):
    limits = serve.Limits(max_characters=100)
    with TestClient(serve.create_app(classifier, limits=limits)) as client:
        assert client.post("/predict", json={"text": "a" * 100}).status_code == 200
        response = client.post("/predict", json={"text": "a" * 101})
        assert (response.status_code, response.json()) == (
            413,
            {"detail": "text must have at most 100 characters"},
        )
        assert client.post("/page", json={"texts": ["a", "a" * 101]}).status_code == 413
        large = b'{"text": "' + b"a" * limits.max_bytes + b'"}'
        headers = {"Content-Type": "application/json"}
        declared = client.post("/predict", content=large, headers=headers)
        chunked = client.post("/predict", content=iter([large[:5000], large[5000:]]), headers=headers)
        for response in (declared, chunked):
            assert response.status_code == 413
            assert response.json() == {"detail": f"the request must have at most {limits.max_bytes} bytes"}
            assert "content-security-policy" in response.headers


def test_limits_must_leave_something():
    with pytest.raises(ValueError, match="max_batch must be more than 0, got 0"):
        serve.Limits(max_batch=0)


class Slow:
    """A classifier that waits for a gate before it answers, and counts its calls."""

    classes_ = np.array(["a", "b"])
    multi_label = False
    encoder_ = SimpleNamespace(depths=[0])

    def __init__(self):
        self.gate, self.batches = threading.Event(), []

    def predict_proba(self, texts):
        if texts != ["warm up"]:
            self.batches.append(len(texts))
            assert self.gate.wait(20)
        return np.array([[0.25, 0.75]] * len(texts))


@contextlib.contextmanager
def asking(slow, n, **limits):
    """Send n requests at once, and yield the list of their answers. At the end, open the gate and wait."""
    found = []
    with TestClient(serve.create_app(slow, limits=serve.Limits(**limits))) as client:
        threads = [
            threading.Thread(target=lambda k=k: found.append(client.post("/predict", json={"text": f"{k}"})))
            for k in range(n)
        ]
        try:
            threads[0].start()
            wait_for(lambda: slow.batches)  # the first is being processed before the others arrive
            for thread in threads[1:]:
                thread.start()
            yield client, found
        finally:
            slow.gate.set()
            for thread in threads:
                thread.join()


def test_a_full_queue_answers_503_and_when_to_come_again():
    with asking(Slow(), 8, max_waiting=2, max_batch=1) as (_, found):
        wait_for(lambda: len(found) == 5)  # one is being processed, two wait
        assert {answer.status_code for answer in found} == {503}
        assert {answer.headers.get("retry-after") for answer in found} == {"1"}
    assert sorted(answer.status_code for answer in found) == [200] * 3 + [503] * 5


def test_requests_that_wait_are_answered_together():
    slow = Slow()
    with asking(slow, 10, max_batch=4) as (client, found):
        wait_for(lambda: client.get("/health").json()["waiting"] == 9)
    assert [answer.status_code for answer in found] == [200] * 10
    assert slow.batches == [1, 4, 4, 1]


def test_no_answer_in_time_is_504():
    with asking(Slow(), 1, seconds=0.2) as (_, found):
        wait_for(lambda: found)
        assert found[0].status_code == 504


# Batches


def job(name, cost=1):
    return SimpleNamespace(name=name, cost=cost)


def run_batches(jobs, work=None, **options):
    """Submit jobs at once, and return their answers and the batches."""
    batches = []

    def answer(found):
        batches.append([job.name for job in found])
        return [work(job) if work else job.name.upper() for job in found]

    async def ask():
        batcher = Batcher(answer, **options)
        asked = [asyncio.create_task(batcher.ask(job, 5)) for job in jobs]
        await asyncio.sleep(0)  # all jobs are queued before the first one starts
        batcher.start()
        found = await asyncio.gather(*asked, return_exceptions=True)
        await batcher.stop()
        return found

    return asyncio.run(ask()), batches


def test_batches_have_so_many_jobs_and_so_much_cost():
    found, batches = run_batches([job(c) for c in "abcde"], max_jobs=2)
    assert found == list("ABCDE")
    assert batches == [["a", "b"], ["c", "d"], ["e"]]
    found, batches = run_batches(
        [job(c, cost) for c, cost in zip("abcd", (5, 5, 1, 99), strict=True)], max_cost=10
    )
    assert found == list("ABCD")
    assert batches == [["a", "b"], ["c"], ["d"]]


def test_one_bad_job_does_not_spoil_the_others():
    def work(job):
        if job.name == "b":
            raise ValueError("bad job")
        return job.name

    found, _ = run_batches([job(c) for c in "abc"], work)
    assert (found[0], found[2]) == ("a", "c")
    assert str(found[1]) == "bad job"


def test_more_than_may_wait_are_turned_away():
    found, _ = run_batches([job(c) for c in "abc"], max_waiting=2)
    assert found[:2] == ["A", "B"]
    assert isinstance(found[2], QueueFull)


def test_jobs_that_were_given_up_are_not_worked_on():
    worked = []

    async def ask():
        batcher = Batcher(lambda jobs: [worked.append(job.name) for job in jobs])
        with pytest.raises(TimeoutError):
            await batcher.ask(job("late"), 0.01)
        batcher.start()
        await batcher.ask(job("in time"), 5)
        await batcher.stop()

    asyncio.run(ask())
    assert worked == ["in time"]


def test_a_slow_body_is_refused():
    sent = []

    async def ask():
        async def app(scope, receive, send):
            await receive()

        async def late():
            await asyncio.sleep(2)
            return {"type": "http.request"}

        guard = serve.app.Guard(app, {}, 10, 0.01)
        with pytest.raises(Exception, match=r"408: the request must arrive in 0\.01 seconds"):
            await guard({"type": "http", "headers": []}, late, sent.append)

    asyncio.run(ask())
    assert sent == []


# The command


def seconds_of(pid):
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_command_serves_on_this_machine_alone_and_ends_gracefully(classifier, tmp_path):
    classifier.save_pretrained(tmp_path / "model")
    with served(tmp_path / "model", "--max-characters", "60000") as (address, process):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", address)
        with urllib.request.urlopen(f"{address}/model") as response:
            assert json.load(response)["name"] == "model"
        with (
            pytest.raises(ConnectionError),
            socket.create_connection(("127.0.0.2", int(address.rpartition(":")[2]))),
        ):
            pass
        # A long request is answered even if the server is told to end meanwhile.
        body = json.dumps({"text": "the film is good and dull . " * 2000}).encode()
        request = urllib.request.Request(f"{address}/explain", body, {"Content-Type": "application/json"})
        found = []

        def ask():
            with urllib.request.urlopen(request) as response:
                found.append(json.load(response))

        thread = threading.Thread(target=ask)
        before = seconds_of(process.pid)
        thread.start()
        wait_for(lambda: seconds_of(process.pid) > before + 0.1)  # it is computing
        assert not found
        process.send_signal(signal.SIGTERM)
        thread.join()
        process.wait(20)
        assert found[0]["parts"]
        assert process.stderr.read() == ""
    with (
        pytest.raises(ConnectionError),
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))),
    ):
        pass


def test_an_address_in_use_is_told_in_a_line():
    with serve.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1 port {port}: .*in use"):
            serve.bind("127.0.0.1", port)
