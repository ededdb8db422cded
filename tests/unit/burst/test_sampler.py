"""The reader process on real files and on the loopback interface; rows and their sums."""

import shutil
import socket
import time
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from kansoku.burst.edge.ports import Port
from kansoku.burst.edge.sampler import Readings, Sampler, _parse
from kansoku.burst.policy import BurstPolicy
from kansoku.burst.summary import summarise
from kansoku.errors import ConfigurationError, PlatformError
from kansoku.model import table_schema


@pytest.fixture
def rdma(tmp_path):
    """Counter files as a driver shows them; both sides start with 4 kB."""
    files = {side: tmp_path / side for side in ("receive", "transmit")}
    for file in files.values():
        file.write_text("1000\n")
    cnp = tmp_path / "np_cnp_sent"
    cnp.write_text("5\n")
    return Port(
        name="mlx5_0", line_rate_bits_per_s=8e9, rate_source="given", files=files,
        beside={"np_cnp_sent": cnp},
    )  # fmt: skip


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def native(request):
    if request.param and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler")
    return request.param


def wait(check, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_text_counters_are_read_as_the_kernel_writes_them():
    texts = ["0\n", "7\n9", "18446744073709\n", "12345678901234567\nold", "junk\n", "no newline"]
    rows = np.zeros((len(texts), 24), dtype=np.uint8)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = np.frombuffer(text.encode(), dtype=np.uint8)
    assert _parse(rows)[:4].tolist() == [0, 7, 18446744073709, 12345678901234567]
    assert _parse(rows)[5] == 0


def test_files_and_their_words_of_four_bytes(rdma, native):
    readings = Readings([rdma], interval_ns=1_000_000, real_time=False, native=native)
    try:
        assert readings.native is native
        wait(lambda: readings.written > 5)
        rdma.files["transmit"].write_text("2000\n")
        rdma.beside["np_cnp_sent"].write_text("8\n")
        seen = readings.written
        wait(lambda: readings.written > seen + 5)
        before, after, counters, beside = readings.columns(readings.take())
    finally:
        readings.close()
    assert (np.diff(before) > 0).all()
    assert (after >= before).all()
    assert counters["mlx5_0", "receive"].tolist() == [4000] * len(before)
    assert counters["mlx5_0", "transmit"][[0, -1]].tolist() == [4000, 8000]
    assert beside["mlx5_0", "np_cnp_sent"][[0, -1]].tolist() == [5, 8]


def test_the_loopback_counts_what_is_sent_over_it(native):
    """RTM_GETSTATS against a known amount: 100 datagrams of 1000 bytes and their headers."""
    port = Port(
        name="lo", line_rate_bits_per_s=1e9, rate_source="given",
        index=socket.if_nametoindex("lo"),
    )  # fmt: skip
    readings = Readings([port], interval_ns=1_000_000, real_time=False, native=native)
    try:
        wait(lambda: readings.written > 2)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _ in range(100):
                sock.sendto(bytes(1000), ("127.0.0.1", 9))
        seen = readings.written
        wait(lambda: readings.written > seen + 2)
        _, _, counters, _ = readings.columns(readings.take())
    finally:
        readings.close()
    grown = {side: int(counters["lo", side][-1] - counters["lo", side][0])
             for side in ("receive", "transmit")}  # fmt: skip
    assert grown["receive"] == grown["transmit"] >= 100 * 1028  # others use the loopback too


def test_windows_bursts_and_sums(rdma):
    """8 Gb/s is 1 MB a millisecond: 40 MB written in between is a burst whatever the timing."""
    with Sampler([rdma], node="n", policy=BurstPolicy(window_s=60), real_time=False) as sampler:
        sampler.wait_reading()
        assert sampler.read() == {}
        rdma.files["transmit"].write_text(f"{1000 + 10_000_000}\n")
        wait(lambda: sampler.poll() or sampler._bursts["mlx5_0", "transmit"])
        tables = sampler.read(final=True)
        assert sampler.overrun == 0
    bursts = tables["bursts"]
    assert bursts.schema == table_schema("bursts")
    assert bursts.select("node", "port", "direction", "bytes").row(0) == (
        "n", "mlx5_0", "transmit", 40_000_000,
    )  # fmt: skip
    receive, transmit = summarise(bursts, tables["metrics"])
    assert (receive.bursts, receive.bytes_in_bursts_ratio, receive.mean_ratio) == (0, 0, 0)
    assert (transmit.bursts, transmit.bytes_in_bursts_ratio) == (1, 1.0)
    assert transmit.line_rate_bytes_per_s == 1e9
    assert transmit.mean_ratio == pytest.approx(40e6 / (transmit.observed_ns / 1e9) / 1e9)
    assert transmit.beside == {"np_cnp_sent": 0}
    # The same windows twice, as of two hours, add up.
    both = summarise(pl.concat([bursts, bursts]), pl.concat([tables["metrics"]] * 2))[1]
    assert both.samples == 2 * transmit.samples
    assert both.mean_ratio == pytest.approx(transmit.mean_ratio)


def test_a_reader_that_cannot_run_says_why(tmp_path, rdma, native):
    gone = Port(
        name="x", line_rate_bits_per_s=1e9, rate_source="given",
        files={"receive": tmp_path / "no", "transmit": tmp_path / "no"},
    )  # fmt: skip
    with (
        Sampler([gone], node="n", real_time=False, native=native) as sampler,
        pytest.raises(PlatformError, match=r"counter reader ended.*No such file"),
    ):
        sampler.wait_reading()
    with pytest.raises(ConfigurationError, match="50 µs"):
        Sampler([rdma], node="n", interval_ns=1000)


def test_without_a_compiler_python_reads(rdma, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with Sampler([rdma], node="n", real_time=False) as sampler:
        sampler.wait_reading()
        assert not sampler.native


def test_interfaces_files_and_slow_counters_in_one_row(rdma, native):
    """Three kinds side by side: the slow ones in turn, one a reading."""
    more = {f"c{n}": rdma.files["receive"].with_name(f"c{n}") for n in range(3)}
    for n, file in enumerate(more.values()):
        file.write_text(f"{n}\n")
    lo = Port(
        name="lo", line_rate_bits_per_s=1e9, rate_source="given", index=socket.if_nametoindex("lo"),
    )  # fmt: skip
    port = Port(
        name="mlx5_0", line_rate_bits_per_s=8e9, rate_source="given", files=rdma.files, beside=more,
    )  # fmt: skip
    readings = Readings([lo, port], interval_ns=500_000, real_time=False, native=native)
    try:
        for n, file in enumerate(more.values()):
            file.write_text(f"{n + 10}\n")
        seen = readings.written
        wait(lambda: readings.written > seen + 8)
        _, _, counters, beside = readings.columns(readings.take())
    finally:
        readings.close()
    assert counters["mlx5_0", "receive"][-1] == 4000
    assert counters["lo", "receive"][-1] > 0
    assert [int(beside["mlx5_0", name][-1]) for name in more] == [10, 11, 12]


NOWHERE = Port(name="gone0", line_rate_bits_per_s=1e9, rate_source="given", index=999_999)


def loopback():
    return Port(
        name="lo", line_rate_bits_per_s=1e9, rate_source="given",
        index=socket.if_nametoindex("lo"),
    )  # fmt: skip


@pytest.mark.parametrize("ports", [[NOWHERE, loopback()], [loopback(), NOWHERE]])
def test_an_interface_that_is_not_there_is_told_from_one_that_is_idle(native, ports):
    readings = Readings(ports, interval_ns=1_000_000, real_time=False, native=native)
    try:
        wait(lambda: readings.written > 5)
        there = readings.there(readings.take())
    finally:
        readings.close()
    assert there["lo"].all()
    assert not there["gone0"].any()


def test_what_went_away_is_not_counted_as_watched():
    with Sampler([loopback(), NOWHERE], node="n", real_time=False) as sampler:
        sampler.wait_reading()
        wait(lambda: sampler.poll() is not None and sampler.gone)
        ports = {one.port for one in sampler.windows(final=True)}
    assert set(sampler.gone) == {"gone0"}
    assert ports == {"lo"}


def test_an_rdma_port_goes_with_its_files_and_comes_back(rdma):
    with Sampler([rdma], node="n", real_time=False) as sampler:
        sampler.wait_reading()
        sampler.poll()
        assert sampler.gone == {}
        text = rdma.files["receive"].read_text()
        rdma.files["receive"].unlink()
        wait(lambda: sampler.poll() is not None and sampler.gone)
        assert set(sampler.gone) == {"mlx5_0"}
        rdma.files["receive"].write_text(text)
        wait(lambda: sampler.poll() is not None and not sampler.gone)


def test_every_interface_is_read_not_the_first_alone(native):
    """The loopback under two names: both must count the same."""
    ports = [replace(loopback(), name=name) for name in ("a", "b", "c")]
    readings = Readings(ports, interval_ns=1_000_000, real_time=False, native=native)
    try:
        wait(lambda: readings.written > 2)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(bytes(1000), ("127.0.0.1", 9))
        seen = readings.written
        wait(lambda: readings.written > seen + 2)
        _, _, counters, _ = readings.columns(readings.take())
    finally:
        readings.close()
    totals = [int(counters[name, "receive"][-1]) for name in ("a", "b", "c")]
    assert min(totals) > 1000
