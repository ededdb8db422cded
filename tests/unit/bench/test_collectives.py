"""Bus factors of nccl-tests, and the fit on times made from known α and β."""

import pytest

from kansoku.app.bench_collectives import parse_size, parse_sizes
from kansoku.bench.collectives import CollectivePoint, bus_factor, fit_link
from kansoku.cli.bench_collectives import command
from kansoku.errors import InputError


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        # NVIDIA/nccl-tests doc/PERFORMANCE.md
        ("all_reduce", 8, 1.75), ("all_gather", 8, 0.875), ("reduce_scatter", 4, 0.75),
        ("all_to_all", 2, 0.5), ("send_recv", 2, 1.0),
    ],
)  # fmt: skip
def test_bus_factors(operation, ranks, factor):
    assert bus_factor(operation, ranks) == factor


def test_a_ring_all_reduce_of_known_latency_and_bandwidth():
    """8 ranks: 14 steps of 5 µs and 1.75 × bytes over 10 GB/s."""
    points = [
        CollectivePoint(
            operation="all_reduce", ranks=8, bytes=size, seconds=14 * 5e-6 + 1.75 * size / 10e9,
            p95_seconds=1.0, repetitions=5,
        )
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 26)
    ]  # fmt: skip
    fit = fit_link(points)
    assert fit.alpha_s == pytest.approx(5e-6)
    assert fit.beta_bytes_per_s == pytest.approx(10e9)
    assert points[-1].busbw == pytest.approx(1.75 * (1 << 26) / points[-1].seconds)


def test_too_few_sizes_are_refused():
    point = CollectivePoint(
        operation="send_recv", ranks=2, bytes=8, seconds=1, p95_seconds=1, repetitions=3
    )
    with pytest.raises(InputError, match="three sizes"):
        fit_link([point, point, point])


def test_sizes():
    assert parse_sizes("4k-32k") == [4096, 8192, 16384, 32768]
    assert parse_sizes("1m,512") == [512, 1 << 20]
    for wrong in ("", "4q", "-4k", "0"):
        with pytest.raises(InputError):
            parse_sizes(wrong)


def test_sizes_that_go_down_or_nowhere_are_refused():
    for wrong, words in (
        ("64m-4k", "goes down"),
        ("4k-", "'' in '4k-' is no size"),
        ("99999999999g", "above an exbibyte"),
        ("²", "is no size"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            parse_sizes(wrong)
        assert caught.value.remedy


def test_one_size_is_one():
    assert parse_size("256m") == 256 << 20
    for wrong in ("1m,2m", "1m-4m", "-5m"):
        with pytest.raises(InputError, match="is not one size"):
            parse_size(wrong)


def test_a_link_file_that_cannot_be_written_does_not_cost_the_sweep(tmp_path, monkeypatch, capsys):
    """Three sizes of 8 bytes/ns and no latency; the folder of the file is not there."""
    rows = [
        {"operation": "send_recv", "ranks": 2, "bytes": n, "seconds": n / 8e9, "p95_seconds": n / 8e9,
         "repetitions": 3}
        for n in (1 << 10, 1 << 20, 1 << 30)
    ]  # fmt: skip
    answer = {"backend": "gloo", "device": "cpu", "torch": "2", "nodes": 1, "points": rows}
    monkeypatch.setattr("kansoku.app.bench_collectives.launch_ranks", lambda *_, **__: answer)
    with pytest.raises(InputError, match="no such folder"):
        command(links=tmp_path / "none" / "l.json")
    with pytest.raises(InputError, match="cannot be written"):
        command(links=tmp_path)  # a folder
    assert "Bus bandwidth" in capsys.readouterr().out
    with pytest.raises(InputError, match="No closing quotation"):
        command(launcher="'")
