"""Operation traces: good, damaged, and meta files."""

import polars as pl
import pytest
from tests.labs.operation_traces import pipeline_rows

from kansoku.errors import InputError
from kansoku.formats.operation_trace import find_trace, read_operation_trace


def test_a_folder_with_one_trace_and_its_sizes(tmp_path):
    rows = pipeline_rows()
    rows.write_parquet(tmp_path / "trace-A.parquet")
    (tmp_path / "meta-A.yaml").write_text(
        "trial_name: A  # name\ndsp_size: 2\n\n- x\npp_size: '2'\n"
    )
    path = find_trace(tmp_path)
    trace = read_operation_trace(path)
    assert (trace.name, trace.meta) == ("A", {"trial_name": "A", "dsp_size": 2, "pp_size": 2})
    assert len(trace.operations) == len(rows)
    assert trace.missing == ()


def test_several_traces_in_a_folder_are_refused_by_name(tmp_path):
    for name in ("A", "B"):
        pipeline_rows().write_parquet(tmp_path / f"trace-{name}.parquet")
    with pytest.raises(InputError, match=r"trace-A\.parquet"):
        find_trace(tmp_path)


def test_other_folders_are_not_ours(tmp_path):
    assert find_trace(tmp_path) is None
    assert find_trace(tmp_path / "nothing") is None


def test_rows_without_times_are_set_aside(tmp_path):
    rows = pipeline_rows().with_columns(
        duration=pl.when(pl.int_range(pl.len()) == 3).then(float("nan")).otherwise("duration")
    )
    rows.write_parquet(tmp_path / "trace-A.parquet")
    trace = read_operation_trace(tmp_path / "trace-A.parquet")
    assert len(trace.operations) == len(rows) - 1
    assert trace.missing[0].startswith("1 of ")
    assert "no meta-A.yaml" in trace.missing[1]


@pytest.mark.parametrize("content", [b"", b"PAR1 but no more", b"\x00" * 100])
def test_what_is_no_parquet_is_an_error(tmp_path, content):
    path = tmp_path / "trace-A.parquet"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not readable"):
        read_operation_trace(path)


def test_missing_columns_are_named(tmp_path):
    path = tmp_path / "trace-A.parquet"
    pipeline_rows().drop("gmc", "start_ts").write_parquet(path)
    with pytest.raises(InputError, match="gmc, start_ts"):
        read_operation_trace(path)


def test_a_wrong_type_is_an_error(tmp_path):
    path = tmp_path / "trace-A.parquet"
    pipeline_rows().with_columns(stage=pl.lit("first")).write_parquet(path)
    with pytest.raises(InputError, match="wrong type"):
        read_operation_trace(path)
