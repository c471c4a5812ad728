"""Throughput against latency: ``python -m benchmarks.serving --workload lstm --hidden 256``.

Measures first the peak of each server, with 256 running requests. Then requests arrive as a Poisson
process, at shares of the peak of graph batching (``ab.map over windows``). ``--check 100000`` tests
an engine with 100000 requests.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch

from benchmarks.serving.check import check
from benchmarks.serving.load import open_loop, peak
from benchmarks.serving.servers import SERVERS
from benchmarks.serving.workloads import WORKLOADS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=list(WORKLOADS), nargs="*", default=list(WORKLOADS))
    parser.add_argument("--hidden", type=int, nargs="*", default=[256])
    parser.add_argument("--server", choices=list(SERVERS), nargs="*", default=list(SERVERS))
    parser.add_argument("--shares", type=float, nargs="*", default=[0.05, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--requests", type=int, default=2000, help="for the peak")
    parser.add_argument("--live", type=int, default=256)
    parser.add_argument("--check", type=int, help="test an engine with so many requests instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.check is not None:
        sys.exit(0 if check(options.check) else 1)
    for name in options.workload:
        for hidden in options.hidden:
            measure(name, hidden, options)


def measure(name: str, hidden: int, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    workload = WORKLOADS[name](hidden)
    rng = random.Random(0)
    requests = [workload.request(rng) for _ in range(options.requests)]
    names = [s for s in options.server if s != "padded" or workload.padded is not None]
    print(f"\n{name}, hidden {hidden}", flush=True)
    print("| server | peak, 1/s |\n| --- | ---: |")
    peaks = {}
    for key in names:
        server = SERVERS[key](workload, options.live)
        peak(server, requests[:100], options.live)  # warm-up: compiles kernels and finds schedules
        count = 100 if key == "one" else len(requests)
        peaks[key] = peak(server, requests[:count], options.live)
        server.close()
        print(f"| {server.name} | {peaks[key]:.0f} |", flush=True)
    reference = peaks.get("windows", max(peaks.values()))
    print("\n| server | share | offered, 1/s | p50, ms | p90, ms | p99, ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for share in options.shares:
        rate = share * reference
        many = [workload.request(rng) for _ in range(int(1.5 * rate * options.seconds) + 10)]
        for key in names:
            if rate > 0.95 * peaks[key]:
                print(f"| {SERVERS[key].name} | {share} | {rate:.0f} | | | more than its peak |")
                continue
            server = SERVERS[key](workload, options.live)
            peak(server, requests[:100], options.live)
            got = open_loop(server, many, rate, options.seconds)
            server.close()
            print(
                f"| {server.name} | {share} | {got.offered:.0f} | {got.p50:.1f} | {got.p90:.1f} "
                f"| {got.p99:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
