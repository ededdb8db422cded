"""The live terminal at 80 × 24 and wider, driven by keys, without colour's help."""

import asyncio
import dataclasses

import polars as pl
import pytest

from kansoku.app._top_ranks import mfu_of, tokens_per_s
from kansoku.app.top import DeviceLine, RankLine, TopSnapshot, rank_lines
from kansoku.errors import InputError
from kansoku.model import PHASES, Phase, table_schema
from kansoku.tui import TopApp
from kansoku.tui._cells import bar, phase_strip, rate, spark


def line(rank, *, step_ms=100.0, wait=0.3, late=False):
    phases = dict.fromkeys(PHASES, 0.0) | {Phase.FORWARD: 0.7 - wait, Phase.BACKWARD: 0.3}
    phases[Phase.COLLECTIVE] = wait
    return RankLine(
        rank=rank, node=f"c{rank // 2:03}", step=42, step_ms=step_ms, phases=phases,
        trend=(1.0, 2.0, 3.0), late=late,
    )  # fmt: skip


class Source:
    def __init__(self, *snapshots):
        self.snapshots = list(snapshots)

    def snapshot(self):
        found = self.snapshots[0]
        if len(self.snapshots) > 1:
            self.snapshots.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def close(self):
        pass


SNAPSHOT = TopSnapshot(
    title="run-1",
    time_ns=1_741_064_767_000_000_000,
    ranks=tuple(
        line(r, step_ms=100 + r, wait=0.05 if r == 3 else 0.3, late=r == 3) for r in range(6)
    ),
    devices=(DeviceLine(node="c001", name="gpu0", kind="gpu", watts=512.0, utilization=0.98),),
    incidents=("open · hang · network · nic:c001/mlx5_0",),
    step_ms=103.0,
    tokens_per_s=12_345.0,
    mfu_ratio=0.415,
)


def drive(source, script, size=(80, 24)):
    async def scene():
        app = TopApp(source, every_s=60)
        async with app.run_test(size=size) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            await script(app, pilot)

    asyncio.run(scene())


def rows(app, table="#ranks"):
    grid = app.query_one(table)
    return [[str(cell) for cell in grid.get_row_at(i)] for i in range(grid.row_count)]


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_the_late_rank_is_marked_without_colour(size):
    async def script(app, _pilot):
        table = rows(app)
        assert [r[0] for r in table] == ["0", "1", "2", "3 ◀", "4", "5"]
        head = str(app.query_one("#head").render())
        assert "slowest rank 3" in head
        assert "12,345 tokens/s" in head
        assert "MFU 41.5%" in head
        assert "512 W" in rows(app, "#devices")[0][1]
        assert "nic:c001/mlx5_0" in str(app.query_one("#incidents").render())

    drive(Source(SNAPSHOT), script, size)


def test_keys_sort_filter_and_look_in():
    async def script(app, pilot):
        await pilot.press("s")
        assert [r[0] for r in rows(app)][:2] == ["5", "4"]
        await pilot.press("slash", *"c001", "enter")
        assert {r[1] for r in rows(app)} == {"c001"}
        await pilot.press("escape")
        assert len(rows(app)) == 6
        await pilot.press("s", "enter")
        await pilot.pause()
        detail = str(app.screen.query_one("#detail").render())
        assert "rank 3" in detail
        assert "others wait for this rank" in detail
        await pilot.press("escape")

    drive(Source(SNAPSHOT), script)


def test_a_device_leads_to_its_nodes_ranks_devices_and_incidents():
    async def script(app, pilot):
        app.query_one("#devices").focus()
        await pilot.press("enter")
        await pilot.pause()
        detail = str(app.screen.query_one("#detail").render())
        assert detail.startswith("node c001")
        assert "rank 2" in detail
        assert "rank 3           103.0 ms a step  the others wait for it" in detail
        assert "rank 4" not in detail
        assert "512 W" in detail
        assert "hang · network · nic:c001/mlx5_0" in detail

    drive(Source(SNAPSHOT), script)


def test_pause_holds_the_picture():
    async def script(app, pilot):
        await pilot.press("space")
        app.tick()
        await app.workers.wait_for_complete()
        assert "run-1" in str(app.query_one("#head").render())

    drive(Source(SNAPSHOT, TopSnapshot(title="later", time_ns=1)), script)


def test_a_head_that_needs_another_line_gets_it():
    async def script(app, pilot):
        head = app.query_one("#head")
        for title, lines in (("run-1", 2), ("run-2", 2), ("a long name " * 9, 3), ("run-1", 2)):
            app.show(dataclasses.replace(SNAPSHOT, title=title))
            await pilot.pause()
            assert head.size.height == lines
            assert title.strip() in " ".join(str(head.render()).split())

    drive(Source(SNAPSHOT), script, (120, 40))


def test_an_empty_source_says_what_to_do_and_an_error_does_not_end_it():
    async def script(app, pilot):
        assert "no such run" in str(app.query_one("#head").render())
        app.tick()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert len(rows(app)) == 6

    drive(Source(InputError("no such run"), SNAPSHOT), script)


def test_strips_fill_their_width_exactly():
    shares = dict.fromkeys(PHASES, 1 / 7)
    for width in (7, 24, 60):
        assert len(phase_strip(shares, width).plain) == width


def test_small_drawings():
    assert spark([], 5) == ""
    assert spark([1, 1], 5) == "▁▁"
    assert spark([0, 7], 5) == "▁█"
    assert bar(None, 4) == "–"
    assert bar(0.5, 4) == "██░░"
    assert rate(2.5e9) == "2.5 GB/s"


def steps_frame(rows):
    schema = table_schema("steps")
    empty = dict.fromkeys(schema)
    full = [
        empty
        | {f"{p.value}_ns": 0 for p in PHASES}
        | {"run": "r", "complete": True, "start_ns": 0}
        | row
        for row in rows
    ]
    return pl.DataFrame(full, schema=schema)


def test_rank_lines_by_hand():
    """Rank 1 never waits while the others wait a quarter of their step."""
    frame = steps_frame(
        [
            {"rank": r, "step": s, "duration_ns": 4_000_000, "forward_ns": 3_000_000 + 1_000_000 * (r == 1),
             "collective_ns": 1_000_000 * (r != 1)}
            for r in range(3)
            for s in range(5)
        ]
    )  # fmt: skip
    lines = rank_lines(frame, {0: "a", 1: "b", 2: "b"})
    assert [found.late for found in lines] == [False, True, False]
    assert lines[0].step_ms == 4.0
    assert lines[0].phases[Phase.COLLECTIVE] == 0.25
    assert lines[1].node == "b"


def test_tokens_of_a_server_are_those_of_the_wall_clock():
    """Last ends at 4, 8, 12 ms; both ranks' own steps are 4.5 and 3.5 ms in turn."""
    starts = {0: (0, 4_000_000, 7_500_000), 1: (0, 3_500_000, 8_000_000)}
    ends = {0: (4_000_000, 7_500_000, 12_000_000), 1: (3_500_000, 8_000_000, 11_500_000)}
    steps = steps_frame(
        [
            {"rank": r, "step": s, "start_ns": 10**9 + starts[r][s],
             "duration_ns": ends[r][s] - starts[r][s], "tokens": 6.0}
            for r in range(2)
            for s in range(3)
        ]
    )  # fmt: skip
    assert tokens_per_s(steps, rank_lines(steps, {})) == pytest.approx(12 / 4e-3)


def test_mfu_is_flops_over_the_jobs_step_and_every_devices_peak():
    """Two ranks of 3e9 FLOP in 4 ms: 1.5e12 FLOP/s, half of the peak; unknown with one rank."""
    steps = steps_frame(
        [{"rank": r, "step": 0, "duration_ns": 4_000_000, "flops": 3e9} for r in range(2)]
    )
    lines = rank_lines(steps, {})
    assert mfu_of(steps, lines, 3e12) == pytest.approx(0.5)
    assert mfu_of(steps.filter(pl.col("rank") == 0), lines, 3e12) is None
    assert mfu_of(steps, lines, None) is None
