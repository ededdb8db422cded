"""Large logs are sifted by shape, large tables averaged while they are read."""

import io
from datetime import UTC, datetime

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kansoku.diagnose.edge import sieve
from kansoku.diagnose.edge.numbers import read_numbers
from kansoku.diagnose.lines import FileFacts, LineReader
from kansoku.diagnose.tables import measures_of_table
from kansoku.formats.job_log import Clock


def sifted(data: bytes):
    """Return rows and lines that hold the word bad."""
    found = sieve.Sieve(["bad"], "^never$", lambda line: "harmless" not in line)
    return [(row, line) for row, line, _ in found.rows(io.BytesIO(data))]


def test_lines_that_differ_in_digits_alone_are_judged_once():
    asked = []
    one = sieve.Sieve(["bad"], "^never$", lambda line: not asked.append(line))
    data = b"".join(b"%d bad thing\n%d good\n" % (n, n) for n in range(100, 200))
    assert [row for row, _, _ in one.rows(io.BytesIO(data))] == list(range(1, 200, 2))
    assert asked == ["100 bad thing"]


def test_of_very_many_lines_of_one_shape_some_are_enough_but_for_driver_codes():
    many = b"".join(b"bad thing %04d\n" % n for n in range(5000))
    assert len(sifted(many)) == 2000 + 30
    assert len(sifted(many.replace(b"thing", b"Xid"))) == 5000


def test_numbers_that_are_codes_are_told_apart_others_are_not():
    reader = LineReader()
    line = "NVRM: Xid (PCI:0000:{bus}:00): {code}, pid={pid}, name=python"
    said = [
        line.format(bus=bus, code=code, pid=pid)
        for pid in (7, 8)
        for bus, code in (("18", 31), ("18", 79), ("3b", 79))
    ]
    facts = FileFacts(name="dmesg", kind="kernel", node="n1", clock=Clock(reference_ns=0))
    reader.read([(n, text, ()) for n, text in enumerate(said, 1)], facts)
    assert {(o.rule, o.device, o.repeats) for o in reader.observations} == {
        ("xid.31", "0000:18:00", 2), ("xid.79", "0000:18:00", 2), ("xid.79", "0000:3b:00", 2),
    }  # fmt: skip


def test_a_harmless_shape_is_never_shown():
    assert sifted(b"step 1 bad but harmless\nBAD news 7\nstep 2 bad but harmless") == [
        (2, "BAD news 7")
    ]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([b"step 12", b"bad 3", b"", b"\xff bad", b"x" * 90]), max_size=60),
    st.integers(1, 64),
)
def test_rows_do_not_hang_on_the_size_of_blocks(lines, block):
    data = b"\n".join(lines)
    wanted = [
        (number, line.decode("utf-8", "replace"))
        for number, line in enumerate(data.split(b"\n"), 1)
        if b"bad" in line
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sieve, "_BLOCK_BYTES", block)
        assert sifted(data) == wanted


def test_a_line_without_a_stamp_has_the_time_of_the_stamped_line_before_it():
    reader = LineReader()
    one = sieve.Sieve(["valueerror"], "^never$", reader.matters)
    text = "2026-03-04 05:00:00 step 1\n2026-03-04 05:07:00 step 2\nValueError: bad shape\n"
    facts = FileFacts(name="log", kind="job", clock=Clock(reference_ns=0))
    reader.read(one.rows(io.BytesIO(text.encode())), facts)
    (seen,) = reader.observations
    assert seen.time_ns == int(datetime(2026, 3, 4, 5, 7, tzinfo=UTC).timestamp()) * 10**9


def table():
    """Return 1,000 seconds of two GPUs: 100 + second, and 300."""
    seconds = range(1000)
    return pl.DataFrame(
        {
            "timestamp": [1_772_600_000 + s for s in seconds for _ in range(2)],
            "gpu": [g for _ in seconds for g in range(2)],
            "temp_c": [100.0 + s if g == 0 else 300.0 for s in seconds for g in range(2)],
        }
    )


def test_parts_of_the_time_hold_the_means_of_their_samples():
    found = measures_of_table(table().lazy(), bins=10)
    one = found.filter(pl.col("device") == "0")
    assert one["value"].to_list() == [100 + 100 * n + 49.5 for n in range(10)]
    assert set(found.filter(pl.col("device") == "1")["value"]) == {300.0}


def test_a_large_file_is_averaged_a_small_one_kept(tmp_path, monkeypatch):
    path = tmp_path / "gpus.csv"
    table().write_csv(path)
    assert len(read_numbers(path)) == 2000
    monkeypatch.setattr("kansoku.diagnose.edge.numbers._LARGE_BYTES", 1000)
    assert len(read_numbers(path)) == 2 * 240
