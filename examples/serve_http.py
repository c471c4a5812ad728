"""Serves models over HTTP. A handler is code for one request; an engine batches across requests.

    pip install fastapi uvicorn
    python examples/serve_http.py --port 8000

    curl -s localhost:8000/sentiment -H 'Content-Type: application/json' \\
        -d '{"tree": [["a", "bad"], ["plot", ["well", "played"]]]}'
    curl -N localhost:8000/generate -H 'Content-Type: application/json' \\
        -d '{"prompt": "def read", "tokens": 40}'
    curl -s localhost:8000/metrics     # if prometheus_client is installed

Sentiment is a binary Tree-LSTM over trees of any shape. Generation is a character model that sends
each character when it is computed, as server-sent events. Weights are random, so the example needs
no download. ``--weights`` loads a file of state dicts. If the queue is full, the answer is 503 with
Retry-After. A request ends when its client disconnects. After SIGTERM, the server finishes the
requests that have started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor, nn

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.responses import StreamingResponse
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: pip install fastapi uvicorn")

WORDS = 4096  # number of embeddings; a word is looked up by its hash
MOST_LEAVES, MOST_DEPTH, MOST_TOKENS = 512, 200, 1000
CLASSES = ("very negative", "negative", "neutral", "positive", "very positive")


class TreeLstm(nn.Module):
    """Computes class scores [5] of a tree. A tree is a word, or a list of two trees."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, hidden)
        self.leaf = nn.Linear(hidden, 3 * hidden)
        self.inner = nn.Linear(2 * hidden, 5 * hidden)
        self.out = nn.Linear(hidden, len(CLASSES))

    def node(self, tree: Any) -> tuple[Tensor, Tensor]:
        if isinstance(tree, str):
            word = zlib.crc32(tree.encode()) % WORDS
            i, o, u = self.leaf(self.words(torch.tensor(word))).chunk(3)
            c = i.sigmoid() * u.tanh()
        else:
            (hl, cl), (hr, cr) = map(self.node, tree)
            i, o, u, fl, fr = self.inner(torch.cat([hl, hr])).chunk(5)
            c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c

    def forward(self, tree: Any) -> Tensor:
        return self.out(self.node(tree)[0])


class CharacterModel(nn.Module):
    """Continues a text, one character at a time."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.out = nn.Linear(hidden, 128)

    def generate(self, prompt: str, tokens: int) -> Iterator[str]:
        h = self.out.weight.new_zeros(1, self.cell.hidden_size)
        for character in prompt[:-1]:
            h = self.cell(self.characters(torch.tensor([min(ord(character), 127)])), h)
        code = min(ord(prompt[-1]), 127)
        for _ in range(tokens):
            h = self.cell(self.characters(torch.tensor([code])), h)
            code = int(self.out(h).argmax())
            yield chr(code)


def check_tree(tree: Any) -> None:
    """Raises ValueError if ``tree`` is not a binary tree of words, or is too large."""
    leaves, stack = 0, [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        if isinstance(node, str):
            leaves += 1
        elif isinstance(node, list) and len(node) == 2:
            stack += [(child, depth + 1) for child in node]
        else:
            raise ValueError(f"expected a word or a list of two trees, found {node!r:.60}")
        if leaves > MOST_LEAVES or depth > MOST_DEPTH:
            raise ValueError(f"a tree has at most {MOST_LEAVES} words and a depth of {MOST_DEPTH}")


def busy(full: ab.QueueFull) -> HTTPException:
    after = str(max(1, math.ceil(full.retry_after)))
    return HTTPException(503, "too many requests wait", headers={"Retry-After": after})


async def ends_with_client(request: Request, future: Any) -> Any:
    """Waits for the result. Cancels the request if the client disconnects."""
    import asyncio

    result = asyncio.wrap_future(future)
    while not result.done():
        await asyncio.wait([result], timeout=1.0)
        if not result.done() and await request.is_disconnected():
            result.cancel()
            raise HTTPException(499, "the client has hung up")
    return await result


async def read_tree(request: Request) -> Any:
    """Returns the tree of a request for a sentiment."""
    try:
        tree = (await request.json())["tree"]
        check_tree(tree)
    except (ValueError, KeyError, TypeError, RecursionError) as wrong:
        raise HTTPException(422, f"expected {{'tree': tree}}: {wrong}") from None
    return tree


async def read_prompt(request: Request) -> tuple[str, int]:
    """Returns the prompt of a request, and the number of characters to generate."""
    try:
        body = await request.json()
        prompt, tokens = body["prompt"], int(body.get("tokens", 100))
        if not isinstance(prompt, str) or not prompt or not 0 < tokens <= MOST_TOKENS:
            raise ValueError(f"a prompt of at least a character, 1 to {MOST_TOKENS} tokens")
    except (ValueError, KeyError, TypeError) as wrong:
        raise HTTPException(422, f"expected {{'prompt': text}}: {wrong}") from None
    return prompt, tokens


async def events(stream: Any) -> AsyncIterator[str]:
    """Yields the characters of a stream as server-sent events."""
    try:
        async for character in stream:
            yield f"data: {json.dumps(character)}\n\n"
        yield "event: end\ndata: {}\n\n"
    except TimeoutError as late:
        yield f"event: error\ndata: {json.dumps(str(late))}\n\n"
    finally:  # also if the client has disconnected
        await stream.aclose()


def load_models(options: argparse.Namespace) -> tuple[TreeLstm, CharacterModel]:
    torch.manual_seed(0)
    trees, characters = TreeLstm(options.hidden).eval(), CharacterModel(options.hidden).eval()
    if options.weights is not None:
        states = torch.load(options.weights, weights_only=True)
        trees.load_state_dict(states["trees"])
        characters.load_state_dict(states["characters"])
    return trees, characters


def make_app(options: argparse.Namespace) -> FastAPI:
    torch.set_num_threads(options.threads)
    trees, characters = load_models(options)
    limits: dict[str, Any] = {"max_live": options.max_live, "max_queue": options.max_queue}

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with (
            ab.Engine(trees, name="sentiment", **limits) as app.state.sentiment,
            ab.Engine(characters.generate, name="generate", **limits) as app.state.generate,
        ):
            yield

    app = FastAPI(title="torch-autobatch", lifespan=lifespan)
    add_models(app, options.timeout)
    add_measurements(app)
    return app


def add_models(app: FastAPI, timeout: float) -> None:
    """Adds the routes of the two models."""

    @app.post("/sentiment")
    async def sentiment(request: Request) -> dict[str, Any]:
        tree = await read_tree(request)
        try:
            future = app.state.sentiment.submit(tree, timeout=timeout)
        except ab.QueueFull as full:
            raise busy(full) from None
        try:
            scores = (await ends_with_client(request, future)).softmax(0).tolist()
        except TimeoutError as late:
            raise HTTPException(504, str(late)) from None
        return {"label": CLASSES[scores.index(max(scores))], "scores": scores}

    @app.post("/generate")
    async def generate(request: Request) -> StreamingResponse:
        prompt, tokens = await read_prompt(request)
        try:
            stream = app.state.generate.stream(prompt, tokens, timeout=timeout)
        except ab.QueueFull as full:
            raise busy(full) from None
        return StreamingResponse(events(stream), media_type="text/event-stream")


def add_measurements(app: FastAPI) -> None:
    """Adds the routes that report on the engines."""

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return {name: getattr(app.state, name).stats() for name in ("sentiment", "generate")}

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            from prometheus_client import CollectorRegistry, generate_latest
        except ModuleNotFoundError:
            raise HTTPException(501, "prometheus_client is not installed") from None
        registry = CollectorRegistry()
        registry.register(app.state.sentiment.collector())
        registry.register(app.state.generate.collector())
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, for each batch")
    parser.add_argument("--max-live", type=int, default=256)
    parser.add_argument("--max-queue", type=int, default=1024)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for a request")
    parser.add_argument("--weights", help="a file with state dicts: {'trees': …, 'characters': …}")
    options = parser.parse_args()
    # When the server stops, streams that are still open have 10 seconds to end.
    uvicorn.run(
        make_app(options), host=options.host, port=options.port, timeout_graceful_shutdown=10
    )


if __name__ == "__main__":
    main()
