"""Step times in the words of many training loops, in small logs and in large ones."""

import gzip

import pytest
from tests.labs.trainer_lines import WRITERS, log

from kansoku.app.diagnose import diagnose_folder
from kansoku.diagnose.edge import pace
from kansoku.diagnose.edge.bundle import read_bundle
from kansoku.model import Verdict


def kinds(folder):
    return [(one.kind, one.verdict) for one in diagnose_folder(folder).incidents]


def pace_in(folder, metric="step time s"):
    """Return the medians of step times below and from step 600."""
    (rows,) = [frame for frame in read_bundle(folder).numbers if metric in set(frame["metric"])]
    rows = rows.filter((rows["metric"] == metric) & (rows["time_ns"] != 600))
    return [rows.filter(part)["value"].median()
            for part in (rows["time_ns"] < 600, rows["time_ns"] > 620)]  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_a_slow_down_is_seen_in_what_the_trainer_prints(tmp_path, name):
    (tmp_path / "train.log").write_text("\n".join([*log(name, after_s=1.6), ""]))
    assert kinds(tmp_path) == [("slow", Verdict.UNKNOWN)]
    metric = "step time by throughput" if name == "torchtitan_undated" else "step time s"
    before, after = pace_in(tmp_path, metric)
    assert after / before == pytest.approx(1.6, rel=0.03)
    if metric == "step time s":
        assert before == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("name", WRITERS)
def test_steps_that_stay_as_they_are_make_no_incident(tmp_path, name):
    (tmp_path / "train.log").write_text("\n".join([*log(name), ""]))
    assert kinds(tmp_path) == []


@pytest.mark.parametrize("name", ["lightning", "hugging_face"])
def test_bars_that_overwrite_themselves_are_read_too(tmp_path, name):
    (tmp_path / "train.log").write_bytes("\r".join(log(name, after_s=1.6)).encode())
    assert pace_in(tmp_path) == pytest.approx([1.0, 1.6], rel=0.03)


def test_bars_of_evaluation_and_loading_are_not_the_steps(tmp_path):
    lines = ["Loading checkpoint shards: 100%|███| 4/4 [00:40<00:00, 10.00s/it]"]
    for n, line in enumerate(log("lightning", after_s=1.6), 1):
        lines.append(line)
        if n % 50 == 0:
            lines += [
                f"Validation DataLoader 0: | {k}/20 [00:0{k}<00:05, 9.00it/s]" for k in range(1, 8)
            ]
    (tmp_path / "train.log").write_text("\n".join(lines))
    assert pace_in(tmp_path) == pytest.approx([1.0, 1.6], rel=0.03)


def test_a_bar_of_every_epoch_counts_on(tmp_path):
    """Three epochs of 1,000 steps; the last is slower: 1.0, 1.0, 1.6 s a step."""
    epochs = [
        log("lightning", before_s=took, after_s=took, seed=k) for k, took in enumerate((1, 1, 1.6))
    ]
    (tmp_path / "train.log").write_text("\n".join(line for epoch in epochs for line in epoch))
    (rows,) = read_bundle(tmp_path).numbers
    rows = rows.filter(rows["metric"] == "step time s")
    for first, took in ((0, 1.0), (1000, 1.0), (2000, 1.6)):
        part = rows.filter(rows["time_ns"].is_between(first + 1, first + 1000))
        assert len(part) > 40
        assert part["value"].median() == pytest.approx(took, rel=0.03)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", sorted(set(WRITERS) - {"torchtitan_undated"}))
def test_of_a_large_log_some_are_read_from_begin_to_end(tmp_path, monkeypatch, name, packed):
    """A fifth of the lines: the first fifth ends before the slow-down."""
    monkeypatch.setattr(pace, "_MOST_LINES", 400)
    monkeypatch.setattr(pace, "_BLOCKS", 16)
    data = "\n".join([*log(name, steps=2000, after_s=1.6, change_at=1200), ""]).encode()
    path = tmp_path / ("train.log.gz" if packed else "train.log")
    path.write_bytes(gzip.compress(data) if packed else data)
    monkeypatch.setattr(pace, "_BAR_SPAN_S", 5)
    (rows,) = read_bundle(tmp_path).numbers
    rows = rows.filter(rows["metric"] == "step time s")
    early, late = (rows.filter(part) for part in (rows["time_ns"] < 1150, rows["time_ns"] > 1300))
    assert early["time_ns"].min() < 150
    assert late["time_ns"].max() > 1900
    assert early["value"].median() == pytest.approx(1.0, rel=0.05)
    assert late["value"].median() == pytest.approx(1.6, rel=0.05)


def test_stamps_tell_of_the_end_of_a_large_log_too(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "_MOST_STAMPS", 200)
    (tmp_path / "train.log").write_text("\n".join([*log("torchtitan", after_s=1.6), ""]))
    assert kinds(tmp_path) == [("slow", Verdict.UNKNOWN)]


def test_tables_of_numbers_leave_room_for_the_steps(tmp_path):
    for n in range(70):
        (tmp_path / f"node{n:02d}.csv").write_text(
            "timestamp,cpu_util\n1772600400,5\n1772600402,5\n"
        )
    (tmp_path / "train.log").write_text("\n".join([*log("nemo", after_s=1.6), ""]))
    assert kinds(tmp_path) == [("slow", Verdict.UNKNOWN)]


def test_a_terminals_colours_hide_neither_progress_nor_complaints(tmp_path):
    lines = log("torchtitan_in_colour", steps=50)
    lines.append("[rank0]:[titan] 2026-03-04 05:00:50,900 - root - ERROR - \x1b[31mNCCL error: unhandled"
                 " system error\x1b[39m")  # fmt: skip
    (tmp_path / "train.log").write_text("\n".join(lines))
    reader = read_bundle(tmp_path).reader
    assert reader.last_progress_ns
    assert all("\x1b" not in one.text for one in reader.observations)
