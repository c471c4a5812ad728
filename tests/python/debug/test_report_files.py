"""Reports as files: a page for a browser, a trace for Perfetto, a graph for Graphviz, text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

ONES = torch.ones(4)
CHROMIUMS = ("chromium", "google-chrome", "chromium-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, CHROMIUMS)), None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)

    def forward(self, length: int) -> Tensor:
        h = ONES
        for _ in range(length):
            h = torch.tanh(self.step(h))
        return h.sum()


def read(loss: Tensor) -> float:
    return loss.item()  # </script> and "quotes" in a line


@pytest.fixture(scope="module")
def report() -> ab.Report:
    """Returns the report of a training step with early flushes and a backward."""
    model = Model()
    with ab.batch(profile=True, adaptive=False) as scope:
        losses = []
        for i in range(12):
            losses.append(model(1 + i % 3))
            if i % 4 == 2:
                read(losses[-1].detach())
    torch.stack(losses).sum().backward()
    return scope.report()


def data_of(page: str) -> Any:
    found = re.search(r"^const data = (.*);$", page, re.MULTILINE)
    assert found is not None
    return json.loads(found[1])


# --- the recorded trace ---


def test_the_trace_has_every_batch_in_its_flush(report: ab.Report) -> None:
    trace = report.trace
    assert trace is not None
    forward = [batch for batch in trace.batches if not batch[6]]
    assert len(forward) == report.batches
    assert sum(batch[2] for batch in forward) == report.nodes == len(trace.batch_of_node)
    assert len(trace.flushes) == len(report.flushes) == 4
    for _, _, _, _, start, end, _ in forward:
        assert any(f[2] <= start <= end <= f[3] for f in trace.flushes)
    names = {name for name, _, _ in trace.stages}
    assert names == {"schedule", "execute", "materialize", "backward", "weight gradients"}
    backward = [batch for batch in trace.batches if batch[6]]
    assert backward
    assert min(b[4] for b in backward) >= max(f[3] for f in trace.flushes)


def test_the_trace_has_who_read_what(report: ab.Report) -> None:
    trace = report.trace
    assert trace is not None
    ops = {row.serial: row.op for row in report.signatures}
    op_of_batch = {b[1]: ops[b[0]] for b in trace.batches if not b[6]}
    reads = {
        (op_of_batch[trace.batch_of_node[source]], op_of_batch[batch])
        for batch, inputs in zip(trace.batch_of_node, trace.inputs_of_node, strict=True)
        for source in inputs
    }
    assert ("aten::linear", "aten::tanh") in reads
    assert ("aten::tanh", "aten::linear") in reads
    assert all(source != "aten::sum" for source, _ in reads)


def test_bytes_are_those_of_results() -> None:
    x, weight = torch.ones(3), torch.ones(5, 3, requires_grad=True)
    with ab.batch(profile=True) as scope:
        kept = [nn.functional.linear(x, weight) for _ in range(2)]
    trace = scope.report().trace
    assert trace is not None
    [(_, number, members, size, _, _, is_backward)] = trace.batches
    assert (number, members, size, is_backward) == (0, 2, 2 * 5 * 4, False)
    assert len(kept) == 2


def test_nothing_is_recorded_without_profile() -> None:
    with ab.batch() as scope:
        kept = [Model()(2)]
    assert scope.report().trace is None
    assert "forward ms" not in scope.report().table()
    assert len(kept) == 1


def test_the_table_has_times_and_bytes(report: ab.Report) -> None:
    heading, *rows = report.table().splitlines()
    assert heading.split()[-5:] == ["forward", "ms", "backward", "ms", "MiB"]
    rows = [row for row in rows if not row.startswith("  passes: ")]
    assert all(float(row.split()[-3]) > 0 for row in rows)


# --- the page ---


def test_the_page_shows_what_the_report_says(report: ab.Report, tmp_path: Path) -> None:
    report.save(tmp_path / "batches.html")
    page = (tmp_path / "batches.html").read_text()
    data = data_of(page)
    assert data["verdict"] == str(report).splitlines()[:3]
    early = [flush for flush in data["timeline"]["flushes"] if flush["early"]]
    assert [flush["what"] for flush in early] == [".item()"] * 3
    assert all(flush["source"].startswith("return loss.item()") for flush in early)
    assert len(data["timeline"]["batches"]) == len(report.trace.batches)  # type: ignore[union-attr]
    assert page.count("</script>") == 1  # the one in the source line is escaped


def test_the_page_needs_no_network(report: ab.Report, tmp_path: Path) -> None:
    report.save(tmp_path / "batches.html")
    page = (tmp_path / "batches.html").read_text()

    class Links(HTMLParser):
        found: list[str]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("link", "img")
            assert not {"src", "href"} & {name for name, _ in attrs}

    Links().feed(page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in page


def test_one_examples_structure(report: ab.Report) -> None:
    from torch_autobatch._report_page import page_data

    data = page_data(report)
    example = data["timeline"]["example"]
    ops = [data["lanes"][lane]["op"] for lane in example["lanes"]]
    assert ops[0] == "sum"
    assert set(ops) == {"sum", "tanh", "linear"}
    assert ops.count("linear") == ops.count("tanh") <= 3
    assert len(example["links"]) == len(ops) - 1  # a chain


def test_one_examples_structure_after_early_flushes() -> None:
    """No flush contains a whole example, and the last flush contains only its end."""
    from torch_autobatch._report_page import page_data

    step = Model().step
    with ab.batch(profile=True, adaptive=False) as scope:
        states = [torch.tanh(step(torch.tanh(step(ONES)))) for _ in range(3)]
        float(states[0].detach().sum())
        losses = [state.sum() for state in states]
    assert len(losses) == 3
    data = page_data(scope.report())
    lanes = data["timeline"]["example"]["lanes"]
    assert [data["lanes"][lane]["op"] for lane in lanes][:4] == ["tanh", "linear", "tanh", "linear"]


def test_the_page_without_a_trace_has_advice_alone(tmp_path: Path) -> None:
    with ab.batch() as scope:
        kept = [Model()(2)]
    scope.report().save(tmp_path / "batches.html")
    data = data_of((tmp_path / "batches.html").read_text())
    assert data["timeline"] is None
    assert [lane["op"] for lane in data["lanes"]]
    assert len(kept) == 1


def test_a_notebook_shows_the_page(report: ab.Report) -> None:
    shown = report._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert shown.count("<") == 2  # the whole page is an attribute


def dom_of(path: Path) -> str:
    """Returns the page's document after its script has run, with the errors of the script."""
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += ["--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *options, path.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_the_page(report: ab.Report, tmp_path: Path) -> None:
    report.save(tmp_path / "batches.html")
    # Reports the text after a click on the first early flush, and whether its color is drawn.
    probe = """<script>
      const canvas = document.querySelector("canvas"), bounds = canvas.getBoundingClientRect();
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      let red = 0, blue = 0;
      for (let i = 0; i < pixels.length; i += 4) {
        if (pixels[i] > 180 && pixels[i + 1] < 60 && pixels[i + 2] < 70) ++red;
        if (pixels[i] < 70 && pixels[i + 2] > 200) ++blue;
      }
      document.body.dataset.red = red > 50;
      document.body.dataset.blue = blue > 50;
      const flush = data.timeline.flushes[0];
      const end = data.timeline.batches.reduce((t, b) => Math.max(t, b[2]), 0);
      const last = data.timeline.stages.reduce((t, s) => Math.max(t, s[2]), end);
      const x = bounds.left + 250 + (flush.start + flush.end) / 2 / last * (bounds.width - 250);
      for (const type of ["pointerdown", "pointerup"]) {
        canvas.dispatchEvent(new PointerEvent(type,
          { clientX: x, clientY: bounds.top + 40, pointerId: 1 }));
      }
    </script>"""
    path = tmp_path / "batches.html"
    path.write_text(
        path.read_text()
        .replace("canvas.setPointerCapture(event.pointerId);", "")  # would need a real pointer
        .replace("</body>", probe + "</body>")
    )
    dom = dom_of(path)
    assert 'data-red="true"' in dom
    assert 'data-blue="true"' in dom
    detail = re.search(r'<div id="detail"[^>]*>(.*?)</div>', dom, re.DOTALL)
    assert detail is not None
    assert "Early flush: .item()" in detail[1]
    assert "return loss.item()" in detail[1]
    assert "<svg" in dom


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_many_batches(report: ab.Report, tmp_path: Path) -> None:
    import dataclasses

    assert report.trace is not None
    batches, flushes = report.trace.batches, report.trace.flushes
    times = 100_000 // len(batches)
    step = max(batch[5] for batch in batches)
    shifts = [k * step for k in range(times)]
    trace = dataclasses.replace(
        report.trace,
        batches=[(*b[:4], b[4] + t, b[5] + t, b[6]) for t in shifts for b in batches],
        flushes=[(*f[:2], f[2] + t, f[3] + t) for t in shifts for f in flushes],
    )
    dataclasses.replace(report, trace=trace).save(tmp_path / "batches.html")
    assert "early flushes</span>" in dom_of(tmp_path / "batches.html")


# --- other files ---


def test_a_trace_for_perfetto(report: ab.Report, tmp_path: Path) -> None:
    report.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {event["tid"] for event in spans} == set(tracks)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    names = [event["name"] for event in spans]
    assert names.count("early: .item()") == 3
    assert any(re.fullmatch(r"linear x \d+, backward", name) for name in names)
    assert any(name.startswith("linear ") and ":" in name for name in tracks.values())


def test_a_graph_for_graphviz(report: ab.Report, tmp_path: Path) -> None:
    report.save(tmp_path / "graph.dot")
    text = (tmp_path / "graph.dot").read_text()
    assert text.count("[label=") == report.batches
    assert re.search(r'b\d+ \[label="linear [^"]*test_report_files\.py:\d+\\n\d+ ops"\];', text)
    assert " -> " in text
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg"], input=text, text=True, check=True, capture_output=True)


def test_text(report: ab.Report, tmp_path: Path) -> None:
    report.save(tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text() == str(report)


def test_what_can_not_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.html, \.json, \.dot, \.txt"):
        ab.Report().save(tmp_path / "report.pdf")
    for name in ("trace.json", "graph.dot"):
        with pytest.raises(ValueError, match=r"batch\(profile=True\)"):
            ab.Report().save(tmp_path / name)
    assert not list(tmp_path.iterdir())
