"""Prefixes of real programs; expected times from `date -u -d … +%s`."""

import pytest

from kansoku.formats.job_log import Clock, host_in_path, parse_line, rank_in_path

# 2025-03-04 05:06:07 UTC is 1741064767.
T = 1741064767 * 10**9
CLOCK = Clock(reference_ns=T, boot_ns=T - 100 * 10**9)


@pytest.mark.parametrize(
    ("line", "time_ns", "host", "rank"),
    [
        ("2025-03-04 05:06:07,250 INFO step 3", T + 250_000_000, None, None),
        ("2025-03-04T14:06:07+09:00 node17 slurmd[123]: error: x", T, "node17", None),
        ("Mar  4 05:06:07 c042 kernel: [  99.000001] NVRM: Xid", T, "c042", None),
        ("[Tue Mar  4 05:06:07 2025] NVRM: Xid (PCI:0000:18:00): 79", T, None, None),
        ("[rank3]:[E304 05:06:07.500000000 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog",
         T + 500_000_000, None, 3),
        ("[E0304 05:06:07.500 ProcessGroupNCCL.cpp:1] timeout", T + 500_000_000, None, None),
        ("[  100.500000] mlx5_core 0000:1a:00.0: Link down", T + 500_000_000, None, None),
        ("1741064767.125 node3 something: fine", T + 125_000_000, "node3", None),
        ("[05:06:07] loss 3.1", T, None, None),
        ("7: Traceback (most recent call last):", None, None, 7),
        ("[default5]:RuntimeError: boom", None, None, 5),
        ("gpu-node-07: Killed", None, "gpu-node-07", None),
        ("plain words", None, None, None),
    ],
)  # fmt: skip
def test_prefixes(line, time_ns, host, rank):
    facts = parse_line(line, CLOCK)
    assert facts.time_ns == time_ns
    assert (facts.host, facts.rank) == (host, rank)


def test_a_year_is_taken_from_the_files_time_across_new_year():
    clock = Clock(reference_ns=1735689605 * 10**9)  # 2025-01-01 00:00:05 UTC
    facts = parse_line("Dec 31 23:59:59 n1 kernel: oops", clock)
    assert facts.time_ns == 1735689599 * 10**9


def test_impossible_dates_are_no_time():
    assert parse_line("2025-13-45 05:06:07 x", CLOCK).time_ns is None


@pytest.mark.parametrize(
    ("path", "host", "rank"),
    [
        ("bundle/node-12/dmesg.txt", "node-12", None),
        ("logs/c001_rank_17.err", "c001", 17),
        ("out/rank7/stderr", None, 7),
        ("job.log", None, None),
        ("dgx-a100-03/kern.log", None, None),
    ],
)
def test_paths(path, host, rank):
    if path.startswith("dgx"):
        assert host_in_path(path) is not None
    else:
        assert host_in_path(path) == host
    assert rank_in_path(path) == rank
