"""A damaged write-ahead log: said when the store opens, whether or not the engine notices."""

import shutil
import struct

import polars as pl
import pytest

from kansoku.errors import StoreError
from kansoku.store import LocalStore
from kansoku.store._wal import commits_out_of_reach

NOW = 500_000 * 3600 * 10**9
COMMITS = 6


def append(store, value):
    rows = {"metric": ["m"], "labels": ["{}"], "time_ns": [NOW + value], "value": [float(value)]}
    store.append("metrics", pl.DataFrame(rows))


@pytest.fixture
def crashed(tmp_path):
    """A store as a killed process leaves it: each of six samples is one commit in its log."""
    folder = tmp_path / "crashed"
    with LocalStore(tmp_path / "store", clock_ns=lambda: NOW) as store:
        for value in range(COMMITS):
            append(store, value)
        folder.mkdir()
        for name in ("hot.duckdb", "hot.duckdb.wal"):
            shutil.copy(tmp_path / "store" / name, folder / name)
    return folder


def entries(raw):
    """Return where each entry begins; the head before the first one ends with ffff."""
    for at in range(3, 64):
        found = []
        place = at if raw[at - 2 : at] == b"\xff\xff" else len(raw) + 1
        while place + 16 <= len(raw):
            found.append(place)
            place += 16 + struct.unpack_from("<Q", raw, place)[0]
        if place == len(raw):
            return found
    raise AssertionError("no log")


def change(folder, at, mask):
    path = folder / "hot.duckdb.wal"
    raw = bytearray(path.read_bytes())
    raw[at] ^= mask
    path.write_bytes(raw)


def kept(folder):
    with LocalStore(folder, clock_ns=lambda: NOW) as store:
        values = store.table("metrics")["value"].to_list()
        return sorted(values), store.statistics()["commits_lost"]


def test_a_whole_log_loses_nothing(crashed):
    assert kept(crashed) == ([0, 1, 2, 3, 4, 5], 0)
    assert commits_out_of_reach(crashed / "absent.wal") == 0


def test_what_a_crash_cut_off_was_never_acknowledged_and_is_no_damage(crashed):
    path = crashed / "hot.duckdb.wal"
    path.write_bytes(path.read_bytes()[:-30])
    assert kept(crashed) == ([0, 1, 2, 3, 4], 0)


def test_commits_behind_a_damaged_length_are_counted_and_kept_aside(crashed, caplog):
    """The engine takes them for a write that a crash cut off."""
    raw = (crashed / "hot.duckdb.wal").read_bytes()
    commits = [at for at in entries(raw) if raw[at : at + 8] == b"\x05" + bytes(7)]
    # The entry after the commit of the third sample: three remain out of reach.
    change(crashed, commits[-4] + 21 + 3, 0x40)
    assert kept(crashed) == ([0, 1, 2], 3)
    assert "3 commits in it cannot be read" in caplog.text
    assert (crashed / "hot.duckdb.wal.damaged").stat().st_size == len(raw)


def test_a_last_commit_whose_own_length_is_damaged_is_lost_and_said(crashed):
    change(crashed, -21 + 5, 0x02)
    assert kept(crashed) == ([0, 1, 2, 3, 4], 1)


@pytest.mark.parametrize("at", [0, 3, 7], ids=["kind", "version", "identifier"])
def test_a_damaged_head_puts_all_commits_out_of_reach(crashed, caplog, at):
    raw = (crashed / "hot.duckdb.wal").read_bytes()
    commits = sum(raw[at : at + 8] == b"\x05" + bytes(7) for at in entries(raw))
    change(crashed, at, 0x10)
    assert kept(crashed) == ([], commits)
    assert "is damaged" in caplog.text


def test_a_damaged_payload_is_refused_with_the_way_out(crashed):
    raw = (crashed / "hot.duckdb.wal").read_bytes()
    change(crashed, entries(raw)[-2] + 20, 0x01)
    with pytest.raises(StoreError, match="WAL") as told:
        LocalStore(crashed, clock_ns=lambda: NOW)
    assert "move hot.duckdb.wal away" in str(told.value)
    (crashed / "hot.duckdb.wal").rename(crashed / "aside")
    assert kept(crashed)[1] == 0
