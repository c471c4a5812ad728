"""examples/serve_http.py as a user starts it: responses, errors, streams and shutdown."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs fastapi and uvicorn")
pytest.importorskip("uvicorn", reason="needs fastapi and uvicorn")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "serve_http.py"
TREE = [["a", "bad"], ["plot", ["well", "played"]]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Client:
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def send(self, path: str, body: Any = None) -> tuple[int, dict[str, str], str]:
        connection = self.connect()
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        got = answer.status, dict(answer.getheaders()), answer.read().decode()
        connection.close()
        return got

    def stats(self) -> Any:
        return json.loads(self.send("/stats")[2])


def start(*options: str) -> Client:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--port", str(port), "--hidden", "16", *options]
    )
    client = Client(process, port)
    for _ in range(300):
        assert process.poll() is None, "the server has ended"
        try:
            client.stats()
            return client
        except OSError:
            time.sleep(0.2)
    process.kill()
    raise AssertionError("the server does not answer")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    server = start()
    yield server
    server.process.kill()
    server.process.wait()


def test_requests_share_batches_and_all_are_answered(client: Client) -> None:
    status, _, text = client.send("/sentiment", {"tree": TREE})
    assert status == 200
    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda _: client.send("/sentiment", {"tree": TREE}), range(200)))
    expected = json.loads(text)["scores"]
    for status, _, text in answers:
        assert status == 200
        assert json.loads(text)["scores"] == pytest.approx(expected, rel=1e-4)
    stats = client.stats()["sentiment"]
    assert stats["finished"] == 201
    assert stats["batch_width"]["aten::linear"] > 1


@pytest.mark.parametrize("tree", [[1, 2], ["a", "b", "c"], {}, None], ids=str)
def test_what_is_no_tree_is_refused(client: Client, tree: Any) -> None:
    status, _, text = client.send("/sentiment", {"tree": tree})
    assert status == 422
    assert "expected" in text


def test_a_tree_that_is_too_deep_is_refused(client: Client) -> None:
    tree: Any = "a"
    for _ in range(300):
        tree = [tree, "b"]
    assert client.send("/sentiment", {"tree": tree})[0] == 422


def test_a_stream_hands_out_each_character(client: Client) -> None:
    status, headers, text = client.send("/generate", {"prompt": "def", "tokens": 7})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = text.strip().split("\n\n")
    assert [event.startswith("data: ") for event in events] == [True] * 7 + [False]
    assert events[-1].startswith("event: end")


def test_a_client_that_hangs_up_ends_its_request() -> None:
    server = start("--hidden", "2048")  # the whole request would take many seconds
    try:
        connection = server.connect()
        connection.request("POST", "/generate", json.dumps({"prompt": "d", "tokens": 1000}))
        answer = connection.getresponse()
        answer.read(20)
        answer.close()
        connection.close()
        for _ in range(600):
            stats = server.stats()["generate"]
            if stats["live"] == 0:
                break
            time.sleep(0.05)
        assert (stats["live"], stats["cancelled"], stats["finished"]) == (0, 1, 0)
    finally:
        server.process.kill()
        server.process.wait()


def test_a_full_queue_answers_503_with_retry_after() -> None:
    server = start("--max-live", "1", "--max-queue", "1")
    try:
        bodies = [{"prompt": "d", "tokens": 300}] * 20
        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            answers = list(threads.map(lambda body: server.send("/generate", body), bodies))
        refused = [headers for status, headers, _ in answers if status == 503]
        assert refused
        assert all(int(headers["retry-after"]) >= 1 for headers in refused)
        assert {status for status, _, _ in answers} <= {200, 503}
    finally:
        server.process.kill()
        server.process.wait()


def test_sigterm_lets_what_has_started_finish() -> None:
    server = start()
    connection = server.connect()
    connection.request("POST", "/generate", json.dumps({"prompt": "d", "tokens": 1000}))
    answer = connection.getresponse()
    answer.read(20)
    server.process.send_signal(signal.SIGTERM)
    assert b"event: end" in answer.read()
    assert server.process.wait(timeout=60) in (0, -signal.SIGTERM)
