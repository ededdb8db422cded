"""Job pages at size: a step of 512 ranks × 500 spans, a matrix of 1,024 ranks × 500 steps.

Both are opened in headless Chromium from a running server, whose store holds the runs' folders.
Opened a second time, so that the run is read; the first view then counts from navigation until
the canvas is drawn, the whole page until the curves are drawn as well. Frames are the distances
of animation frames while the wheel turns. The named peer is BokehJS drawing as many bars, and as
many cells as an image, from a self-contained file.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.bench_web import _measure, _opened, _Served
from benchmarks.table import Row, print_table


def _write(folder: Path) -> None:
    from tests.labs.generated_run import Schedule, generate
    from tests.labs.web_run import save_run

    dense = Schedule(
        ranks=512, tensor_parallel=8, steps=2, forward_collectives=240, backward_collectives=254,
        forward_ns=150_000_000, backward_ns=300_000_000, slow={(77, "forward"): 1.6},
    )  # fmt: skip
    facts, spans, _ = generate(dense)
    save_run(folder / "runs" / "dense", facts, spans=spans, run="dense")
    wide = Schedule(ranks=1024, steps=500, backward_collectives=1, slow={(77, "forward"): 1.6})
    facts, spans, steps = generate(wide, spans_every=500)
    save_run(folder / "runs" / "wide", facts, spans=spans, steps=steps, run="wide")


def _bokeh(folder: Path) -> dict[str, str]:
    from bokeh.models import ColumnDataSource
    from bokeh.plotting import figure, output_file, save
    from bokeh.resources import INLINE

    tools = {"tools": "wheel_zoom", "active_scroll": "wheel_zoom", "output_backend": "canvas"}
    ranks, spans = 512, 500
    at = np.tile(np.arange(spans) * 1.0, ranks)
    bars = figure(width=1400, height=660, **tools)
    source = ColumnDataSource({"y": np.repeat(np.arange(ranks), spans), "left": at,
                               "right": at + 0.7})  # fmt: skip
    bars.hbar(y="y", left="left", right="right", height=0.8, source=source)
    cells = np.random.default_rng(1).normal(50, 2, (1024, 500)).astype(np.float32)
    heat = figure(width=1400, height=660, **tools)
    heat.image(image=[cells], x=0, y=0, dw=500, dh=1024, palette="Inferno256")
    found = {}
    for name, plot in (("timeline", bars), ("matrix", heat)):
        path = folder / f"{name}.html"
        output_file(path, mode="inline")
        save(plot, filename=path, resources=INLINE, title=name)
        found[name] = path.as_uri()
    return found


def run() -> list[Row]:
    """Measure both pages and their peers."""
    import shutil

    import httpx
    from playwright.sync_api import sync_playwright
    from tests.labs.browser import ARGUMENTS

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        _write(folder)
        peers = _bokeh(folder)
        pages = {
            "timeline": ("512 × 500 spans", "/runs/dense/steps/1"),
            "matrix": ("1,024 × 500 cells", "/runs/wide"),
        }
        with _Served(folder) as served, sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=ARGUMENTS
            )
            for name, (size, path) in pages.items():
                began = time.perf_counter()
                httpx.get(served.url + path, timeout=120)
                read = time.perf_counter() - began
                views, gaps = _measure(chromium, served.url + path, ".plot canvas", times=3)
                whole = statistics.median(
                    _opened(chromium, served.url + path, notches=0, selector="", when="__whole")[0]
                    for _ in range(3)
                )
                peer, peer_gaps = _opened(chromium, peers[name], notches=12, selector=".bk-events")
                p95 = statistics.quantiles(gaps, n=20)[-1]
                middle = statistics.median(gaps)
                theirs = statistics.median(peer_gaps)
                rows += [
                    Row(what=f"{name}, {size}: read and answer first", measured=read, unit="s",
                        target=""),
                    Row(what=f"{name}, {size}: first view", measured=statistics.median(views),
                        unit="s", target="≤ 0.5", peer=f"BokehJS {peer:.2f} s",
                        met=statistics.median(views) <= 0.5),
                    Row(what=f"{name}, {size}: the whole page", measured=whole, unit="s",
                        target=""),
                    Row(what=f"{name}, {size}: median frame", measured=middle, unit="ms",
                        target="≤ 17", peer=f"BokehJS {theirs:.1f} ms", met=middle <= 17.0),
                    Row(what=f"{name}, {size}: 95th percentile", measured=p95, unit="ms",
                        target="≤ 25", peer=f"BokehJS {max(peer_gaps):.1f} ms (worst)",
                        met=p95 <= 25.0),
                ]  # fmt: skip
            chromium.close()
    return rows


def main() -> None:
    """Print the table."""
    print_table("Job pages in headless Chromium", run())


if __name__ == "__main__":
    main()
