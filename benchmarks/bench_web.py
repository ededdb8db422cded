"""Web pages: time to the first view, frames while zooming, the server's memory; Bokeh beside.

The cluster's heat map (100 nodes × 8 GPUs × 1,440 minutes, jobs over it) and a step's timeline
(64 ranks × 500 spans) are opened in headless Chromium from a running server. The named peer is
BokehJS drawing the same cells as an image and the same spans as bars, from one self-contained file.
A first view counts from navigation until the root element says that its canvases are drawn and two
more frames have passed; these two pages have nothing that comes later. Frames are the distances
of animation frames while the wheel turns, one notch a frame; a browser paints every 16.7 ms at
best.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.table import Row, print_table

RANKS, SPANS = 64, 500
_COLOURS = {"forward": "#3f8fd2", "backward": "#63b76c", "collective": "#e4572e"}
VIEW = """
const when = (there) => new Promise((done) => {
  const look = () => {
    if (there(document.documentElement?.dataset))
      requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())));
    else setTimeout(look, 2);
  };
  look();
});
const peer = () => !location.protocol.startsWith("http") && window.Bokeh?.documents?.[0]?.is_idle;
window.__ready = when((data) => data?.drawn || peer());
window.__whole = when((data) => data?.ready || peer());
"""
ZOOM = """
async ([selector, notches]) => {
  const find = (root) => {
    for (const element of root.querySelectorAll("*")) {
      if (element.matches(selector)) return element;
      const inner = element.shadowRoot && find(element.shadowRoot);
      if (inner) return inner;
    }
    return null;
  };
  const target = find(document);
  target.focus?.();
  const at = target.getBoundingClientRect();
  const place = { clientX: at.left + at.width * 0.55,
    clientY: at.top + Math.min(at.height, 600) * 0.4,
    bubbles: true, composed: true, cancelable: true, ctrlKey: false, deltaMode: 0 };
  const gaps = [];
  let last = null;
  for (let n = 0; n < notches; n++) {
    const now = await new Promise((done) => requestAnimationFrame(done));
    if (last !== null) gaps.push(now - last);
    last = now;
    target.dispatchEvent(new WheelEvent("wheel", { ...place, deltaY: n % 60 < 40 ? -40 : 80 }));
  }
  return gaps;
}
"""


def serve(folder: str) -> None:
    """Serve a folder until the input ends; the first line on stdout is the address."""
    from tests.labs.fleet_day import DAY_END_NS

    from kansoku.app.serve import Server, ServeSettings

    settings = ServeSettings(folder=Path(folder), port=0, otlp_port=None, grpc_port=None)
    with Server(settings, clock_ns=lambda: DAY_END_NS) as server:
        print(server.url, flush=True)
        sys.stdin.read()


def _write(folder: Path) -> None:
    from tests.labs.fleet_day import DAY_END_NS, write_day

    from kansoku.store import LocalStore

    with LocalStore(folder, clock_ns=lambda: DAY_END_NS) as store:
        write_day(store, gauges=("power",), network=False, fabric=False)
        store.append("spans", _spans(DAY_END_NS - 10**12))
        store.append(
            "steps",
            pl.DataFrame(
                {"run": "bench", "rank": list(range(RANKS)), "step": 3,
                 "start_ns": DAY_END_NS - 10**12, "duration_ns": SPANS * 1_000_000,
                 "complete": True}
            ).cast({"rank": pl.Int32, "step": pl.Int32}),
        )  # fmt: skip


def _spans(start_ns: int) -> pl.DataFrame:
    rng = np.random.default_rng(5)
    kinds = np.array(["forward", "backward", "collective", "optimizer", "data_wait"])
    kind = kinds[rng.choice(5, RANKS * SPANS, p=[0.4, 0.4, 0.12, 0.04, 0.04])]
    rank = np.repeat(np.arange(RANKS, dtype=np.int32), SPANS)
    at = np.tile(np.arange(SPANS) * 1_000_000, RANKS) + rng.integers(0, 300_000, RANKS * SPANS)
    length = rng.integers(200_000, 690_000, RANKS * SPANS)
    return pl.DataFrame(
        {
            "run": "bench", "rank": rank, "step": np.full(RANKS * SPANS, 3, np.int32),
            "kind": kind.tolist(), "name": kind.tolist(), "start_ns": start_ns + at,
            "duration_ns": length, "id": np.tile(np.arange(SPANS), RANKS),
        }
    )  # fmt: skip


def _bokeh_files(folder: Path) -> dict[str, str]:
    """Write the peer's pages: an image of the same cells, bars of the same spans."""
    from bokeh.models import ColumnDataSource
    from bokeh.plotting import figure, output_file, save
    from bokeh.resources import INLINE

    rng = np.random.default_rng(5)
    cells = rng.normal(400, 90, (800, 1440)).astype(np.float32)
    tools = {"tools": "wheel_zoom", "active_scroll": "wheel_zoom", "output_backend": "canvas"}
    heat = figure(width=1400, height=620, **tools)
    heat.image(image=[cells], x=0, y=0, dw=1440, dh=800, palette="Inferno256")
    spans = _spans(0)
    bars = figure(width=1400, height=660, **tools)
    source = ColumnDataSource(
        {
            "y": spans["rank"].to_numpy(), "left": spans["start_ns"].to_numpy() / 1e6,
            "right": (spans["start_ns"] + spans["duration_ns"]).to_numpy() / 1e6,
            "color": [_COLOURS.get(kind, "#999999") for kind in spans["kind"]],
        }
    )  # fmt: skip
    bars.hbar(y="y", left="left", right="right", height=0.8, color="color", source=source)
    found = {}
    for name, plot in (("heat map", heat), ("timeline", bars)):
        path = folder / f"{name.replace(' ', '-')}.html"
        output_file(path, mode="inline")
        save(plot, filename=path, resources=INLINE, title=name)
        found[name] = path.as_uri()
    return found


def _opened(
    browser, address: str, *, notches: int, selector: str, when: str = "__ready"
) -> tuple[float, list[float]]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.add_init_script(VIEW)
    page.goto(address)
    ready = page.evaluate(f"window.{when}")
    if notches:
        page.evaluate("window.__whole")
    gaps = page.evaluate(ZOOM, [selector, notches]) if notches else []
    context.close()
    return ready / 1e3, gaps


def _measure(
    browser, address: str, selector: str, *, times: int = 5
) -> tuple[list[float], list[float]]:
    """Return times to the first view (each with an empty browser cache) and frame gaps."""
    views = [_opened(browser, address, notches=0, selector=selector)[0] for _ in range(times)]
    gaps = _opened(browser, address, notches=180, selector=selector)[1]
    return views, gaps


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the server is gone")


class _Served:
    """The server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        code = f"from benchmarks.bench_web import serve; serve({str(folder)!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(30)

    def settled(self) -> int:
        """Return resident bytes two seconds after the last request."""
        time.sleep(2)
        return _resident(self.process.pid)


def _questions(url: str) -> None:
    """Ask the API for the rows that the two pages show: the store's own cost."""
    import httpx
    from tests.labs.fleet_day import DAY_END_NS

    since = DAY_END_NS - 86400 * 10**9
    for path in (
        (
            f"/api/v1/metrics/range?metric=hw.power&start_ns={since}&end_ns={DAY_END_NS}"
            "&step_ns=60000000000&match=hw.type%3Dgpu"
        ),
        "/api/v1/tables/spans?run=bench&limit=100000",
    ):
        accept = {"accept": "application/vnd.apache.arrow.stream"}
        httpx.get(url + path, timeout=60, headers=accept).raise_for_status()


def main() -> None:
    """Print the table."""
    import httpx
    from playwright.sync_api import sync_playwright
    from tests.labs.browser import ARGUMENTS

    rows = []
    with tempfile.TemporaryDirectory(prefix="kbench-web-") as name, sync_playwright() as playwright:
        folder = Path(name)
        _write(folder / "store")
        peers = _bokeh_files(folder)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        with _Served(folder / "store") as server:
            httpx.get(f"{server.url}/incidents", timeout=60)
            idle = server.settled()
            _questions(server.url)
            asked = server.settled() - idle
        with _Served(folder / "store") as server:
            paths = {"heat map": "/cluster", "timeline": "/runs/bench/steps/3"}
            httpx.get(f"{server.url}/incidents", timeout=60)
            idle = server.settled()
            held = [browser.new_page() for _ in paths]
            for page, path in zip(held, paths.values(), strict=True):
                page.goto(server.url + path)
                page.wait_for_selector("html[data-ready]", state="attached", timeout=60_000)
            grown = server.settled() - idle
            for page in held:
                page.close()
            for kind, path in paths.items():
                views, gaps = _measure(browser, server.url + path, ".plot canvas")
                theirs, their_gaps = _measure(browser, peers[kind], ".bk-events", times=3)
                rows += _rows(kind, views, gaps, theirs, their_gaps)
        own = (grown - asked) / 2**20
        rows.append(
            Row(what="server with both open, above idle, the store's share apart", measured=own,
                unit="MiB", target="≤ 60", peer=f"with the store {grown / 2**20:.0f} MiB",
                met=own <= 60)
        )  # fmt: skip
        browser.close()
    print_table("Web pages in headless Chromium", rows)


def _rows(kind, views, gaps, theirs, their_gaps) -> list[Row]:
    size = "800 × 1,440" if kind == "heat map" else f"{RANKS} × {SPANS}"
    view, median, peer = (statistics.median(one) for one in (views, gaps, theirs))
    p95, their_p95 = (float(np.percentile(one, 95)) for one in (gaps, their_gaps))
    return [
        Row(what=f"{kind} {size}: first view", measured=view, unit="s", target="≤ 0.5",
            peer=f"BokehJS {peer:.2f} s, ratio {peer / view:.1f}", met=view <= 0.5),
        Row(what=f"{kind}: frame while zooming, median", measured=median, unit="ms",
            target="≤ 17", peer=f"BokehJS {statistics.median(their_gaps):.1f} ms",
            met=median <= 17),
        Row(what=f"{kind}: frame while zooming, 95th percentile", measured=p95, unit="ms",
            target="≤ 25", peer=f"BokehJS {their_p95:.1f} ms", met=p95 <= 25),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
