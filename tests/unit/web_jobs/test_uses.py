"""What steps used, as curves: sums over whole steps only, means, and nothing of nothing."""

import polars as pl

from kansoku.app.web_jobs._uses import use_blocks
from kansoku.model import table_schema
from kansoku.view import Heading, Sentence, Series


def steps(rows):
    """Return rows of (rank, step, energy, NIC bytes, NVLink bytes, SM, memory activity)."""
    names = ["rank", "step", "energy_j", "nic_bytes", "nvlink_bytes", "sm_activity",
             "memory_activity"]  # fmt: skip
    schema = table_schema("steps")
    frame = pl.DataFrame(rows, schema={name: schema[name] for name in names}, orient="row")
    return frame.with_columns(duration_ns=pl.lit(1_000_000, pl.Int64))


def test_sums_over_ranks_and_means_of_activities():
    heading, *drawn = use_blocks(
        steps(
            [
                (0, 1, 300.0, 2_000_000, 8_000_000, 0.9, 0.5),
                (1, 1, 320.5, 1_000_000, 4_000_000, 0.7, 0.3),
                (0, 2, 100.0, 500_000, 0, 0.5, 0.1),
                (1, 2, 100.0, 500_000, 0, 0.1, 0.3),
            ]
        )
    )
    assert isinstance(heading, Heading)
    found = {
        (one.title, line.name): (one.y_title, list(line.x), [round(v, 9) for v in line.y])
        for one in drawn
        for line in one.lines
    }
    assert found == {
        ("Energy of a step", "energy"): ("J", [1, 2], [620.5, 200.0]),
        ("Bytes through the NICs in a step", "NICs"): ("MB", [1, 2], [3.0, 1.0]),
        ("Bytes over NVLink in a step", "NVLink"): ("MB", [1, 2], [12.0, 0.0]),
        ("Share of a step in which the devices were active", "SMs"): ("ratio", [1, 2], [0.8, 0.3]),
        ("Share of a step in which the devices were active", "device memory"): (
            "ratio", [1, 2], [0.4, 0.2],
        ),
    }  # fmt: skip


def test_a_sum_that_lacks_a_rank_is_a_gap_and_said():
    drawn = use_blocks(
        steps(
            [
                (0, 1, 300.0, None, None, None, None),
                (1, 1, None, None, None, None, None),
                (0, 2, 100.0, None, None, None, None),
                (1, 2, 100.0, None, None, None, None),
            ]
        )
    )
    (series,) = [one for one in drawn if isinstance(one, Series)]
    assert list(series.lines[0].y) == [None, 200.0]
    (said,) = [one for one in drawn if isinstance(one, Sentence)]
    assert "energy have gaps" in said.text


def test_nothing_sampled_is_nothing_drawn():
    assert use_blocks(steps([(0, 1, None, None, None, None, None)])) == []
    assert use_blocks(steps([])) == []
