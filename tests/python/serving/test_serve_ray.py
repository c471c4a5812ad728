"""examples/serve_ray.py as a user starts it: a local cluster of two replicas."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray.serve", reason='needs "ray[serve]"')

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "serve_ray.py"
TREE = [["a", "bad"], ["plot", ["well", "played"]]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(*options: str) -> list[str]:
    return [sys.executable, str(EXAMPLE), "--port", str(free_port()), *options]


def test_requests_by_handle_get_eagers_answers() -> None:
    done = subprocess.run(command("--requests", "100"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 answers are eager's" in done.stdout


def ask(port: int, body: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_requests_over_http() -> None:
    line = command("--replicas", "1")
    port = int(line[line.index("--port") + 1])
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                status, text = ask(port, json.dumps({"tree": TREE}))
                if status == 200:
                    break
            except OSError:
                pass
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        scores = json.loads(text)
        assert set(scores) == {"negative", "neutral", "positive"}
        assert abs(sum(scores.values()) - 1) < 1e-4
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
