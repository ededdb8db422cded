"""Step rows, sampled spans and rank facts of a run directory come back as they were."""

import polars as pl
import polars.testing
from tests.labs.generated_run import Schedule, generate

from kansoku.formats.run_tables import read_tables, write_tables


def test_round_trip(tmp_path):
    facts, spans, steps = generate(Schedule(steps=8), spans_every=4)
    half = len(steps) // 2
    write_tables(tmp_path, steps=steps[:half], spans=spans, ranks=facts.ranks, part="a")
    write_tables(tmp_path, steps=steps[half:], part="b")
    back = read_tables(tmp_path)
    assert back.ranks == facts.ranks
    assert back.missing == ()
    polars.testing.assert_frame_equal(back.spans, spans)
    polars.testing.assert_frame_equal(back.steps, steps)


def test_fewer_columns_are_null_and_more_are_ignored(tmp_path):
    (tmp_path / "steps").mkdir()
    few = pl.DataFrame({"rank": [0], "step": [3], "duration_ns": [5], "mine": ["x"]})
    few.write_parquet(tmp_path / "steps" / "p.parquet")
    back = read_tables(tmp_path).steps
    assert back.row(0, named=True)["step"] == 3
    assert back.row(0, named=True)["forward_ns"] is None
    assert "mine" not in back.columns


def test_nothing_there_is_nothing(tmp_path):
    back = read_tables(tmp_path)
    assert (back.steps, back.spans, back.ranks, back.missing) == (None, None, (), ())


def test_hostile_rank_facts_are_refused(tmp_path):
    (tmp_path / "ranks.json").write_text("[" * 100_000)
    assert "ranks.json cannot be read" in read_tables(tmp_path).missing[0]
    (tmp_path / "ranks.json").write_text('{"schema":"kansoku.ranks/9","ranks":[]}')
    assert "kansoku.ranks/9" in read_tables(tmp_path).missing[0]
