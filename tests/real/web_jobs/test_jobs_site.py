"""The job pages in Debian's Chromium: a real training, a made-up day, and 1,024 ranks by 500 steps."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from tests.labs.fleet_day import DAY_END_NS, write_day
from tests.labs.generated_run import Schedule, generate
from tests.labs.training import ROOT, bare_environment
from tests.labs.web_run import save_run

from kansoku.app.serve import Server, ServeSettings

pytestmark = pytest.mark.real
ARTEFACTS = Path(os.environ.get("KANSOKU_ARTEFACTS") or ROOT / "artefacts") / "web_jobs"
TRAIN = """
import torch
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(20):
    loss = model(torch.randn(64, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# The first rows stand for the others of a table: axe-core takes seconds for thousands of cells.
SAMPLE = {"include": [["html"]], "exclude": [["tbody tr:nth-child(n+5)"], ["svg"], [".bk-Figure"]]}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A server over a day of 100 nodes, one real run, and two generated ones."""
    folder = tmp_path_factory.mktemp("site")
    script = folder / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "run", "--out", str(folder / "runs" / "real"), "--",
         sys.executable, str(script)],
        env=bare_environment(KANSOKU_RING_DIR=folder / "rings"), capture_output=True, text=True,
        check=False, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    settings = ServeSettings(folder=folder, port=0, otlp_port=None, grpc_port=None)
    with Server(settings, clock_ns=lambda: DAY_END_NS) as server:
        day = write_day(server.store, gauges=("power",), network=False, fabric=False, step_s=300)
        job = next(j for j in day.jobs if j["job_id"] == day.idle_job)
        slow = generate(Schedule(ranks=64, slow={(9, "forward"): 1.6}, steps=40))
        save_run(folder / "runs" / "slow", slow[0], spans=slow[1], run="slow", job=job["job_id"])
        wide = generate(
            Schedule(ranks=1024, steps=500, backward_collectives=1, slow={(77, "forward"): 1.6}),
            spans_every=500,
        )
        save_run(folder / "runs" / "wide", wide[0], spans=wide[1], steps=wide[2], run="wide")
        runs = httpx.get(f"{server.url}/api/v1/pages/jobs", timeout=60).json()["runs"]
        real = next(r["run"] for r in runs if r["run"] not in {"slow", "wide"})
        yield server, job, real


def ready(page):
    page.wait_for_selector("html[data-ready]", state="attached", timeout=30_000)
    assert page.evaluate("document.documentElement.dataset.error ?? ''") == ""


PAGES = {
    "jobs": "/jobs", "job": "/jobs/{job}", "run": "/runs/{real}", "rank": "/runs/slow/ranks/9",
    "step": "/runs/slow/steps/5", "compare": "/compare?a=slow&b={real}", "history": "/history",
    "reliability": "/history/reliability", "idle": "/history/idle", "nodes": "/history/nodes",
    "benchmark": "/benchmark", "planner": "/planner?gpus=16&model=llama2-7b&global_batch=64",
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_drawn_without_error_or_outside_request_and_is_accessible(site, show, name):
    """Light English and dark Japanese by turns; axe-core looks at every page once."""
    server, job, real = site
    dark = bool(list(PAGES).index(name) % 2)
    path = PAGES[name].format(job=job["job_id"], real=real)
    if dark:
        address = f"{server.url}/settings?language=ja&next={path.replace('&', '%26')}"
    else:
        address = f"{server.url}{path}"
    watched = show(address, dark=dark)
    page = watched.page
    try:
        ready(page)
        assert page.get_attribute("html", "lang") == ("ja" if dark else "en")
        assert watched.errors == []
        known = (server.url, "data:", "blob:")
        assert [r for r in watched.requests if not r.startswith(known)] == []
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=True)
        result = Axe().run(page, context=SAMPLE).response
        found = [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in result["violations"]]
        assert found == []
    finally:
        page.close()


def test_from_cluster_to_job_to_rank_to_step_to_span(site, show):
    server, job, _ = site
    page = show(f"{server.url}/jobs?window=7d").page
    page.locator("td a", has_text=job["job_id"]).first.click()
    page.wait_for_url(f"**/jobs/{job['job_id']}")
    ready(page)
    page.locator(".card a", has_text="rank 9").click()
    page.wait_for_url("**/runs/slow/ranks/9")
    ready(page)
    assert "This rank is a straggler in forward" in page.locator("main").inner_text()
    page.locator("td a").first.click()
    page.wait_for_url("**/runs/slow/steps/*")
    ready(page)
    page.locator("canvas").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/steps/*?rank=*&span=*")
    ready(page)
    assert "Span" in page.locator("h2").first.inner_text()
    page.locator(".trail a", has_text="Run slow").click()
    page.wait_for_url("**/runs/slow")
    page.close()


def test_the_timeline_zooms_joins_and_marks(site, show):
    server, _, _ = site
    page = show(f"{server.url}/runs/slow/steps/5").page
    view = "(() => { const v = window.kansoku.drawn.values().next().value.view(); return v.to - v.from; })()"
    whole = page.evaluate(view)
    canvas = page.locator("canvas")
    canvas.focus()
    page.keyboard.press("+")
    assert page.evaluate(view) == pytest.approx(whole * 0.7)
    page.keyboard.press("0")
    assert page.evaluate(view) == whole
    # Once more: every lane fits; and back.
    page.keyboard.press("0")
    assert page.evaluate("window.kansoku.drawn.values().next().value.fits()") is True
    page.keyboard.press("0")
    assert page.evaluate("window.kansoku.drawn.values().next().value.fits()") is False
    # Rank 9 came last to the first all-reduce: the only late arrival, found by keyboard or mouse.
    page.evaluate(
        """() => {
          const drawn = window.kansoku.drawn.values().next().value;
          return drawn.choose(drawn.late());
        }"""
    )
    said = page.locator(".readout").inner_text()
    assert said.startswith("rank 9: all_reduce")
    assert "late" in said
    assert "after the first arrival" in said
    page.locator(".legend .key", has_text="collective").click()
    assert page.locator(".key[aria-pressed=false]").count() == 1
    page.close()


def test_one_slow_rank_of_a_thousand_is_seen(site, show):
    """1,024 rows in 620 pixels: rank 77's row is bright, the others are not."""
    server, _, _ = site
    page = show(f"{server.url}/runs/wide", height=1000).page
    bright = page.evaluate(
        """() => {
          const canvas = document.querySelector(".heatmap canvas, [data-kind=heatmap] canvas");
          const c = canvas.getContext("2d"), ratio = devicePixelRatio;
          const rows = [], height = canvas.clientHeight - 40;
          for (let y = 0; y < height; y++) {
            const p = c.getImageData(canvas.clientWidth * 0.6 * ratio, y * ratio, 1, 1).data;
            if (0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2] > 150) rows.push(Math.round(y / height * 1024));
          }
          return rows;
        }"""
    )
    assert bright
    assert all(abs(row - 77) <= 4 for row in bright)
    page.close()


def test_forms_lead_to_stable_addresses(site, show):
    server, _, _ = site
    page = show(f"{server.url}/planner?gpus=16&model=llama2-7b&global_batch=64").page
    page.fill("input[name=tp]", "2")
    page.get_by_role("button", name="Search").click()
    page.wait_for_url("**/planner?*tp=2*")
    ready(page)
    first = page.locator("table", has_text="tokens/s/GPU").first
    assert {r.split("\t")[0] for r in first.locator("tbody tr").all_inner_texts()} == {"2"}
    page.goto(f"{server.url}/jobs")
    ready(page)
    jobs = page.locator("table[data-sortable]").first
    jobs.get_by_role("button", name="ran", exact=True).click()
    ran = [text.split() for text in jobs.locator("tbody td:nth-child(11)").all_inner_texts()]
    sizes = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
    known = [float(words[0]) * sizes[words[1]] for words in ran if words != ["–"]]
    assert {"min", "h"} <= {words[-1] for words in ran}
    assert known in (sorted(known), sorted(known, reverse=True))
    page.select_option("select[name=state]", "failed")
    page.wait_for_url("**/jobs?*state=failed*")
    ready(page)
    states = page.locator("table[data-sortable]").first.locator("tbody td:nth-child(6)")
    assert set(states.all_inner_texts()) <= {"failed"}
    page.close()


def test_the_twins_keep_to_their_description(site):
    """Schemathesis asks for every job page's twin and columns, and checks the answers."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    server = site[0]
    document = httpx.get(f"{server.url}/api/openapi.json").json()
    mine = ("/jobs", "/runs", "/compare", "/history", "/benchmark", "/planner")
    document["paths"] = {
        path: item
        for path, item in document["paths"].items()
        if path.removeprefix("/api/v1/pages").startswith(mine) and "pages" in path
    }
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck), database=None,
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def check(case):
            response = case.call()
            assert response.status_code in {200, 400, 403, 404}, response.text
            case.validate_response(response, excluded_checks=[positive_data_acceptance])

        check()
        tried += 1
    assert tried >= 15


def test_a_step_opens_in_perfettos_own_pages(site, show):
    """The wheel's pages read the step's trace in WebAssembly under their own policy, offline."""
    server, _, _ = site
    watched = show(f"{server.url}/runs/slow/steps/5")
    page = watched.page
    page.get_by_role("link", name="Open in Perfetto").click()
    page.wait_for_url("**/perfetto/#!/*url=*")
    page.wait_for_function("document.body.innerText.includes('rank 9')", timeout=120_000)
    assert page.title().startswith("slow-step5") or "trace" in page.title()
    # Nothing left this machine: what its pages ask of other hosts the policy refused.
    outside = [r for r in watched.requests if not r.startswith((server.url, "data:", "blob:"))]
    done = page.evaluate(
        "performance.getEntriesByType('resource').filter((r) => r.transferSize > 0).map((r) => r.name)"
    )
    assert [r for r in outside if r in done] == []
    page.screenshot(path=ARTEFACTS / "perfetto.png")
    page.close()
    again = show(f"{server.url}/runs/slow/steps/5").page
    answer = again.request.get(f"{server.url}/perfetto/")
    assert "wasm-unsafe-eval" in answer.headers["content-security-policy"]
    strict = again.request.get(f"{server.url}/runs/slow/steps/5")
    assert "unsafe" not in strict.headers["content-security-policy"]
    again.close()
