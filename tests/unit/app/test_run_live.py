"""The line beside a running job, by hand."""

import dataclasses
import itertools
import os
import subprocess
import sys

import pytest

from kansoku.app import _run_live
from kansoku.app._run_live import LiveLine, RankNow, describe
from kansoku.app.run import _ended
from kansoku.model import ring

RANK = RankNow(
    rank=0, step=7, steps=((6, 0, 50_000_000),), wait_ratio=0.1, tokens=1_000.0, flops=2e9,
    device="cpu",
)  # fmt: skip


@pytest.mark.parametrize(
    ("peak", "said"),
    [
        (100e9, "MFU 40.0 %"),  # 2e9 FLOPs in 50 ms are 40e9 a second
        (40e9, "MFU 100.0 %"),
        (39e9, "no MFU: the peak is too low"),  # measured on a busy machine
    ],
)
def test_mfu_is_never_above_the_peak(peak, said):
    line = describe([RANK], {"flops": peak})
    assert line is not None
    assert line.split(" · ")[:4] == ["step 7", "50.0 ms", "20,000 tokens/s on this node", said]


def test_the_rate_is_that_of_the_wall_clock():
    """Ends at 110, 210, 310, 410 ms of the last rank; the longest of each step's own is 110."""
    ends = {0: (100, 210, 300, 410), 1: (110, 200, 310, 400)}
    ranks = [
        RankNow(
            rank=rank, step=4,
            steps=tuple(
                (step, start * 1_000_000, (end - start) * 1_000_000)
                for step, (start, end) in enumerate(itertools.pairwise((10, *times)))
            ),
            wait_ratio=0.1, tokens=50.0, flops=None, device="cpu",
        )
        for rank, times in ends.items()
    ]  # fmt: skip
    line = describe(ranks, {})
    assert line is not None
    # 3 steps from 110 to 410 ms, 100 tokens each; the first one holds what is done once.
    assert line.split(" · ")[1:3] == ["100.0 ms", "1,000 tokens/s on this node"]


def test_trainings_that_share_a_rank_are_not_taken_for_one():
    ranks = [dataclasses.replace(RANK, step=step) for step in (7, 30, 9)]
    assert describe(ranks, {"flops": 100e9}) == "3 trainings at once · steps 7, 30, 9"


def test_nothing_is_said_before_a_step_ended():
    assert describe([], {}) is None


@pytest.mark.parametrize("block", [16, 100, 4096])
def test_the_window_is_read_from_the_newest_back_over_the_seam(tmp_path, monkeypatch, block):
    """200 steps of 100 ms in a lane of fewer: those that started within 10 s are 100."""
    monkeypatch.setattr(_run_live, "_BLOCK", block)
    path = tmp_path / "n1-7.ring"
    buffer = bytearray(4_096 + 2 * 1_024 + 130 * ring.RECORD_BYTES)
    ring.format_ring(
        buffer, pid=7, process_start=0, anchor=(0, 10**18), lane_shares=(1,), facts_bytes=1_024,
        strings_bytes=1_024,
    )  # fmt: skip
    writer = ring.RingWriter(buffer)
    template = ring.pack_template(ring.KIND_CODES["step"], name=writer.intern("step"))
    for step in range(200):
        span = writer.open(template, step * 100_000_000, step, 0)
        writer.close(span, step * 100_000_000, (step + 1) * 100_000_000, -1)
        if step % 3 == 0:  # the writer notes its newest now and then
            writer.set_head()
    path.write_bytes(buffer)
    found = _run_live._rank_now(path, 20_000_000_001)
    assert found is not None
    assert sorted(number for number, _, _ in found.steps) == list(range(101, 200))
    line = LiveLine(tmp_path, None).read(20_000_000_001)
    assert line is not None
    assert line.split(" · ")[1] == "100.0 ms"


def test_what_the_writer_has_not_noted_yet_is_read_too(tmp_path):
    """A step of 3,000 waits: the head is noted when it ends."""
    path = tmp_path / "n1-7.ring"
    buffer = bytearray(1 << 20)
    ring.format_ring(buffer, pid=7, process_start=0, anchor=(0, 10**18), lane_shares=(1,))
    writer = ring.RingWriter(buffer)
    wait = ring.pack_template(ring.KIND_CODES["collective_wait"], name=writer.intern("wait"))
    writer.set_head()
    for number in range(3_000):
        span = writer.open(wait, number * 1_000_000, 0, 0)
        writer.close(span, number * 1_000_000, number * 1_000_000 + 500_000, -1)
    path.write_bytes(buffer)
    found = _run_live._rank_now(path, 3_000_000_000)
    assert found is not None
    assert found.wait_ratio == pytest.approx(0.5, rel=1e-3)


def test_a_child_is_waited_for_whatever_number_its_descriptor_has():
    """More than 1,023, which select() refuses."""
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1_100)]
    try:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"]) as child:
            assert not _ended(child, 0.01)
            assert _ended(child, 60)
    finally:
        for descriptor in held:
            os.close(descriptor)
