"""Replicas on Ray Serve, on one or more machines. Each replica's engine batches its requests.

    pip install "ray[serve]"
    python examples/serve_ray.py --replicas 2                  # serves until Ctrl-C
    curl -s localhost:8000 -H 'Content-Type: application/json' \\
        -d '{"tree": [["a", "bad"], ["plot", ["well", "played"]]]}'

    python examples/serve_ray.py --replicas 2 --requests 200   # sends trees of any shape, and ends

Ray starts and monitors replicas, and distributes requests. It does not batch: with `@serve.batch`
each request would wait for the slowest request of a list. Weights are random, so that the example
needs no download. If the queue is full, the answer is 503 with Retry-After.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import zlib
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor, nn

try:
    import ray
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import JSONResponse
except ModuleNotFoundError as missing:
    sys.exit(f'{missing}: pip install "ray[serve]"')

WORDS = 4096  # number of embeddings; a word is looked up by its hash
CLASSES = ("negative", "neutral", "positive")


class TreeNet(nn.Module):
    """Computes class probabilities [3] of a tree. A tree is a word, or a list of two trees."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, hidden)
        self.inner = nn.Linear(2 * hidden, hidden)
        self.out = nn.Linear(hidden, len(CLASSES))

    def node(self, tree: Any) -> Tensor:
        if isinstance(tree, str):
            return self.words(torch.tensor(zlib.crc32(tree.encode()) % WORDS))
        left, right = map(self.node, tree)
        return self.inner(torch.cat([left, right])).tanh()

    def forward(self, tree: Any) -> Tensor:
        return self.out(self.node(tree)).softmax(0)


def make_model(hidden: int) -> TreeNet:
    """Makes a model with the same weights in all replicas."""
    torch.manual_seed(0)
    return TreeNet(hidden).eval()


class Sentiment:
    def __init__(self, hidden: int) -> None:
        torch.set_num_threads(1)
        self.engine = ab.Engine(make_model(hidden), name="sentiment")

    async def score(self, tree: Any) -> list[float]:
        """Returns the probability of each class. Called through a handle."""
        scores: Tensor = await self.engine(tree)
        return scores.tolist()

    async def __call__(self, request: Request) -> JSONResponse:
        """Answers an HTTP request."""
        try:
            scores = await self.score((await request.json())["tree"])
        except ab.QueueFull as full:
            after = {"Retry-After": str(max(1, round(full.retry_after)))}
            return JSONResponse({"detail": "busy"}, status_code=503, headers=after)
        return JSONResponse(dict(zip(CLASSES, scores, strict=True)))

    async def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def __del__(self) -> None:
        self.engine.shutdown()


def random_tree(rng: random.Random, leaves: int) -> Any:
    if leaves == 1:
        return rng.choice(["a", "bad", "plot", "well", "played", "film"])
    left = rng.randint(1, leaves - 1)
    return [random_tree(rng, left), random_tree(rng, leaves - left)]


def send(handle: Any, count: int, hidden: int) -> None:
    """Sends ``count`` random trees, and compares the answers with eager mode."""
    rng = random.Random(0)
    trees = [random_tree(rng, rng.randint(1, 40)) for _ in range(count)]
    began = time.perf_counter()
    answers = [handle.score.remote(tree) for tree in trees]
    scores = torch.tensor([answer.result() for answer in answers])
    print(f"{count / (time.perf_counter() - began):.0f} requests/s")
    model = make_model(hidden)
    with torch.inference_mode():
        expected = torch.stack([model(tree) for tree in trees])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    print(f"{count} answers are eager's")
    stats = handle.stats.remote().result()
    print(f"one replica answered {stats['finished']}; mean batches {stats['batch_width']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--requests", type=int, help="send so many, and end")
    options = parser.parse_args()
    ray.init(ignore_reinit_error=True)
    serve.start(http_options={"port": options.port})
    deployment = serve.deployment(
        Sentiment,
        num_replicas=options.replicas,
        max_ongoing_requests=1000,  # limit for one replica, whose engine batches these requests
        ray_actor_options={"num_cpus": 0.5},
    )
    handle = serve.run(deployment.bind(options.hidden))
    try:
        if options.requests is not None:
            send(handle, options.requests, options.hidden)
        else:
            while True:
                time.sleep(1)
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
