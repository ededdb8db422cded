"""The machine's pages in Debian's Chromium, over a made-up day of 100 nodes."""

import dataclasses
import hashlib
import json
import subprocess
import sys
import time

import httpx
import polars as pl
import pyarrow as pa
import pytest
from axe_playwright_python.sync_playwright import Axe
from tests.labs.fleet_day import DAY_END_NS

from kansoku.app.serve import Server, ServeSettings
from kansoku.store import LocalStore

pytestmark = pytest.mark.real
S = 10**9
PAGES = {
    "cluster": "/cluster",
    "node": "/nodes/c003",
    "fabric": "/fabric",
    "fabric-nics": "/fabric?by=rnic&measure=rtt_p50",
    "pair": "/fabric/pair?source=leaf1&target=leaf9",
    "bursts": "/bursts",
    "incidents": "/incidents",
    "incident": "/incidents/inc-1",
    "health": "/health",
    "not-found": "/nodes/none",
}
# The first rows stand for the others of a table: axe-core takes seconds for thousands of cells.
SAMPLE = {"include": [["html"]], "exclude": [["tbody tr:nth-child(n+5)"], ["li:nth-child(n+6)"]]}


def ready(page):
    page.wait_for_selector("html[data-ready]", state="attached", timeout=30_000)
    assert page.evaluate("document.documentElement.dataset.error ?? ''") == ""


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_drawn_without_error_or_outside_request_and_is_accessible(
    site, show, artefacts, name
):
    """Light English and dark Japanese; axe-core looks at each page in one of the two."""
    url = site[0].url
    dark_checked = list(PAGES).index(name) % 2
    for dark, language in ((False, "en"), (True, "ja")):
        watched = _open(show, url, PAGES[name], dark, language)
        page = watched.page
        try:
            assert [r for r in watched.requests if not r.startswith((url, "data:", "blob:"))] == []
            if name != "not-found":
                assert watched.errors == []
            assert page.get_attribute("html", "lang") == language
            page.screenshot(
                path=artefacts / f"{name}-{'dark' if dark else 'light'}-{language}.png",
                full_page=True,
            )
            if dark_checked != dark:
                continue
            result = Axe().run(page, context=SAMPLE).response
            found = [
                (v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in result["violations"]
            ]
            assert found == []
        finally:
            page.close()


def _open(show, url, path, dark=False, language="en"):
    watched = show(f"{url}{path}", dark=dark)
    if language != "en":
        watched.page.click(f"a[hreflang={language}]")
        watched.page.wait_for_selector(f"html[lang={language}][data-ready]", state="attached")
    return watched


def test_the_heat_maps_pixels_show_work_idleness_and_silence(site, show):
    """A job's GPUs are bright, idle ones dark, and a node that fell silent is blank."""
    server, day = site
    page = show(f"{server.url}/cluster").page
    columns = httpx.get(f"{server.url}/api/v1/pages/cluster/columns/heat", timeout=60).content
    from tests.labs.web_columns import decode

    header, arrays = decode(columns)
    times = arrays["times_ms"].tolist()
    job = next(j for j in day.jobs if j["job_id"] == day.idle_job)
    middle = (job["start_ns"] + job["stop"]) // 2 // (60 * S) * 60_000
    column = times.index(float(middle)) + 3
    labels = header["row_labels"]
    busy = labels.index(f"{day.nodes[job['low'] + job['width'] // 2]}/4")
    idle = labels.index(f"{day.nodes[job['low']]}/4")
    silent = labels.index(f"{day.silent}/4")

    def luminance(row, at):
        """Read the canvas at the middle of a cell."""
        red, green, blue = page.evaluate(
            """([row, at, rows, columns]) => {
              const canvas = document.querySelector("canvas"), d = window.kansoku.drawn.values().next().value;
              const v = d.view(), ratio = devicePixelRatio, left = canvas.clientWidth - 2 - d.room();
              const x = left + (at + 0.5) / columns * d.room(), y = (row + 0.5) / rows * (canvas.clientHeight - 40);
              return [...canvas.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data].slice(0, 3);
            }""",
            [row, at, header["rows"], header["columns"]],
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert luminance(busy, column) > 110
    assert luminance(idle, column) < 60
    blank = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--blank')")
    assert blank.strip() == "#e3e8eb"
    assert luminance(silent, len(times) - 40) > 200
    page.close()


def test_zoom_keys_and_readout_lead_from_cell_to_job_and_node(site, show):
    page = show(f"{site[0].url}/cluster").page
    canvas = page.locator("canvas")
    view = "(() => { const v = window.kansoku.drawn.values().next().value.view(); return [v.r0, v.r1, v.c0, v.c1]; })()"
    whole = page.evaluate(view)
    canvas.focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    closer = page.evaluate(view)
    assert closer[1] - closer[0] == pytest.approx((whole[1] - whole[0]) * 0.49)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowDown")
    said = page.locator(".readout").inner_text()
    assert said.count("·") >= 2
    assert " W" in said
    page.keyboard.press("0")
    assert page.evaluate(view) == whole
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.3)
    page.mouse.wheel(0, -300)
    after = page.evaluate(view)
    assert after[3] - after[2] < whole[3] - whole[2]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url("**/{jobs,nodes}/*")
    page.close()


def test_the_wheel_scrolls_until_the_picture_has_focus(site, show):
    page = show(f"{site[0].url}/cluster", height=500).page
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 40)
    page.mouse.wheel(0, 400)
    page.wait_for_selector("html[data-ready]", state="attached")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate("scrollY") > 0
    page.close()


def test_from_matrix_to_pair_to_switch_and_link(site, show):
    page = show(f"{site[0].url}/fabric").page
    page.click("td a:has-text('leaf1-spine0')")
    ready(page)
    assert "link:leaf1-spine0" in page.locator("main").inner_text()
    page.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url("**/fabric/pair?*")
    ready(page)
    page.goto(f"{site[0].url}/fabric/pair?source=leaf1&target=leaf9")
    ready(page)
    page.locator("td a", has_text="switch:spine0").first.click()
    page.wait_for_url("**/fabric?switch=spine0")
    ready(page)
    page.close()


def test_from_incident_to_evidence_to_node(site, show):
    page = show(f"{site[0].url}/incidents").page
    page.click("td a:has-text('inc-1')")
    ready(page)
    assert "Speaks for it" in page.locator("main").inner_text()
    page.locator("td a", has_text="node:c003").first.click()
    page.wait_for_url("**/nodes/c003")
    ready(page)
    assert "Not responding" in page.locator("main").inner_text()
    page.close()


def test_tables_sort_and_filter(site, show):
    page = show(f"{site[0].url}/bursts").page
    table = page.locator("table[data-sortable]", has_text="time in bursts")
    table.get_by_role("button", name="longest, ms").click()
    values = [
        float(t.replace(",", ""))
        for t in table.locator("tbody tr td:nth-child(7)").all_inner_texts()
    ]
    assert values == sorted(values, reverse=True)
    assert table.locator("th[aria-sort=descending]").count() == 1
    page.get_by_label("filter rows: Ports").fill("c007")
    rows = table.locator("tbody tr").all_inner_texts()
    assert rows
    assert all("c007" in row for row in rows)
    page.close()


def test_a_live_page_follows_and_keeps_zoom_and_open_parts(site, show):
    server, _ = site
    page = show(f"{server.url}/cluster").page
    page.wait_for_selector("#pulse[data-state=live]")
    page.locator("canvas").focus()
    page.keyboard.press("+")
    view = "JSON.stringify(window.kansoku.drawn.values().next().value.view())"
    zoomed = page.evaluate(view)
    page.evaluate("document.activeElement.blur()")
    page.locator("summary", has_text="what it shows").click()
    row = pl.DataFrame(
        {"id": ["inc-live"], "onset_ns": [DAY_END_NS - 5 * S], "time_ns": [DAY_END_NS - 4 * S],
         "kind": ["hang"], "subject": ["node:c042"], "domain": ["network"], "state": ["open"]}
    )  # fmt: skip
    sink = pa.BufferOutputStream()
    table = row.to_arrow(compat_level=pl.CompatLevel.oldest())
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    sent = httpx.post(
        f"{server.url}/api/v1/tables/incidents", content=sink.getvalue().to_pybytes(),
        headers={"content-type": "application/vnd.apache.arrow.stream"},
    )  # fmt: skip
    assert sent.status_code == 200
    page.wait_for_selector("td a:has-text('inc-live')", timeout=15_000)
    page.wait_for_selector("li.bad:has-text('c042')")
    assert page.evaluate(view) == zoomed
    assert page.locator("details.alternative").first.get_attribute("open") is not None
    page.close()


def test_a_page_catches_up_with_what_came_while_the_server_was_away(show, tmp_path):
    """No row arrives after the restart, so no tick tells the page to ask."""
    settings = ServeSettings(folder=tmp_path, port=0, otlp_port=None, grpc_port=None)
    with Server(settings) as server:
        port = httpx.URL(server.url).port
        page = show(f"{server.url}/incidents").page
        page.wait_for_selector("#pulse[data-state=live]")
    page.wait_for_selector("#pulse[data-state=waiting]")
    with LocalStore(tmp_path) as store:
        now = time.time_ns()
        row = {"id": "inc-away", "onset_ns": now - 5 * S, "time_ns": now - 4 * S, "kind": "hang",
               "subject": "node:c042", "domain": "network", "state": "open"}  # fmt: skip
        store.append("incidents", pl.DataFrame([row]))
    with Server(dataclasses.replace(settings, port=port)):
        page.wait_for_selector("td a:has-text('inc-away')", timeout=20_000)
        page.close()


def test_theme_language_and_zone_are_kept(site, show):
    page = show(f"{site[0].url}/incidents").page
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("a[title^='Theme']")
    ready(page)
    assert page.evaluate(ground) != light
    page.click("a[hreflang=ja]")
    ready(page)
    assert page.locator("h1").inner_text() == "インシデント"
    page.goto(f"{site[0].url}/fabric")
    ready(page)
    assert page.get_attribute("html", "data-theme") == "dark"
    assert page.get_attribute("html", "lang") == "ja"
    page.close()


def test_times_are_in_the_readers_zone_or_utc(site, show):
    page = show(f"{site[0].url}/incidents/inc-1").page
    browser = page.context.browser
    page.close()
    context = browser.new_context(timezone_id="Asia/Tokyo")
    page = context.new_page()
    page.goto(f"{site[0].url}/incidents/inc-1")
    ready(page)
    # The onset is 2026-01-01T22:00:00Z.
    assert "2026-01-02 07:00:00" in page.locator("dl.facts").inner_text()
    page.click("a[title^='Times']")
    ready(page)
    assert "2026-01-01 22:00:00" in page.locator("dl.facts").inner_text()
    context.close()


def test_columns_that_fail_say_so_and_can_be_asked_for_again(site, show):
    page = show(f"{site[0].url}/incidents").page
    page.route(
        "**/columns/**",
        lambda route: route.fulfill(status=503, body=json.dumps({"error": "the store is busy"})),
    )
    page.goto(f"{site[0].url}/bursts")
    page.wait_for_selector("html[data-ready=error]", state="attached")
    assert "the store is busy" in page.locator("figure").inner_text()
    page.unroute("**/columns/**")
    page.click("button:has-text('try again')")
    page.wait_for_selector("canvas")
    page.close()


def test_a_real_agents_node_appears_and_is_heard(show, tmp_path, artefacts):
    """The node agent of this machine sends to the server; its pages show it, live."""
    settings = ServeSettings(folder=tmp_path / "store", port=0, otlp_port=0, grpc_port=None)
    with Server(settings) as server:
        watched = show(f"{server.url}/health")
        page = watched.page
        assert "kansoku agent --to" in page.locator("main").inner_text()
        agent = subprocess.Popen(
            [sys.executable, "-m", "kansoku", "agent", "--to",
             f"http://127.0.0.1:{server.otlp_port}", "--interval", "0.5", "--node", "realnode",
             "--spool", str(tmp_path / "spool")],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            page.wait_for_selector("td a:has-text('realnode')", timeout=60_000)
            page.screenshot(path=artefacts / "health-real.png")
            page.click("td a:has-text('realnode')")
            ready(page)
            assert page.locator("h1").inner_text() == "Node realnode"
            page.goto(f"{server.url}/cluster")
            ready(page)
            page.wait_for_selector("ul.grid li:has-text('realnode')")
            assert watched.errors == []
        finally:
            agent.terminate()
            agent.wait(20)
            page.close()


def test_a_browser_signs_in_where_the_server_knows_principals(show, tmp_path):
    digest = hashlib.sha256(b"secret").hexdigest()
    file = tmp_path / "principals.toml"
    file.write_text(f'[[principal]]\nname = "olga"\nrole = "operator"\ntoken_sha256 = "{digest}"\n')
    settings = ServeSettings(
        folder=tmp_path / "store", port=0, otlp_port=None, grpc_port=None, principals=file
    )
    with Server(settings) as server:
        page = show(f"{server.url}/cluster").page
        assert "/sign-in" in page.url
        page.fill("input[type=password]", "secret")
        page.click("form.sign-in button")
        page.wait_for_url("**/cluster")
        ready(page)
        page.wait_for_selector("#pulse[data-state=live]")
        assert page.evaluate("document.cookie").find("secret") == -1
        page.close()
