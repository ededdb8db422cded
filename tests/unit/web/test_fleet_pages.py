"""Pages of the machine over a store with a made-up day: what they must say is known by hand."""

import re

import numpy as np
import polars as pl
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tests.labs.english_left import english_left
from tests.labs.fleet_day import DAY_END_NS, write_day
from tests.labs.web_columns import decode

from kansoku.app.serve.access import Access, Principal
from kansoku.app.serve.session import COOKIE, CookieSession
from kansoku.app.web_fleet import PAGES
from kansoku.app.web_fleet._heat import HEAT, heat
from kansoku.app.web_fleet._window import Span, window_of
from kansoku.app.web_page import parse_query
from kansoku.app.web_reading import Reading
from kansoku.errors import InputError
from kansoku.store import LocalStore
from kansoku.web import routes

S = 10**9
OPERATOR, TENANT = "operator-token", "tenant-token"
EVERY = [
    "/cluster", "/nodes/c001", "/fabric", "/fabric?by=rnic&measure=rtt_p99", "/bursts",
    "/fabric/pair?source=leaf0&target=leaf1", "/incidents", "/incidents/inc-1", "/health",
]  # fmt: skip


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    with LocalStore(tmp_path_factory.mktemp("day"), clock_ns=lambda: DAY_END_NS) as store:
        yield store, write_day(store, nodes=8, gpus=4, minutes=240)


@pytest.fixture(scope="module")
def client(day):
    app = Starlette(
        routes=routes(store=day[0], access=Access({}, {}), clock_ns=lambda: DAY_END_NS, pages=PAGES)
    )
    return TestClient(app, raise_server_exceptions=False)


def reading(store, **more):
    return Reading(store=store, clock_ns=lambda: DAY_END_NS, **more)


@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("path", EVERY)
def test_every_page_and_its_twin_answer(client, path, language):
    page = client.get(path, headers={"accept-language": language})
    assert page.status_code == 200, page.text
    assert f'<html lang="{language}"' in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    twin = client.get(f"/api/v1/pages{path}")
    assert twin.json()["schema"].startswith("kansoku.web.")


# What the made-up day's kernel, Slurm and incident say: other people's words stay as they are.
QUOTED = {
    "no ECC error was counted before", "Drain the node and replace", "Not responding",
    "NVRM: Xid 79: GPU has fallen off the bus",
}  # fmt: skip


@pytest.mark.parametrize("path", [*EVERY, "/nodes/unheard-of"])
def test_no_english_sentence_is_left_in_japanese(client, path):
    page = client.get(path, headers={"accept-language": "ja"})
    assert page.status_code in {200, 404}
    assert [text for text in english_left(page.text) if text not in QUOTED] == []


def test_the_search_for_english_finds_it():
    page = "<h1>概要</h1><p>the run is over <code>not this one</code></p><td title='no data yet'>"
    assert english_left(page + "GPU forward 12 ms") == ["the run is over", "no data yet"]


def test_the_node_that_fell_silent_and_the_free_ones_are_named(client, day):
    answer = client.get("/api/v1/pages/cluster").json()
    running = {
        node
        for job in day[1].jobs
        if job["state"] == "RUNNING"
        for node in job["node_list"].split(",")
    }
    assert {n["name"] for n in answer["nodes"] if n["jobs"]} == running
    assert set(answer["free"]["idle"]) == set(day[1].nodes) - running - {day[1].silent}
    assert answer["free"]["gpus_free"] == 4 * len(answer["free"]["idle"])
    by_name = {n["name"]: n for n in answer["nodes"]}
    assert by_name[day[1].silent]["incidents"] == ["inc-1"]
    # Its samples end two hours before; "heard" of a silent node is known to five minutes.
    assert by_name[day[1].silent]["heard"] == "2026-01-01T21:55:00Z"
    assert by_name["c001"]["heard"] == "2026-01-01T23:59:00Z"


def test_the_heat_map_holds_the_samples_that_were_written(client, day):
    raw = client.get("/api/v1/pages/cluster/columns/heat?window=6h")
    assert raw.headers["content-type"] == "application/x-kansoku-columns"
    header, arrays = decode(raw.content)
    values, times = arrays["high"], arrays["times_ms"]
    written = day[0].table("metrics", filters={"metric": "hw.power"})
    one = written.filter(
        pl.col("labels").str.contains('"host.name":"c001"', literal=True)
        & pl.col("labels").str.contains('"hw.name":"gpu3"', literal=True)
    )
    row = header["row_labels"].index("c001/3")
    wanted = dict(one.select("time_ns", "value").iter_rows())
    for column, time_ms in enumerate(times):
        value = wanted.get(int(time_ms) * 1_000_000)
        assert (
            np.isnan(values[row, column])
            if value is None
            else value == pytest.approx(values[row, column])
        )
    assert len(header["row_labels"]) == 8 * 4
    assert header["groups"][0] == ["c001", 0, 3]
    silent = header["row_labels"].index(f"{day[1].silent}/0")
    late = times >= (DAY_END_NS - 7200 * S) / 1e6
    assert np.isnan(values[silent, late]).all()
    drawn = {box[0] for box in header["boxes"]}
    assert drawn <= {job["job_id"] for job in day[1].jobs if job["start_ns"]}
    assert day[1].idle_job in drawn


def test_a_window_that_moved_on_shows_what_reading_it_whole_shows(tmp_path):
    """The page keeps settled columns and asks the store for new ones only."""
    now = [DAY_END_NS - 3600 * S]
    with LocalStore(tmp_path, clock_ns=lambda: DAY_END_NS + 3600 * S) as store:
        write_day(store, nodes=4, gpus=2, minutes=240, network=False, fabric=False)
        warm = Reading(store=store, clock_ns=lambda: now[0])
        for _ in range(6):
            span = window_of({"window": "1h"}, now[0])
            for name in ("power", "temperature"):
                got = heat(warm, HEAT[name], span, columns=60)
                whole = heat(reading(store), HEAT[name], span, columns=60)
                assert got.matrix.rows == whole.matrix.rows
                np.testing.assert_array_equal(got.matrix.values, whole.matrix.values)
            now[0] += 61 * S
            warm.memory._clock_s = lambda past=now[0]: past / 1e9


def test_links_by_loss_name_the_link_that_loses(client, day):
    answer = client.get("/api/v1/pages/fabric").json()
    first = answer["links"][0]
    assert {first["a"], first["b"]} == set(day[1].bad_link)
    assert answer["verdict"] == "found"
    sent = day[0].table("probes")
    assert answer["probes"] == sent["probes"].sum()
    assert answer["lost"] == sent["lost"].sum()


def test_the_matrix_agrees_with_probes_counted_by_hand(client, day):
    header, arrays = decode(client.get("/api/v1/pages/fabric/columns/matrix?by=rnic").content)
    sent = day[0].table("probes")
    names = header["row_labels"]
    for source, target in [(sent["source"][n], sent["target"][n]) for n in (0, 77, 301)]:
        both = sent.filter((pl.col("source") == source) & (pl.col("target") == target))
        wanted = both["lost"].sum() / both["probes"].sum()
        got = arrays["high"][names.index(source), names.index(target)]
        assert got == pytest.approx(wanted, rel=1e-6)


def test_switch_and_link_narrow_to_the_paths_over_them(client, day):
    over = client.get("/api/v1/pages/fabric?link=leaf1-spine0").json()["probes"]
    sent = day[0].table("probes")
    path = pl.col("path")
    wanted = sent.filter(
        path.str.contains(">leaf1>spine0>", literal=True)
        | path.str.contains(">spine0>leaf1>", literal=True)
    )
    assert over == wanted["probes"].sum() > 0


def test_a_burst_page_shows_the_burst_of_its_address(client, day):
    row = day[0].table("bursts").row(5, named=True)
    key = f"{row['node']}~{row['port']}~{row['direction']}~{row['start_ns']}"
    answer = client.get(f"/api/v1/pages/bursts/{key}").json()
    assert answer["burst"]["bytes"] == row["bytes"]
    page = client.get(f"/bursts/{key}").text
    assert "Raw samples" in page
    assert "tx_prio3_pause" in page
    assert answer["raw"]["raw_ratio"][1] == pytest.approx(row["peak_ratio"])
    assert client.get("/bursts/c001~x~receive~5").status_code == 404
    assert client.get("/bursts/nonsense").status_code == 400


def test_health_counts_agents_drops_and_failing_collectors(client, day):
    answer = client.get("/api/v1/pages/health").json()
    by_node = {a["node"]: a for a in answer["agents"]}
    assert set(by_node) == set(day[1].nodes)
    # 5,200 samples a minute were counted by every agent.
    assert by_node["c001"]["samples_per_s"] == pytest.approx(5200 / 60)
    assert by_node["c001"]["failing"] == ["rdma"]
    assert by_node["c002"]["dropped"] == 5
    assert not by_node["c004"]["dropped"]
    assert by_node[day[1].silent]["late_s"] is None


@pytest.mark.parametrize(
    ("language", "label", "counter", "notes"),
    [
        ("en", "Commits lost", "commits lost", ("when the store opened", "a copy of it is kept")),
        ("ja", "失われたコミット", "失われたコミット", ("ストアを開いた時点", "写しを残しています")),
    ],
)  # fmt: skip
def test_health_says_what_a_damaged_log_lost(day, language, label, counter, notes):
    store = day[0]
    for lost, tone, note in zip((0, 1234), ("good", "bad"), notes, strict=True):
        counts = {"store": {**store.statistics(), "commits_lost": lost}}
        app = Starlette(
            routes=routes(
                store=store, access=Access({}, {}), clock_ns=lambda: DAY_END_NS, pages=PAGES,
                statistics=lambda counts=counts: counts,
            )
        )  # fmt: skip
        page = TestClient(app).get("/health", headers={"accept-language": language}).text
        cards = re.findall(r'<li class="card (\w+)">(.*?)</li>', page, re.DOTALL)
        ((said_tone, card),) = [one for one in cards if f">{label}<" in one[1]]
        assert said_tone == tone
        assert f"{lost:,}" in card
        assert note in card
        assert re.search(rf'<td class="k">{counter}</td><td class="n">{lost:,}', page)
        assert language == "en" or english_left(page) == []


@pytest.mark.parametrize(
    ("path", "status"),
    [("/nowhere", 404), ("/nodes/c999", 404), ("/incidents/none", 404), ("/cluster?window=2y", 400),
     ("/cluster?colour=red", 400), ("/cluster?until=2026-02-31T00:00Z", 400),
     ("/cluster?window=1h&window=6h", 400), ("/fabric/pair", 404)],
)  # fmt: skip
def test_wrong_addresses_are_answered_with_what_to_do(client, path, status):
    page = client.get(path)
    assert page.status_code == status
    assert "<h1>" in page.text
    if path != "/nowhere":
        twin = client.get(f"/api/v1/pages{path}")
        assert twin.status_code == status
        assert twin.json()["error"]


def test_texts_of_the_data_are_escaped(tmp_path):
    with LocalStore(tmp_path, clock_ns=lambda: DAY_END_NS) as store:
        bad = "</script><script>alert(1)</script>{{7*7}}"
        store.append(
            "incidents",
            pl.DataFrame({"id": ["x"], "onset_ns": [DAY_END_NS - 5], "time_ns": [DAY_END_NS - 4],
                          "kind": [bad], "subject": [bad], "hypotheses": ['[{"component": "<b>"}, 3]'],
                          "evidence": ["not json"], "actions": ["{}"], "state": ["open"]}),
        )  # fmt: skip
        app = Starlette(
            routes=routes(
                store=store, access=Access({}, {}), clock_ns=lambda: DAY_END_NS, pages=PAGES
            )
        )
        with TestClient(app) as client:
            for path in ("/incidents", "/incidents/x", "/cluster"):
                text = client.get(path).text
                assert "<script>alert" not in text
                assert "49" not in text.split("<main")[1].split("incident")[0]
            assert "&lt;b&gt;" in client.get("/incidents/x").text


def test_empty_stores_say_how_to_get_data(tmp_path):
    with LocalStore(tmp_path, clock_ns=lambda: DAY_END_NS) as store:
        app = Starlette(
            routes=routes(
                store=store, access=Access({}, {}), clock_ns=lambda: DAY_END_NS, pages=PAGES
            )
        )
        with TestClient(app) as client:
            for path, command in (("/cluster", "kansoku agent"), ("/fabric", "kansoku fabric"),
                                  ("/bursts", "kansoku burst"), ("/incidents", "kansoku diagnose"),
                                  ("/health", "kansoku agent")):  # fmt: skip
                page = client.get(path)
                assert page.status_code == 200
                assert command in page.text


# Who sees what


@pytest.fixture(scope="module")
def guarded(day):
    import hashlib

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    access = Access(
        {digest(OPERATOR): Principal(name="olga", role="operator"),
         digest(TENANT): Principal(name="taro", role="tenant", user="user1"),
         digest("agent"): Principal(name="a", role="agent")}, {},
    )  # fmt: skip
    return CookieSession(
        Starlette(
            routes=routes(store=day[0], access=access, clock_ns=lambda: DAY_END_NS, pages=PAGES)
        )
    )


def test_a_browser_signs_in_once_and_out_again(guarded):
    with TestClient(guarded, follow_redirects=False) as client:
        away = client.get("/fabric?by=rnic")
        assert (away.status_code, away.headers["location"]) == (
            303,
            "/sign-in?next=/fabric%3Fby%3Drnic",
        )
        form = client.get(away.headers["location"])
        assert 'type="password"' in form.text
        wrong = client.post("/sign-in", data={"token": "guess"})
        assert wrong.status_code == 401
        assert COOKIE not in wrong.cookies
        right = client.post("/sign-in?next=/fabric%3Fby%3Drnic", data={"token": OPERATOR})
        assert right.headers["location"] == "/fabric?by=rnic"
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert client.get("/fabric?by=rnic").status_code == 200
        assert "olga" in client.get("/incidents").text
        assert client.post("/sign-out").status_code == 303
        client.cookies.clear()
        assert client.get("/cluster").status_code == 303
        assert client.get("/api/v1/pages/cluster").status_code == 401


def test_a_token_written_into_the_address_goes_no_further(guarded):
    with TestClient(guarded, follow_redirects=False) as client:
        away = client.get("/fabric", params={"by": "rnic", "token": OPERATOR})
        assert away.headers["location"] == "/sign-in?next=/fabric%3Fby%3Drnic"
        form = client.get(away.headers["location"])
        assert OPERATOR not in form.text


@pytest.mark.parametrize("target", ["//evil.example/", "https://evil.example/", "/\\evil.example"])
def test_signing_in_leads_nowhere_else(guarded, target):
    with TestClient(guarded, follow_redirects=False) as client:
        answer = client.post("/sign-in", params={"next": target}, data={"token": OPERATOR})
        assert answer.headers["location"] == "/"
        assert client.get("/settings", params={"next": target}).headers["location"] == "/"


def test_a_tenant_sees_its_own_jobs_and_not_the_machine(guarded, day):
    headers = {"authorization": f"Bearer {TENANT}"}
    with TestClient(guarded, headers=headers) as client:
        for path in ("/cluster", "/fabric", "/bursts", "/health", "/nodes/c001"):
            assert client.get(path).status_code == 403
            assert client.get(f"/api/v1/pages{path}").status_code == 403
        assert client.get("/api/v1/pages/cluster/columns/heat").status_code == 403
        assert client.get("/live?tables=jobs").status_code == 403
        page = client.get("/incidents")
        assert page.status_code == 200
        assert ">Fabric<" not in page.text
    mine = Reading(
        store=day[0], principal=Principal(name="t", role="tenant", user="user1"),
        clock_ns=lambda: DAY_END_NS,
    ).jobs()  # fmt: skip
    assert set(mine["user"]) == {"user1"}
    wanted = {job["job_id"] for job in day[1].jobs if job["user"] == "user1"}
    assert set(mine["job_id"]) == wanted


def test_the_cookie_counts_for_reading_only(guarded):
    import asyncio

    seen = []

    async def inner(scope, receive, send):
        seen.append(dict(scope["headers"]).get(b"authorization"))

    async def ask(method):
        scope = {
            "type": "http",
            "method": method,
            "headers": [(b"cookie", f"{COOKIE}=abc".encode())],
        }
        await CookieSession(inner)(scope, None, None)

    for method in ("GET", "POST"):
        asyncio.run(ask(method))
    assert seen == [b"Bearer abc", None]


def test_an_agent_reads_no_page(guarded):
    with TestClient(guarded, headers={"authorization": "Bearer agent"}) as client:
        assert client.get("/incidents").status_code == 403


# Parameters


def test_defaults_are_filled_in_and_empty_values_count_as_none():
    page = next(p for p in PAGES if p.path == "/cluster")
    assert parse_query(page, {"until": ""}) == {"quantity": "power", "window": "24h"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("2026-01-01T12:00Z", 1_767_268_800), ("1767268800", 1_767_268_800),
     ("1767268800000000000", 1_767_268_800)],
)  # fmt: skip
def test_an_end_may_be_written_in_three_ways(text, wanted):
    span = window_of({"window": "1h", "until": text}, 0)
    assert (span.since_ns, span.until_ns, span.now) == ((wanted - 3600) * S, wanted * S, False)


def test_steps_are_round_and_columns_few_enough():
    span = Span(since_ns=0, until_ns=86_400 * S, now=True)
    assert span.step_ns(1440) == 60 * S
    assert span.step_ns(1000) == 120 * S
    assert Span(since_ns=0, until_ns=2_592_000 * S, now=True).step_ns(1440) == 1800 * S
    with pytest.raises(InputError):
        window_of({"window": "24h", "until": "0000000000"}, 0)
