"""No request stops a server: work in pieces, limits of work and memory, sockets that time out."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from tests.helpers.served import check_sums, tiny_classifier, tiny_image_classifier, wait_for
from tests.io.test_images import png_of_size
from vecroute import serve
from vecroute.cli import main
from vecroute.ops.pieces import between_pieces
from vecroute.serve import batching
from vecroute.serve.batching import Batcher, GivenUp
from vecroute.serve.guard import HELD, Guard
from vecroute.serve.server import make_server

JSON = {"Content-Type": "application/json"}
PNG = {"Content-Type": "image/png"}
LONG_TEXT = ("the film is good and dull . " * 4000)[:99_000]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return tiny_classifier(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def image_classifier(tmp_path_factory):
    return tiny_image_classifier(tmp_path_factory.mktemp("tiny"))


# Work in pieces


def job(name, cost=1):
    return SimpleNamespace(name=name, cost=cost)


class Pieces:
    """Work whose long jobs never end by themselves. It records the order of events."""

    def __init__(self):
        self.at_work, self.ended = threading.Event(), threading.Event()

    def __call__(self, jobs):
        if jobs[0].cost < 100:
            return [job.name for job in jobs]
        self.at_work.set()
        try:
            while True:
                between_pieces()
        finally:
            self.ended.set()


def with_batcher(pieces, talk):
    async def run():
        batcher = Batcher(pieces, long=100)
        batcher.start()
        found = await talk(batcher)
        await batcher.stop()
        return found

    return asyncio.run(run())


def test_short_jobs_are_answered_while_a_long_one_is_at_work():
    pieces = Pieces()

    async def talk(batcher):
        long = asyncio.create_task(batcher.ask(job("long", 100), 20))
        await asyncio.to_thread(pieces.at_work.wait, 10)
        found = [await batcher.ask(job(str(k)), 10) for k in range(20)]
        assert not pieces.ended.is_set()
        long.cancel()
        return found

    assert with_batcher(pieces, talk) == [str(k) for k in range(20)]
    assert pieces.ended.is_set()


@pytest.mark.parametrize("end", ["time", "client"])
def test_work_that_nobody_waits_for_ends_at_its_next_piece(end):
    pieces = Pieces()

    async def talk(batcher):
        long = asyncio.create_task(batcher.ask(job("long", 100), 0.1 if end == "time" else 60))
        await asyncio.to_thread(pieces.at_work.wait, 10)
        if end == "client":
            long.cancel()
        with pytest.raises((TimeoutError, GivenUp, asyncio.CancelledError)):
            await long
        assert await asyncio.to_thread(pieces.ended.wait, 10)

    with_batcher(pieces, talk)


def test_long_jobs_advance_under_a_load_of_short_ones():
    shorts = []

    def work(jobs):
        if jobs[0].cost < 100:
            shorts.append(len(jobs))
            return [0 for _ in jobs]
        while len(shorts) < 20:  # the long job lets 20 batches pass, and always gets its turn back
            between_pieces()
        return [1]

    async def talk(batcher):
        long = asyncio.create_task(batcher.ask(job("long", 100), 20))

        async def client():
            while not long.done():
                await batcher.ask(job("short"), 20)

        await asyncio.gather(*(client() for _ in range(4)))
        return await long

    assert with_batcher(work, talk) == 1
    assert len(shorts) >= 20


def test_99000_characters_do_not_keep_others_waiting(classifier):
    limits = serve.Limits(seconds=4.0, max_tokens=100_000)
    with TestClient(serve.create_app(classifier, limits=limits)) as client:
        found = []
        ask = threading.Thread(
            target=lambda: found.append(client.post("/explain", json={"text": LONG_TEXT, "unit": "token"}))
        )
        ask.start()
        others = 0
        while not found:
            answer = client.post("/predict", json={"text": f"the film {others}"})
            assert answer.status_code == 200, answer.text
            others += 1
        ask.join()
        assert found[0].status_code in (200, 504)  # depends on the speed of the machine
        assert others > 1


def test_an_explanation_that_gave_way_is_the_same(classifier):
    text = ("the film is good and dull . " * 200)[:4000]  # explanations cost 8 times as much
    with TestClient(serve.create_app(classifier)) as client:
        asked = {"text": text, "output": "good"}
        alone = client.post("/explain", json=asked).json()
    with TestClient(serve.create_app(classifier)) as client:
        found = []
        ask = threading.Thread(target=lambda: found.append(client.post("/explain", json=asked)))
        ask.start()
        while not found:
            assert client.post("/explain", json={"text": "the plot is dull"}).status_code == 200
        ask.join()
        check_sums(found[0].json(), rest=2)
        assert found[0].json() == alone


# Limits of work


def test_too_many_tokens_are_refused_with_the_limit(classifier):
    limits = serve.Limits(max_tokens=50)
    with TestClient(serve.create_app(classifier, limits=limits)) as client:
        assert client.post("/predict", json={"text": "film " * 30}).status_code == 200
        for path, asked in [
            ("/predict", {"text": "film " * 60}),
            ("/explain", {"text": "film " * 60}),
            ("/page", {"texts": ["film " * 30, "plot " * 30]}),
        ]:
            response = client.post(path, json=asked)
            assert response.status_code == 413
            assert response.json()["detail"].startswith("the request must have at most 50 tokens, got 6")


def test_a_body_of_two_lengths_is_refused_and_what_follows_is_no_request():
    body = request().partition(b"\r\n\r\n")[2]
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked = both + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with listening(Tiny()) as port, connect(port) as connection:
        connection.sendall(head + chunked + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = all_of(connection)
    assert found.startswith(b"HTTP/1.1 400")
    assert b"Content-Length or Transfer-Encoding, not both" in found
    assert found.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(("size", "status"), [(1, b"400"), (1000, b"422")])
def test_bodies_of_very_many_chunks_are_refused(size, status):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunks = (b"%x\r\n" % size + b"a" * size + b"\r\n") * (20_000 // size)
    with listening(Tiny()) as port:
        with connect(port) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
            found = b""
            with contextlib.suppress(OSError):
                found = connection.recv(65_536)
            assert found.split(b" ")[1] == status
        with connect(port) as connection:
            connection.sendall(request(more=b"Connection: close\r\n"))
            assert all_of(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/predict", "/explain", "/page"])
def test_100000_fields_are_one_clear_error(classifier, path):
    asked = {"text": "a", **{f"field {k}": 0 for k in range(100_000)}}
    with TestClient(serve.create_app(classifier)) as client:
        response = client.post(path, json=asked)
    assert response.status_code == 422
    assert response.json() == {"detail": "Value error, at most 20 fields, got 100001"}


@pytest.mark.parametrize(("seconds", "times"), [(-1.0, 3), (1e9, 1)])
def test_short_jobs_return_memory_now_and_then(monkeypatch, seconds, times):
    trimmed = []
    monkeypatch.setattr(batching, "TRIM_SECONDS", seconds)
    monkeypatch.setattr(batching, "give_back_memory", lambda: trimmed.append(1))

    async def talk(batcher):
        batcher.trimmed = -1e10
        return [await batcher.ask(job("short"), 10) for _ in range(3)]

    with_batcher(lambda jobs: [0 for _ in jobs], talk)
    assert len(trimmed) == times


def test_long_rows_of_pixels_are_refused_by_the_header(image_classifier):
    with TestClient(serve.create_app(image_classifier)) as client:
        for width, height in [(64_000_000, 1), (1, 64_000_000), (40_000, 2)]:
            response = client.post("/predict", content=png_of_size(width, height), headers=PNG)
            assert response.status_code == 422
            assert response.json() == {
                "detail": f"image has {width} x {height} pixels, a side longer than 32,768"
            }


@pytest.mark.parametrize("path", ["/predict", "/explain", "/page"])
def test_too_many_pixels_are_refused_before_they_are_decoded(image_classifier, path, monkeypatch):
    Image.init()  # a plugin of Pillow loads its own image
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("it was decoded"))
    monkeypatch.setattr(type(image_classifier), "predict_proba", lambda self, X: np.ones((len(X), 3)) / 3)
    limits = serve.Limits(max_pixels=1000)
    with TestClient(serve.create_app(image_classifier, limits=limits)) as client:
        response = client.post(path, content=png_of_size(100, 11), headers=PNG)
        assert response.status_code == 413
        assert response.json() == {"detail": "image must have at most 1000 pixels, got 1100"}


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"])
@pytest.mark.parametrize("path", ["/predict", "/explain", "/page"])
def test_200000_brackets_are_one_clear_error(classifier, body, path):
    with TestClient(serve.create_app(classifier)) as client:
        response = client.post(path, content=body, headers=JSON)
        assert response.status_code == 400
        assert response.json() == {"detail": "the request must be JSON, got brackets nested too deeply"}


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 0.0, -1.0, 1e9])
def test_limits_of_time_are_finite(seconds):
    with pytest.raises(ValueError, match="seconds must be"):
        serve.Limits(seconds=seconds)


@pytest.mark.parametrize("option", [["--seconds", "inf"], ["--seconds", "nan"], ["--max-pixels", "0"]])
def test_the_command_refuses_such_limits_in_a_line(option, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["vecroute", "serve", "no-such-model", *option])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option[0] in line


# Bodies


def through_guard(app, receive, max_bytes=10, seconds=5.0):
    """Return the messages that a guard before an application sends for a request."""
    sent = []

    async def send(message):
        sent.append(message)

    guard = Guard(app, {}, max_bytes, seconds)
    return guard, guard({"type": "http", "headers": []}, receive, send), sent


def test_a_request_whose_client_has_gone_is_cancelled():
    ended = []

    async def app(scope, receive, send):
        try:
            while (await receive())["more_body"]:
                pass
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def run(messages):
        async def receive():
            return messages.pop(0)

        guard, answering, sent = through_guard(app, receive)
        await asyncio.wait_for(answering, 10)
        assert (sent, guard.held) == ([], 0)

    body = {"type": "http.request", "body": b"12345", "more_body": False}
    part = {"type": "http.request", "body": b"12345", "more_body": True}
    asyncio.run(run([body, {"type": "http.disconnect"}]))
    asyncio.run(run([{"type": "http.disconnect"}]))
    asyncio.run(run([part, {"type": "http.disconnect"}]))
    assert ended == ["cancelled"] * 3


def test_all_bodies_together_are_limited():
    async def app(scope, receive, send):
        await receive()
        await asyncio.sleep(60)

    async def run():
        async def receive():
            if receive.first:
                receive.first = False
                return {"type": "http.request", "body": bytes(10), "more_body": False}
            await asyncio.sleep(60)

        guard = Guard(app, {}, 10, 5.0)
        held = []
        for _ in range(HELD):
            receive.first = True
            held.append(asyncio.create_task(guard({"type": "http", "headers": []}, receive, None)))
            await asyncio.sleep(0.01)
        assert guard.held == HELD * 10
        receive.first = True
        with pytest.raises(Exception, match="503: too many large requests"):
            await guard({"type": "http", "headers": []}, receive, None)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert guard.held == 0

    asyncio.run(run())


# Sockets


@contextlib.contextmanager
def listening(classifier, seconds=1.0, max_connections=512, **limits):
    """Run a server in its own thread, and yield the port."""
    app = serve.create_app(classifier, limits=serve.Limits(seconds=seconds, **limits))
    ready = threading.Event()
    server = make_server(app, seconds, ready.set, max_connections)
    with serve.bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            assert ready.wait(20)
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)


class Tiny:
    """A classifier that does no work."""

    classes_ = np.array(["a", "b"])
    multi_label = False
    encoder_ = SimpleNamespace(depths=[0])

    def predict_proba(self, texts):
        return np.array([[0.25, 0.75]] * len(texts))


def connect(port):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(20)
    return connection


def all_of(connection):
    """Return all bytes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            found += part
    return found


def request(body=b'{"text": "a"}', more=b""):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"", b""),
        (b"POST /predict HT", b"408"),
        (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX-A: b\r\n", b"408"),
        (request()[:-3], b"408"),
    ],
    ids=["idle", "first line", "headers", "body"],
)
def test_slow_requests_are_told_and_closed(sent, told):
    with listening(Tiny()) as port, connect(port) as connection:
        connection.sendall(sent)
        found = all_of(connection)
        if told:
            head, _, body = found.partition(b"\r\n\r\n")
            assert head.split(b" ")[1] == told
            assert json.loads(body) == {"detail": "the request must arrive in 1 seconds"}
        else:
            assert found == b""


def test_headers_that_drip_are_closed():
    with listening(Tiny()) as port, connect(port) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\n")
        start = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - start < 15:
                connection.sendall(b"X: y\r\n")
                time.sleep(0.05)
        assert time.monotonic() - start < 15


def test_a_connection_that_was_used_times_out_too():
    with listening(Tiny()) as port, connect(port) as connection:
        connection.sendall(request())
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /heal")
        assert b"HTTP/1.1 408" in all_of(connection)  # after the rest of the first answer


def test_a_body_that_goes_on_after_its_answer_is_closed():
    with listening(Tiny()) as port, connect(port) as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\na")
        start = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - start < 15:
                connection.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() - start < 15


def test_an_answer_that_nobody_reads_is_dropped():
    with listening(Tiny()) as port, connect(port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        many = b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
        start = time.monotonic()
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            while time.monotonic() - start < 15:
                with contextlib.suppress(BlockingIOError):
                    connection.send(many)
                time.sleep(0.05)
        assert time.monotonic() - start < 15


def test_more_connections_than_allowed_are_told_and_closed():
    with listening(Tiny(), seconds=20, max_connections=2) as port, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(connect(port)) for _ in range(2))
        for connection in (first, second):
            connection.sendall(request())
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        third = stack.enter_context(connect(port))
        third.sendall(request())
        head, _, body = all_of(third).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1" in head
        assert json.loads(body) == {"detail": "too many connections: at most 2 are open at a time"}
        first.close()

        def room():
            with connect(port) as fourth:
                fourth.sendall(request())
                return fourth.recv(65_536).startswith(b"HTTP/1.1 200")

        assert wait_for(room)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    ],
    ids=["tls", "version", "host", "negative", "twice", "chunks", "path", "headers", "upgrade", "digits"],
)
def test_nonsense_on_the_socket_harms_nobody(sent, caplog):
    with listening(Tiny()) as port:
        with connect(port) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(sent)
            found = all_of(connection)
            assert not found or found.startswith(b"HTTP/1.1 ")
            assert not found.startswith(b"HTTP/1.1 500")
        with connect(port) as connection:
            connection.sendall(request(more=b"Connection: close\r\n"))
            assert all_of(connection).startswith(b"HTTP/1.1 200")
    assert not [record for record in caplog.records if record.exc_info]
