"""The exporter and its spool: nothing lost, nothing doubled, every row counted at some stage."""

import os
import threading

import httpx
import polars as pl
import pytest

from kansoku.errors import InputError, PlatformError
from kansoku.telemetry import Exporter, Outcome, Spool, make_transport
from kansoku.telemetry.batch import unpack_batch
from kansoku.telemetry.spool import Record


class Receiver:
    """A transport that answers from a script, then delivers everything."""

    def __init__(self, script=()):
        self.script = list(script)
        self.kept = {}
        self.calls = 0
        self.up = threading.Event()
        self.up.set()

    def send(self, record, agent):
        self.calls += 1
        if not self.up.is_set():
            return Outcome(state="retry", reason="away")
        outcome = self.script.pop(0) if self.script else Outcome(state="delivered")
        if outcome.state == "delivered":
            # Exactly once: a batch seen before is not kept again.
            self.kept.setdefault((agent, record.sequence), unpack_batch(record.payload)[0])
        return outcome

    def close(self):
        pass

    @property
    def values(self):
        return [v for batch in self.kept.values() for v in batch["metrics"]["value"].to_pylist()]


def rows(*values):
    return pl.DataFrame(
        {"metric": "m", "labels": "{}", "time_ns": 1, "value": [float(v) for v in values]}
    )


def adds_up(counts):
    return counts.rows_in == (
        counts.rows_delivered + counts.rows_rejected + counts.rows_refused
        + counts.rows_dropped + counts.rows_pending
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("kansoku.telemetry.exporter._FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("kansoku.telemetry.exporter._LONGEST_WAIT_S", 0.002)


def test_rows_arrive_in_order(tmp_path):
    receiver = Receiver()
    exporter = Exporter(receiver, spool=tmp_path)
    for value in range(20):
        exporter.put("metrics", rows(value))
    assert exporter.flush(10)
    assert receiver.values == list(range(20))
    assert exporter.counts.rows_delivered == 20
    exporter.close()


def test_an_outage_only_delays(tmp_path):
    """An hour of one batch every ten seconds waits on disk and arrives when the receiver does."""
    receiver = Receiver()
    receiver.up.clear()
    exporter = Exporter(receiver, spool=tmp_path, sync=False)
    for value in range(360):
        exporter.put("metrics", rows(value))
    counts = exporter.counts
    assert counts.rows_pending == 360
    assert adds_up(counts)
    receiver.up.set()
    assert exporter.flush(20)
    assert receiver.values == list(range(360))
    exporter.close()


def test_a_new_process_sends_what_the_old_one_left(tmp_path):
    away = Receiver()
    away.up.clear()
    exporter = Exporter(away, spool=tmp_path)
    exporter.put("metrics", rows(1, 2))
    identity = exporter.identity
    exporter.close(timeout_s=0)
    receiver = Receiver()
    exporter = Exporter(receiver, spool=tmp_path)
    assert exporter.flush(10)
    assert exporter.identity == identity
    assert receiver.values == [1, 2]
    assert adds_up(exporter.counts)
    exporter.close()


def test_retry_sends_the_same_number(tmp_path):
    receiver = Receiver([Outcome(state="retry")] * 3)
    exporter = Exporter(receiver, spool=tmp_path)
    exporter.put("metrics", rows(1))
    assert exporter.flush(10)
    assert receiver.calls == 4
    assert exporter.counts.retries == 3
    exporter.close()


def test_refused_and_rejected_rows_are_counted(tmp_path):
    receiver = Receiver([Outcome(state="refused"), Outcome(state="delivered", rejected_rows=1)])
    exporter = Exporter(receiver, spool=tmp_path)
    exporter.put("metrics", rows(1, 2, 3))
    exporter.put("metrics", rows(4, 5))
    assert exporter.flush(10)
    counts = exporter.counts
    assert (counts.rows_refused, counts.rows_rejected, counts.rows_delivered) == (3, 1, 1)
    assert adds_up(counts)
    exporter.close()


def test_a_full_spool_drops_the_oldest_and_counts(tmp_path):
    receiver = Receiver()
    receiver.up.clear()
    exporter = Exporter(receiver, spool=tmp_path, max_spool_bytes=40_000, sync=False)
    for value in range(200):
        exporter.put("metrics", rows(value))
    counts = exporter.counts
    assert counts.rows_dropped > 0
    assert counts.spool_bytes <= 40_000
    assert adds_up(counts)
    receiver.up.set()
    assert exporter.flush(10)
    assert receiver.values[-1] == 199
    assert adds_up(exporter.counts)
    exporter.close()


def test_a_full_disk_is_survived_in_memory(tmp_path, monkeypatch):
    receiver = Receiver()
    receiver.up.clear()
    exporter = Exporter(receiver, spool=tmp_path, max_memory_bytes=3000)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kansoku.telemetry.spool._write_all", full)
    for value in range(20):
        exporter.put("metrics", rows(value))
    counts = exporter.counts
    assert counts.spool_failures == 20
    assert 0 < counts.rows_dropped < 20
    assert adds_up(counts)
    receiver.up.set()
    assert exporter.flush(10)
    assert receiver.values == list(range(20 - counts.rows_dropped))
    exporter.close()


def test_gathered_rows_travel_as_one_batch(tmp_path):
    receiver = Receiver()
    exporter = Exporter(receiver, spool=tmp_path, batch_s=60)
    for value in range(5):
        exporter.put("metrics", rows(value), durable=False)
    assert receiver.calls == 0
    assert adds_up(exporter.counts)
    assert exporter.flush(10)
    assert receiver.calls == 1
    assert receiver.values == [0, 1, 2, 3, 4]
    exporter.close()


def test_unknown_columns_are_refused_at_the_door(tmp_path):
    exporter = Exporter(Receiver(), spool=tmp_path)
    with pytest.raises(InputError, match="colour"):
        exporter.put("steps", pl.DataFrame({"colour": ["red"]}))
    exporter.close()


@pytest.mark.parametrize("cut", [1, 10, 23, 24, 40])
def test_a_torn_record_is_cut_away_and_the_rest_kept(tmp_path, cut):
    spool = Spool(tmp_path)
    spool.put(b"first" * 10, rows=1)
    spool.put(b"second" * 10, rows=1)
    spool.close()
    (segment,) = tmp_path.glob("*.seg")
    os.truncate(segment, segment.stat().st_size - cut)
    spool = Spool(tmp_path)
    assert (spool.torn_records, spool.damaged_segments) == (1, 0)
    assert spool.pending_batches == 1
    first = spool.first()
    assert first is not None
    assert first.payload == b"first" * 10
    assert spool.put(b"third", rows=1) == 2
    spool.close()


def test_a_flipped_bit_is_noticed(tmp_path):
    spool = Spool(tmp_path)
    spool.put(b"x" * 100, rows=1)
    spool.close()
    (segment,) = tmp_path.glob("*.seg")
    raw = bytearray(segment.read_bytes())
    raw[50] ^= 1
    segment.write_bytes(raw)
    spool = Spool(tmp_path)
    assert spool.first() is None
    assert (spool.torn_records, spool.damaged_segments) == (1, 1)
    spool.close()


def three_records(folder):
    """Write three batches into one segment; return its path and where each record begins."""
    spool = Spool(folder)
    for payload in (b"first", b"second", b"third"):
        spool.put(payload * 10, rows=1)
    spool.close()
    (segment,) = folder.glob("*.seg")
    return segment, [0, 24 + 50, 2 * 24 + 50 + 60]


@pytest.mark.parametrize(
    ("at", "kept"),
    [
        (30, [b"first", b"third"]),  # in the payload: the next record is found all the same
        (0, [b"first"]),  # in the magic: where the next begins is not known
        (18, [b"first"]),  # in the length, now over the end: not what a crash leaves
    ],
    ids=["payload", "magic", "length"],
)
def test_a_damaged_record_costs_itself_or_the_rest_of_its_segment_and_is_said(
    tmp_path, caplog, at, kept
):
    segment, begins = three_records(tmp_path)
    raw = bytearray(segment.read_bytes())
    raw[begins[1] + at] ^= 0x40
    segment.write_bytes(raw)
    receiver = Receiver()
    receiver.up.clear()
    exporter = Exporter(receiver, spool=tmp_path)
    assert exporter.counts.segments_damaged == 1
    assert "1 segments" in caplog.text
    exporter.close(timeout_s=0)
    spool, found = Spool(tmp_path), []
    while (record := spool.first()) is not None:
        found.append(record.payload[: len(record.payload) // 10])
        spool.delivered(record.sequence)
    assert found == kept
    spool.close()


def test_segments_that_went_for_want_of_room_are_counted(tmp_path):
    """Four records of 4,124 bytes fill a segment beyond 4,096 each; three of them have room."""
    spool = Spool(tmp_path, max_bytes=12_500)
    for _ in range(5):
        spool.put(b"x" * 4100, rows=7)
    assert (spool.dropped_segments, spool.dropped_rows) == (2, 14)
    spool.close()


def test_delivered_batches_are_not_sent_again(tmp_path):
    spool = Spool(tmp_path, segment_bytes=64)
    for number in range(10):
        spool.put(b"%d" % number * 40, rows=1)
    for _ in range(4):
        record = spool.first()
        assert record is not None
        spool.delivered(record.sequence)
    spool.close()
    spool = Spool(tmp_path)
    record = spool.first()
    assert record is not None
    assert record.sequence == 5
    assert spool.pending_batches == 6
    spool.close()


def test_one_process_owns_a_spool(tmp_path):
    spool = Spool(tmp_path)
    with pytest.raises(PlatformError, match="another process"):
        Spool(tmp_path)
    spool.close()


@pytest.mark.parametrize("text", ["", "seven", "-1", "9" * 30, "é"])
def test_numbers_that_begin_again_have_a_new_name(tmp_path, text):
    """With the count of delivered batches lost, the receiver must not take new ones for repeats."""
    spool = Spool(tmp_path)
    old = spool.identity
    spool.delivered(spool.put(b"x", rows=1))
    spool.close()
    (tmp_path / "delivered").write_text(text, encoding="utf-8")
    for segment in tmp_path.glob("*.seg"):
        segment.unlink()
    spool = Spool(tmp_path)
    assert spool.put(b"y", rows=1) == 1
    assert spool.identity != old
    kept = spool.identity
    spool.close()
    spool = Spool(tmp_path)
    assert spool.identity == kept
    spool.close()


def test_batches_that_are_there_keep_their_name(tmp_path):
    """Their numbers go on, and what was delivered of them is a repeat under the same name."""
    spool = Spool(tmp_path)
    old = spool.identity
    spool.delivered(spool.put(b"x", rows=1))
    spool.put(b"y", rows=1)
    spool.close()
    (tmp_path / "delivered").write_bytes(b"")
    spool = Spool(tmp_path)
    assert (spool.identity, spool.pending_batches) == (old, 2)
    assert spool.put(b"z", rows=1) == 3
    spool.close()


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"a b\r\nx: y", b"0" * 23])
def test_a_broken_name_is_made_anew(tmp_path, raw):
    (tmp_path / "identity").write_bytes(raw)
    spool = Spool(tmp_path)
    assert len(bytes.fromhex(spool.identity)) == 12
    spool.close()


def test_an_outage_is_said_once_with_its_reason(tmp_path, caplog):
    receiver = Receiver([Outcome(state="retry", reason="HTTP 401: no")] * 3)
    exporter = Exporter(receiver, spool=tmp_path)
    exporter.put("metrics", rows(1))
    assert exporter.flush(10)
    exporter.close()
    assert [one.getMessage() for one in caplog.records] == [
        "rows wait in the spool: HTTP 401: no",
        "the receiver answers again",
    ]


@pytest.mark.parametrize(("status", "state"), [(404, "retry"), (405, "retry"), (400, "refused")])
def test_a_receiver_that_is_another_program_costs_no_batch(monkeypatch, status, state):
    answer = httpx.Response(status, text="who are you")
    monkeypatch.setattr(httpx.Client, "post", lambda *_, **__: answer)
    transport = make_transport("http://127.0.0.1:9")
    outcome = transport.send(Record(sequence=1, rows=1, payload=b"x"), "a")
    assert (outcome.state, str(status) in outcome.reason) == (state, True)
    transport.close()
