"""sacct's parsable text: column sets, delimiters, torn rows, time zones, bad rows."""

import polars as pl
import pytest

from kansoku.errors import InputError
from kansoku.formats.slurm import detect_layout, read_sacct_text

HEAD = "JobIDRaw|JobID|JobName|User|State|ExitCode|Submit|Start|End|ElapsedRaw|AllocTRES|NodeList"
ROW = (
    "7|7|{name}|ann|COMPLETED|0:0|2026-01-01T00:00:00|2026-01-01T00:00:05|2026-01-01T00:01:05|60"
    "|cpu=4,gres/gpu=8,gres/gpu:h100=8,node=1|c001"
)


def read(text, **options):
    data = text.encode() if isinstance(text, str) else text
    parts = list(read_sacct_text(data, file="f", **options))
    return (
        pl.concat([p.jobs for p in parts]),
        pl.concat([p.steps for p in parts]),
        [q for p in parts for q in p.quarantined],
        sum(p.repaired for p in parts),
    )


def test_a_plain_row():
    jobs, steps, bad, repaired = read(f"{HEAD}\n{ROW.format(name='a')}\n")
    assert (jobs.height, steps.height, bad, repaired) == (1, 0, [], 0)
    row = jobs.row(0, named=True)
    assert row["submit_ns"] == 1767225600 * 10**9  # date -ud 2026-01-01 +%s
    assert (row["gpus"], row["gpu_kind"], row["nodes"], row["exit_code"]) == (8, "h100", None, 0)


@pytest.mark.parametrize("name", ["a|b", "a\nb", "a|\n|b", "a\n\nb", "x|COMPLETED|y", "é|\n日本"])
def test_torn_names_are_put_together(name):
    text = f"{HEAD}\n{ROW.format(name='one')}\n{ROW.format(name=name)}\n{ROW.format(name='two')}\n"
    jobs, _, bad, repaired = read(text)
    assert jobs["name"].to_list() == ["one", name, "two"]
    assert (bad, repaired) == ([], 1)


def test_a_row_cut_off_is_named_and_costs_no_other():
    text = f"{HEAD}\n{ROW.format(name='one')}\n7|7|x|ann|COMP\n{ROW.format(name='two')}\n"
    jobs, _, bad, _ = read(text)
    assert jobs["name"].to_list() == ["one", "two"]
    assert [(q.file, q.row) for q in bad] == [("f", 3)]
    assert "cells" in bad[0].reason


@pytest.mark.parametrize(
    ("old", "new", "column"),
    [
        ("COMPLETED", "NONSENSE", "State"),
        ("0:0", "zero", "ExitCode"),
        ("2026-01-01T00:00:05", "yesterday", "Start"),
        ("|60|", "|six|", "ElapsedRaw"),
        ("2026-01-01T00:00:00", "Unknown", "Submit"),
    ],
)
def test_a_bad_value_quarantines_its_row_with_the_reason(old, new, column):
    good = ROW.format(name="a")
    jobs, _, bad, _ = read(f"{HEAD}\n{good}\n{good.replace(old, new, 1)}\n")
    assert jobs.height == 1
    assert bad[0].row == 3
    assert bad[0].reason.startswith(column)


def test_unknown_none_and_hashes_are_null():
    row = ROW.format(name="a").replace("2026-01-01T00:00:05", "Unknown")
    row = row.replace("2026-01-01T00:01:05", "###############").replace("c001", "None assigned")
    jobs, _, bad, _ = read(f"{HEAD}\n{row}\n")
    assert bad == []
    assert jobs.select("start_ns", "end_ns", "node_list").row(0) == (None, None, None)


@pytest.mark.parametrize("nodes", ["None assigned", "c001"])
def test_what_was_cancelled_before_it_started_has_no_start(nodes):
    """Slurm may set it to the end: a moment in which the job had no nodes."""
    row = ROW.format(name="a").replace("COMPLETED", "CANCELLED by 0").replace("c001", nodes)
    row = row.replace("2026-01-01T00:00:05", "2026-01-01T00:01:05").replace("|60|", "|0|")
    jobs, _, bad, _ = read(f"{HEAD}\n{row}\n{ROW.format(name='b')}\n")
    assert bad == []
    assert jobs["start_ns"].is_null().to_list() == [nodes != "c001", False]
    assert jobs["end_ns"].null_count() == 0


@pytest.mark.parametrize("delimiter", ["|", ",", "\t", "\x1f", "@@", ";"])
def test_any_delimiter(delimiter):
    columns = ["JobID", "State", "Submit", "End"]
    cells = ["12_3", "FAILED", "2026-01-01T00:00:00", "2026-01-01T00:00:09"]
    text = f"{delimiter.join(columns)}\n{delimiter.join(cells)}\n"
    jobs, _, bad, _ = read(text, delimiter=None if delimiter != "\x1f" else "\x1f")
    assert bad == []
    assert jobs.select("raw_id", "job_id", "array_job_id", "array_task_id").row(0) == (
        12, "12_3", 12, 3,
    )  # fmt: skip


def test_parsable_with_a_trailing_delimiter_and_windows_lines():
    text = HEAD + "|\r\n" + ROW.format(name="a") + "|\r\n"
    jobs, _, bad, _ = read(text)
    assert (jobs["name"].to_list(), bad) == (["a"], [])
    assert jobs["node_list"].to_list() == ["c001"]


def test_broken_utf8_is_replaced_not_lost():
    data = f"{HEAD}\n{ROW.format(name='NAME')}\n".encode().replace(b"NAME", b"a\xff\xfeb")
    jobs, _, bad, _ = read(data)
    assert (jobs["name"].to_list(), bad) == (["a��b"], [])


def test_epoch_times():
    text = "JobIDRaw|State|Submit|Start|End\n7|FAILED|1767225600|0|1767225605\n"
    row = read(text)[0].row(0, named=True)
    assert row["submit_ns"] == 1767225600 * 10**9
    assert row["start_ns"] is None


def test_local_times_of_a_zone():
    text = "JobIDRaw|State|Submit\n7|PENDING|2026-01-01T09:00:00\n"
    assert read(text, zone="Asia/Tokyo")[0]["submit_ns"].item() == 1767225600 * 10**9


@pytest.mark.parametrize(
    ("start", "end", "elapsed", "offset"),
    [
        # Clocks went back on 2026-10-25 at 03:00 CEST: 02:30 came twice, an hour apart.
        ("2026-10-25T02:30:00", "2026-10-25T02:40:00", 600, 0),
        ("2026-10-25T02:30:00", "2026-10-25T02:40:00", 4200, 0),
        ("2026-10-25T02:50:00", "2026-10-25T02:10:00", 1200, 0),
        ("2026-10-25T01:30:00", "2026-10-25T02:30:00", 3600, 0),
        ("2026-10-25T01:30:00", "2026-10-25T02:30:00", 7200, 0),
        ("2026-10-25T02:30:00", "2026-10-25T03:30:00", 3600, 3600),
    ],
)
def test_the_hour_that_comes_twice(start, end, elapsed, offset):
    """ElapsedRaw tells which of the two readings is meant; the span must equal it."""
    text = (
        "JobIDRaw|State|Submit|Start|End|ElapsedRaw\n"
        f"7|COMPLETED|2026-10-25T00:30:00|{start}|{end}|{elapsed}\n"
    )
    row = read(text, zone="Europe/Berlin")[0].row(0, named=True)
    assert row["end_ns"] - row["start_ns"] == elapsed * 10**9
    # 2026-10-25T00:30:00Z is 02:30 the first time.
    if offset:
        assert row["start_ns"] == (1792888200 + offset) * 10**9


def test_the_hour_that_never_comes_is_quarantined():
    text = "JobIDRaw|State|Submit\n7|PENDING|2026-03-29T02:30:00\n"
    jobs, _, bad, _ = read(text, zone="Europe/Berlin")
    assert jobs.height == 0
    assert "skips" in bad[0].reason


def test_steps_are_kept_apart():
    text = (
        "JobIDRaw|JobID|State|Submit|Start|End|MaxRSS|TotalCPU\n"
        "7|9_1|COMPLETED|2026-01-01T00:00:00|2026-01-01T00:00:01|2026-01-01T00:00:09||00:01.5\n"
        "7.batch|9_1.batch|COMPLETED|2026-01-01T00:00:01|2026-01-01T00:00:01|2026-01-01T00:00:10|"
        "12616K|00:01.500\n"
        "7.0|9_1.0|OUT_OF_MEMORY|2026-01-01T00:00:01|2026-01-01T00:00:01|2026-01-01T00:00:11|1G|\n"
    )
    jobs, steps, bad, _ = read(text)
    assert (jobs.height, bad) == (1, [])
    assert steps.select("raw_id", "job_id", "step", "state", "max_rss_bytes").rows() == [
        (7, "9_1", "batch", "COMPLETED", 12616 * 1024),
        (7, "9_1", "0", "OUT_OF_MEMORY", 2**30),
    ]
    # Steps may end after their job; both times stay as Slurm gave them.
    assert steps["end_ns"].max() > jobs["end_ns"].max()


def test_an_xdmod_log_has_no_header_and_is_utc():
    cells = [
        "12+1", "13", "clu", "train", "normal", "llm", "users", "100", "ann", "1001",
        "2026-01-01T00:00:00", "2026-01-01T00:00:00", "2026-01-01T00:00:05", "2026-01-01T01:00:05",
        "01:00:00", "0:0", "COMPLETED", "2", "16", "16", "4000Mc", "cpu=16", "cpu=16,gres/gpu=16",
        "UNLIMITED", "c[001-002]", "a|b",
    ]  # fmt: skip
    jobs, _, bad, repaired = read("|".join(cells) + "\n", zone="Asia/Tokyo")
    row = jobs.row(0, named=True)
    assert (bad, repaired) == ([], 1)
    assert (row["raw_id"], row["job_id"], row["het_job_id"], row["het_offset"]) == (
        13,
        "12+1",
        12,
        1,
    )
    assert (row["submit_ns"], row["elapsed_s"], row["time_limit_s"]) == (
        1767225600 * 10**9,
        3600,
        None,
    )
    assert (row["gpus"], row["name"], row["cluster"]) == (16, "a|b", "clu")


def test_ids_without_jobidraw_stay_apart():
    text = (
        "JobID|State|Submit\n12_3|FAILED|2026-01-01T00:00:00\n12_4|FAILED|2026-01-01T00:00:00\n"
        "12_[5-9%2]|PENDING|2026-01-01T00:00:00\n"
    )
    jobs, _, bad, _ = read(text)
    assert bad == []
    assert jobs["job_id"].n_unique() == 3
    assert jobs["array_task_id"].to_list() == [3, 4, None]


@pytest.mark.parametrize("text", ["hello world\n1\n", "State|Submit\n", "JobID|Submit\n1|x\n"])
def test_useless_files_say_what_to_give(text):
    with pytest.raises(InputError) as caught:
        read(text)
    assert "--" in str(caught.value)


def test_case_and_older_names_of_columns():
    layout = detect_layout("jobid|jobidraw|reserved|ntask")
    assert layout.columns == ("JobID", "JobIDRaw", "Planned", "NTasks")


def test_blocks_do_not_change_the_answer(monkeypatch):
    """Reading in blocks of a few hundred bytes gives what one block gives, torn rows included."""
    names = ["a", "b|c", "d\ne", "f"] * 30
    lines = [ROW.format(name=n).replace("7|7", f"{i}|{i}") for i, n in enumerate(names, 1)]
    text = "\n".join([HEAD, *lines]) + "\n"
    whole = read(text)
    monkeypatch.setattr("kansoku.formats.slurm.sacct_text._BLOCK_BYTES", 700)
    parts = read(text)
    assert parts[0].equals(whole[0])
    assert (parts[2], parts[3]) == (whole[2], whole[3]) == ([], 60)
