"""From the jobs of a server into one of them and back, by keys, at 80 × 24 and without colour."""

import asyncio
import dataclasses
import re

import polars as pl
import pytest
from tests.unit.tui.test_top import SNAPSHOT, Source, drive, rows

from kansoku.app.jobs._context import open_history
from kansoku.app.serve import Server, ServeSettings
from kansoku.app.top import JobLine, TopSnapshot, top
from kansoku.errors import InputError
from kansoku.formats.slurm import JOB_SCHEMA
from kansoku.tui import TopApp

S = 10**9
NOW = 500_000 * 3600 * S
NODES = {"4101": ("c001", "c002"), "4102": ("c003",), "4103": ()}
JOBS = tuple(
    JobLine(
        key=key, ids=(key,), run=run, name=name, user=user, state="running", nodes=NODES[key],
        gpus=8 * len(NODES[key]), start_ns=NOW - n * 3600 * S, ranks=4, step=40 + n, step_ms=ms,
        mfu_ratio=mfu, late=late, incidents=trouble,
    )
    for n, (key, run, name, user, ms, mfu, late, trouble) in enumerate(
        [
            ("4101", "r1", "llama-pretrain-70b", "aiko", 812.5, 0.41, 3, 0),
            ("4102", "r2", "finetune", "ben", 95.0, 0.22, None, 2),
            ("4103", None, "notebook", "aiko", None, None, None, 0),
        ],
        1,
    )
)  # fmt: skip
FLEET = TopSnapshot(
    title="http://server", time_ns=NOW, jobs=JOBS, devices=SNAPSHOT.devices,
    incidents=("open · hang · network · nic:c003/mlx5_0",),
)  # fmt: skip


class Jobs(Source):
    def job(self, key):
        if key == "4103":
            raise InputError("job 4103 runs no more")
        line = next(one for one in JOBS if one.key == key)
        return dataclasses.replace(SNAPSHOT, title=f"job {key}", job=line)


async def settle(app, pilot):
    await app.workers.wait_for_complete()
    await pilot.pause()


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_jobs_are_listed_with_what_is_wrong(monkeypatch, size):
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(app, _pilot):
        table = rows(app, "#jobs")
        assert [row[0] for row in table] == ["4101", "4102", "4103"]
        assert not app.query_one("#ranks").display
        assert "41.0%" in table[0]
        assert "3 ◀" in table[0]
        assert "2 !" in table[1]
        assert table[2].count("–") >= 4
        head = str(app.query_one("#head").render())
        assert "3 jobs, 2 recorded · 1 with a slow rank · 1 with incidents" in head
        # Nothing is cut off: the table needs no more than the screen has.
        assert app.query_one("#jobs").virtual_size.width <= size[0]
        assert app.query_one("#jobs").max_scroll_x == 0

    drive(Jobs(FLEET), script, size)


def test_the_mark_of_a_late_rank_can_be_read_without_colour(monkeypatch):
    """Greyed, red letters on black are nearly black: the drawn letter must be light."""
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(app, pilot):
        await pilot.press("down")  # the cursor's row has a style of its own
        drawn = app.export_screenshot()
        (kind,) = re.findall(r'class="([\w-]+)"[^>]*>3&#160;◀', drawn)
        (fill,) = re.findall(r"\." + kind + r" \{ fill: #(\w\w)", drawn)
        assert int(fill, 16) > 0xB0

    drive(Jobs(FLEET), script)


def test_enter_leads_into_a_job_and_escape_back_to_its_row():
    async def script(app, pilot):
        await pilot.press("down", "enter")
        await settle(app, pilot)
        assert not app.query_one("#jobs").display
        head = str(app.query_one("#head").render())
        assert "job 4102" in head
        assert "1 node · ranks 6" in head
        assert [r[0] for r in rows(app)][3] == "3 ◀"
        await pilot.press("down", "enter")  # a rank, as in a single run
        await pilot.pause()
        assert "rank 1" in str(app.screen.query_one("#detail").render())
        await pilot.press("escape", "tab", "enter")  # a node
        await pilot.pause()
        assert "node c001" in str(app.screen.query_one("#detail").render())
        await pilot.press("escape", "escape")
        await settle(app, pilot)
        assert app.query_one("#jobs").display
        assert app.query_one("#jobs").cursor_row == 1
        assert app.focused.id == "jobs"

    drive(Jobs(FLEET), script)


def test_jobs_are_sorted_and_filtered_by_keys():
    async def script(app, pilot):
        orders = []
        for _ in range(5):
            await pilot.press("s")
            orders.append([row[0] for row in rows(app, "#jobs")])
        assert orders == [
            ["4102", "4101", "4103"],  # incidents
            ["4101", "4102", "4103"],  # step time
            ["4102", "4101", "4103"],  # lowest MFU, the unknown last
            ["4101", "4102", "4103"],  # nodes
            ["4101", "4102", "4103"],  # newest
        ]
        for text, left in (("aiko", ["4101", "4103"]), ("c003", ["4102"]), ("fine", ["4102"])):
            await pilot.press("slash", *text, "enter")
            assert [row[0] for row in rows(app, "#jobs")] == left
            await pilot.press("escape")
        assert len(rows(app, "#jobs")) == 3
        await pilot.press("slash", *"nobody", "enter")
        assert rows(app, "#jobs") == []

    drive(Jobs(FLEET), script)


def test_a_job_that_ended_says_so_and_leads_back():
    async def script(app, pilot):
        await pilot.press("down", "down", "enter")
        await settle(app, pilot)
        assert "runs no more" in str(app.query_one("#head").render())
        await pilot.press("escape")
        await settle(app, pilot)
        assert len(rows(app, "#jobs")) == 3

    drive(Jobs(FLEET), script)


def test_long_tables_are_cut_aloud_and_the_filter_reaches_the_rest():
    """Drawing every device of a fleet each second would cost a quarter of a core."""
    many = tuple(dataclasses.replace(SNAPSHOT.devices[0], node=f"n{n:03}") for n in range(250))

    async def script(app, pilot):
        table = rows(app, "#devices")
        assert len(table) == 61
        assert table[-1][0] == "… 190 more: / filters"
        app.query_one("#devices").focus()
        await pilot.press("ctrl+end", "enter")  # the remark leads nowhere
        assert len(app.screen_stack) == 1
        await pilot.press("slash", *"n249", "enter")
        assert [row[0] for row in rows(app, "#devices")] == ["n249 gpu0"]

    drive(Jobs(dataclasses.replace(FLEET, devices=many)), script)


# Against a server


def step_rows(run, ranks, *, late=None):
    """Ten steps of 100 ms, 30 of them waiting in collectives; the late rank never waits."""
    return pl.DataFrame(
        [
            {"run": run, "rank": rank, "step": step, "start_ns": NOW - (11 - step) * S,
             "duration_ns": 100_000_000, "complete": True, "tokens": 1000.0, "flops": 2e13,
             "collective_ns": 0 if rank == late else 30_000_000,
             "forward_ns": 100_000_000 if rank == late else 70_000_000,
             **dict.fromkeys(("data_wait_ns", "backward_ns", "optimizer_ns", "checkpoint_ns",
                              "other_ns"), 0)}
            for rank in range(ranks)
            for step in range(10)
        ]
    )  # fmt: skip


def gauge(metric, node, value):
    labels = f'{{"host.name":"{node}","hw.name":"gpu0"}}'
    return {"metric": metric, "labels": labels, "time_ns": NOW - S, "value": value}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("top")
    with Server(
        ServeSettings(folder=folder, port=0, otlp_port=None, grpc_port=None),
        clock_ns=lambda: NOW,
    ) as server:
        store = server.store
        store.submit(
            {"steps": step_rows("r1", 4, late=2)}, owners=[("r1", "4101", "aiko", "lab", None)]
        ).result()
        store.append("steps", step_rows("stray", 2))
        jobs = [(4101, "aiko", "c[001-002]", "RUNNING", None), (4102, "ben", "c003", "RUNNING", None),
                (4100, "ben", "c004", "COMPLETED", NOW - 60 * S)]  # fmt: skip
        store.append(
            "jobs",
            pl.DataFrame(
                [{"cluster": "c", "raw_id": raw, "job_id": str(raw), "name": f"job-{user}",
                  "user": user, "submit_ns": NOW - 7200 * S, "start_ns": NOW - 3600 * S,
                  "end_ns": end, "state": state, "node_list": nodes, "gpus": 8,
                  "gpu_kind": "h100"} for raw, user, nodes, state, end in jobs],
                infer_schema_length=None,
            ),
        )  # fmt: skip
        store.append(
            "metrics",
            pl.DataFrame([gauge("hw.power", "c001", 612.0), gauge("hw.power", "c003", 88.0)]),
        )
        store.append(
            "incidents",
            pl.DataFrame(
                [{"id": str(n), "kind": "hang", "domain": "network", "state": state,
                  "subject": subject, "onset_ns": onset, "time_ns": NOW - 5 * S}
                 for n, (state, subject, onset) in enumerate([
                     ("open", "nic:c002/mlx5_0", NOW - 9 * S),
                     ("open", "node:c002", NOW - 5000 * S),  # before the job began there
                     ("closed", "job:4101", NOW - 9 * S), ("open", "job:4102", NOW - 9 * S)])]
            ),
        )  # fmt: skip
        yield server


def test_a_server_lists_running_jobs_and_runs_of_none(server):
    source = top(server.url)
    source.now_ns = lambda: NOW
    found = source.snapshot()
    source.close()
    lines = {line.key: line for line in found.jobs}
    assert set(lines) == {"4101", "4102", "stray"}
    first = lines["4101"]
    assert (first.run, first.ranks, first.step, first.step_ms, first.late, first.incidents) == (
        "r1", 4, 9, 100.0, 2, 1,
    )  # fmt: skip
    assert first.nodes == ("c001", "c002")
    # 4 × 20 TFLOP in 100 ms are 800 TFLOP/s, of 4 × 989.5 (H100 SXM, dense bf16).
    assert first.mfu_ratio == pytest.approx(800 / (4 * 989.5), rel=1e-3)
    assert (lines["4102"].run, lines["4102"].incidents) == (None, 1)
    assert (lines["stray"].state, lines["stray"].ranks) == ("run", 2)
    assert len(found.incidents) == 3
    assert not found.ranks


def test_a_servers_job_has_its_ranks_its_gpus_and_its_incidents(server):
    async def scene():
        source = top(server.url)
        source.now_ns = lambda: NOW
        app = TopApp(source, every_s=60)
        async with app.run_test(size=(80, 24)) as pilot:
            await settle(app, pilot)
            await pilot.press("slash", *"4101", "enter", "enter")
            await settle(app, pilot)
            assert [r[0] for r in rows(app)] == ["0", "1", "2 ◀", "3"]
            assert [r[:2] for r in rows(app, "#devices")] == [["c001 gpu0", "612 W"]]
            assert (
                str(app.query_one("#incidents").render())
                == "open · hang · network · nic:c002/mlx5_0"
            )
            head = str(app.query_one("#head").render())
            assert "job 4101 · job-aiko · aiko · running" in head
            assert "2 nodes · ranks 4 · step 9 · 100.0 ms a step · slowest rank 2" in head
            await pilot.press("escape")
            await settle(app, pilot)
        source.close()

    asyncio.run(scene())


def test_the_only_run_of_a_server_needs_no_list(tmp_path):
    with Server(
        ServeSettings(folder=tmp_path, port=0, otlp_port=None, grpc_port=None),
        clock_ns=lambda: NOW,
    ) as server:
        server.store.append("steps", step_rows("only", 2))
        source = top(server.url)
        source.now_ns = lambda: NOW
        found = source.snapshot()
        source.close()
    assert not found.jobs
    assert [line.rank for line in found.ranks] == [0, 1]


def test_a_job_of_the_imported_history_is_listed_too(server):
    """Slurm's history lies beside the store, not in its tables."""
    row = {"cluster": "c", "raw_id": 4200, "job_id": "4200", "state": "RUNNING",
           "submit_ns": NOW - 60 * S, "start_ns": NOW - 50 * S, "node_list": "c009"}  # fmt: skip
    open_history(server.settings.folder).merge("jobs", pl.DataFrame([row], schema=JOB_SCHEMA))
    source = top(server.url)
    source.now_ns = lambda: NOW
    found = {line.key: line for line in source.snapshot().jobs}
    source.close()
    assert found["4200"].nodes == ("c009",)
    assert "4101" in found


HOSTILE = "[/]\x1b[31m[bold]x"


def test_names_from_elsewhere_neither_steer_the_terminal_nor_are_mark_up():
    """A closing tag that nothing opened raises where texts are read as mark-up."""
    jobs = (dataclasses.replace(JOBS[0], name=HOSTILE, user=HOSTILE, key="[/]1"),)
    device = dataclasses.replace(SNAPSHOT.devices[0], node="[/]n")
    fleet = dataclasses.replace(
        FLEET, title=HOSTILE, jobs=jobs, devices=(device,), incidents=(HOSTILE,)
    )

    async def script(app, pilot):
        shown = rows(app, "#jobs")[0]
        assert shown[:3] == ["[/]1", r"[/]\x1b[31m[bold]x", r"[/]\x1b[31m[bold]x"]
        assert rows(app, "#devices")[0][0] == "[/]n gpu0"
        for place in ("#head", "#incidents"):
            assert "\x1b" not in str(app.query_one(place).render())
        app.query_one("#devices").focus()
        await pilot.press("enter")
        await pilot.pause()
        assert "node [/]n" in str(app.screen.query_one("#detail").render())

    drive(Jobs(fleet), script, (160, 50))


def test_several_runs_of_a_job_that_slurm_lists_no_more_are_one_line(server):
    """Two lines with one key would end the screen."""
    for n, run in enumerate(("again-1", "again-2")):
        steps = step_rows(run, 2).with_columns(pl.col("start_ns") + n * S)
        server.store.submit({"steps": steps}, owners=[(run, "3999", "ben", "lab", None)]).result()
    source = top(server.url)
    source.now_ns = lambda: NOW
    found = [line for line in source.snapshot().jobs if line.key == "3999"]
    source.close()
    assert [line.run for line in found] == ["again-2"]


def test_what_was_read_a_moment_ago_is_not_read_again_and_nothing_is_missed(server):
    asked = []
    source = top(server.url)
    source.now_ns = lambda: NOW
    table, latest = source.store.table, source.store.latest

    def told(name, since, until, filters):
        asked.append((name, since))
        return table(name, since, until, filters)

    source.store.table = told
    source.store.latest = lambda *args: asked.append(args[0]) or latest(*args)
    server.store.append("steps", step_rows("inc", 3))
    first = source._of_run("inc", {}, NOW)
    more = step_rows("inc", 3).with_columns(pl.col("step") + 10, pl.col("start_ns") + S)
    server.store.append("steps", more)
    second = source._of_run("inc", {}, NOW + S)
    source._whole_ns -= 31 * S
    third = source._of_run("inc", {}, NOW + S)
    # The newest of the first ten began two seconds before NOW.
    assert [since for _, since in asked] == [NOW - 60 * S, NOW - 17 * S, NOW - 59 * S]
    assert [line.step for line in first.ranks] == [9, 9, 9]
    assert [(line.step, len(line.trend)) for line in second.ranks] == [(19, 20)] * 3
    assert second.ranks == third.ranks
    del asked[:]
    devices = source._devices_of(NOW)
    assert asked
    del asked[:]
    assert source._devices_of(NOW + S) is devices
    assert not asked
    source._devices_of(NOW + 5 * S)
    source.close()
    assert asked
