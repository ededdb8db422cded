"""Tables, critical path and comparison on traces whose every row was chosen."""

import itertools
import random

import numpy as np
import pytest
from scipy import stats
from tests.labs.kineto_files import Job, events, row, text, write

from kansoku.app.trace import breakdown, compare, critical_path
from kansoku.trace.kineto.compare import mann_whitney, welch

FLAT = Job(base=False)


def trace(tmp_path, rows, name="rank0.json"):
    return write(tmp_path / name, text(FLAT, rows))


def kernel(start, length, corr, *, stream=7, name="k", **args):
    return row(
        "kernel",
        name,
        0,
        stream,
        start,
        length,
        {"device": 0, "stream": stream, "correlation": corr, **args},
    )


def call(start, length, corr, name="cudaLaunchKernel"):
    return row("cuda_runtime", name, 1, 1, start, length, {"correlation": corr})


def test_idle_by_reason(tmp_path):
    rows = [
        call(100, 5, 1), kernel(110, 10, 1),  # 120
        call(101, 5, 2), kernel(120.02, 10, 2),  # 20 ns after: the device's own
        call(150, 5, 3), kernel(160, 10, 3),  # launched after the device ran dry
        call(151, 5, 4), kernel(180, 10, 4),  # launched in time, waited 10 µs for something
    ]  # fmt: skip
    (idle,) = breakdown([trace(tmp_path, rows)]).to_json()["idle"]
    assert idle == {"rank": 0, "host_bound_us": 29.98, "kernel_wait_us": 0.02, "other_us": 10.0}


def test_queue_and_launches(tmp_path):
    rows = [call(100, 5, 1), call(105, 5, 2), call(110, 5, 3)]
    rows += [kernel(120, 20, 1), kernel(140, 20, 2), kernel(160, 3, 3), kernel(170, 5, 99)]
    answer = breakdown([trace(tmp_path, rows)]).to_json()
    (queue,) = answer["queues"]
    assert queue["max_length"] == 3
    # 100-105: 1, 105-110: 2, 110-140: 3, 140-160: 2, 160-163: 1
    assert queue["mean_length"] == pytest.approx((5 + 10 + 90 + 40 + 3) / 63)
    (launch,) = answer["launches"]
    assert (launch["rows"], launch["unmatched_rows"], launch["short_rows"]) == (3, 1, 1)
    assert launch["delay_median_us"] == 35.0
    assert launch["longer_than_work"] == 1


def test_kernels_by_name(tmp_path):
    lengths = {"a": (7, 1, 4, 100), "b": (5,), "c": (3, 2.5, 2)}
    rows = [
        kernel(100 + 200 * number, length, number, name=name)
        for number, (name, length) in enumerate(
            (name, length) for name, them in lengths.items() for length in them
        )
    ]
    found = breakdown([trace(tmp_path, rows)]).to_json()["kernels"]
    figures = ("name", "calls", "total_us", "mean_us", "median_us", "min_us", "max_us")
    assert [tuple(one[name] for name in figures) for one in found] == [
        ("a", 4, 112.0, 28.0, 5.5, 1.0, 100.0),
        ("c", 3, 7.5, 2.5, 2.5, 2.0, 3.0),
        ("b", 1, 5.0, 5.0, 5.0, 5.0, 5.0),
    ]


def test_launch_delays_at_the_99th_percentile(tmp_path):
    # Delays of 0 to 200 µs in steps of 1 µs, and linear between ranks: 198 µs at 0.99 * 200.
    rows = []
    for number in range(201):
        begin = 1000 + 500 * number
        rows += [call(begin, 5, number + 1), kernel(begin + number, 1, number + 1)]
    (launch,) = breakdown([trace(tmp_path, rows)]).to_json()["launches"]
    assert launch["delay_p99_us"] == pytest.approx(198.0)
    (launch,) = breakdown([trace(tmp_path, rows[:4])]).to_json()["launches"]
    assert launch["delay_p99_us"] == pytest.approx(0.99)


def test_copies_collectives_modules(tmp_path):
    rows = [
        row("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 7, 100, 50, {"device": 0, "stream": 7, "bytes": 1_000_000}),
        row("kernel", "ncclDevKernel_AllReduce", 0, 40, 200, 100, {
            "Collective name": "allreduce", "In msg nelems": 500_000, "Out msg nelems": 500_000,
            "Group size": 4, "dtype": "BFloat16", "Process Group Name": "tp", "Seq": 17}),
        row("python_function", "nn.Module: Block_0", 1, 1, 300, 100, {}),
        row("python_function", "nn.Module: Linear_1", 1, 1, 310, 20, {}),
        row("user_annotation", "forward", 1, 1, 300, 60, {}),
        call(315, 2, 1), kernel(320, 8, 1), call(350, 2, 2), kernel(360, 4, 2),
    ]  # fmt: skip
    answer = breakdown([trace(tmp_path, rows)]).to_json()
    assert answer["copies"][0]["gb_per_s"] == pytest.approx(20.0)
    (collective,) = answer["collectives"]
    assert (collective["op"], collective["group"], collective["seq"]) == ("all_reduce", "tp", 17)
    assert collective["bytes"] == 1_000_000
    assert collective["algbw_gb_per_s"] == pytest.approx(10.0)
    assert collective["busbw_gb_per_s"] == pytest.approx(15.0)
    modules = {m["name"]: (m["device_us"], m["device_rows"]) for m in answer["modules"]}
    assert modules == {"nn.Module: Block_0": (12.0, 2), "nn.Module: Linear_1": (8.0, 1)}
    assert answer["annotations"][0]["device_us"] == 12.0


def test_recursive_calls_count_once(tmp_path):
    rows = [
        row("user_annotation", "f", 1, 1, 100, 50, {}),
        row("user_annotation", "f", 1, 1, 110, 20, {}),
    ]
    rows += [call(115, 1, 1), kernel(120, 5, 1)]
    (cost,) = breakdown([trace(tmp_path, rows)]).to_json()["annotations"]
    assert (cost["calls"], cost["host_us"], cost["device_us"]) == (2, 50.0, 5.0)


@pytest.mark.parametrize("seed", range(20))
def test_costs_of_calls_against_a_count_of_microseconds(tmp_path, seed):
    """Calls of a few names on two threads, nested, overlapping, touching and empty."""
    draw = random.Random(seed)
    calls = [
        (draw.choice("abc"), draw.randint(1, 2), draw.randint(1, 60), draw.choice((0, 1, 5, 20)))
        for _ in range(draw.randint(0, 25))
    ]
    launches = [(draw.randint(1, 2), draw.randint(1, 90), n + 1) for n in range(30)]
    rows = [row("user_annotation", name, 1, thread, at, n, {}) for name, thread, at, n in calls]
    rows += [kernel(100 + 10 * corr, corr, corr) for _, _, corr in launches]
    rows += [
        row("cuda_runtime", "cudaLaunchKernel", 1, thread, at, 0, {"correlation": corr})
        for thread, at, corr in launches
    ]
    draw.shuffle(rows)
    found = breakdown([trace(tmp_path, rows)]).to_json()["annotations"]
    expected = {}
    for name in {call[0] for call in calls}:
        open_at = {
            (thread, t) for said, thread, at, n in calls if said == name for t in range(at, at + n)
        }
        inside = [corr for thread, at, corr in launches if (thread, at) in open_at]
        count = sum(said == name for said, *_ in calls)
        expected[name] = (count, len(open_at), sum(inside), len(inside))
    assert {
        cost["name"]: (cost["calls"], cost["host_us"], cost["device_us"], cost["device_rows"])
        for cost in found
    } == expected


def test_copies_that_do_not_all_say_their_size(tmp_path):
    copy = "Memcpy HtoD (Pageable -> Device)"
    rows = [
        row("gpu_memcpy", copy, 0, 7, 100, 50, {"device": 0, "stream": 7, "bytes": 1_000_000}),
        row("gpu_memcpy", copy, 0, 7, 200, 150, {"device": 0, "stream": 7}),
        row("gpu_memset", "Memset (Device)", 0, 7, 400, 30, {"device": 0, "stream": 7}),
    ]
    one, two = breakdown([trace(tmp_path, rows)]).to_json()["copies"]
    assert (one["name"], one["calls"], one["bytes"], one["total_us"]) == (copy, 2, 1_000_000, 200.0)
    assert one["gb_per_s"] == pytest.approx(20.0)
    assert (two["calls"], two["bytes"], two["total_us"], two["gb_per_s"]) == (1, None, 30.0, None)


def test_critical_path_through_launch_stream_sync_and_collective(tmp_path):
    rows = [
        row("user_annotation", "ProfilerStep#1", 1, 1, 100, 200, {}),
        call(110, 4, 1), kernel(120, 30, 1, name="first"),  # host 100-110, launch 110-120
        call(112, 4, 2), kernel(151, 20, 2, name="second"),  # 1 µs after the first
        row("cuda_runtime", "cudaStreamSynchronize", 1, 1, 118, 56, {}),  # returns at 174
        call(180, 4, 3), kernel(190, 60, 3, stream=40, name="ncclDevKernel_AllReduce"),
        call(185, 4, 4), kernel(252, 30, 4, name="third"),  # waits for the collective's event
    ]  # fmt: skip
    answer = critical_path([trace(tmp_path, rows)]).to_json()
    (path,) = answer["paths"]
    assert path["compute_us"] == 30 + 20 + 30
    assert path["communication_us"] == 60
    assert path["stream_gap_us"] == 1 + 2
    assert path["launch_us"] == 10 + 10
    assert path["synchronisation_us"] == 3
    assert path["host_us"] == 10 + 6 + 18  # 100-110, 174-180, 282-300
    kinds = (
        "compute",
        "communication",
        "memory",
        "stream_gap",
        "launch",
        "synchronisation",
        "host",
    )
    assert sum(path[f"{kind}_us"] for kind in kinds) == path["span_us"] == 200


@pytest.mark.parametrize("seed", range(12))
def test_the_path_always_fills_its_window(tmp_path, seed):
    rng = random.Random(seed)
    rows = [row("user_annotation", f"ProfilerStep#{n}", 1, 1, 100 * n, 100, {}) for n in range(4)]
    for corr in range(60):
        start = rng.uniform(0, 380)
        if rng.random() < 0.8:
            rows.append(call(start, rng.uniform(0, 9), corr))
        rows.append(
            kernel(
                start + rng.uniform(-2, 30), rng.uniform(0, 25), corr, stream=rng.choice([7, 40])
            )
        )
        if rng.random() < 0.2:
            rows.append(call(start, rng.uniform(0, 60), 1000 + corr, "cudaDeviceSynchronize"))
    for steps in (True, False):
        result = critical_path([trace(tmp_path, rows)], steps=steps)
        for path in result.parts[0].paths:
            assert sum(path.totals_ns.values()) == path.end_ns - path.start_ns
            times = [(low, high) for _, _, low, high in path.segments]
            assert all(b[0] == a[1] for a, b in itertools.pairwise(times))


def test_mann_whitney_as_scipy():
    rng = np.random.default_rng(1)
    for shift in (0, 3, 40):
        a, b = rng.integers(100, 200, 80), rng.integers(100, 200, 60) + shift
        expected = stats.mannwhitneyu(a, b, method="asymptotic").pvalue
        assert mann_whitney(a, b) == pytest.approx(expected, rel=1e-6)


def test_welch_is_close_to_scipy():
    rng = np.random.default_rng(2)
    a, b = rng.normal(100, 10, 200), rng.normal(102, 12, 300)

    def moments(values):
        return len(values), float(values.sum()), float((values**2).sum())

    expected = stats.ttest_ind(a, b, equal_var=False).pvalue
    assert welch(moments(a), moments(b)) == pytest.approx(expected, abs=0.01)


def jittered(seed, slow=1.0):
    rng = random.Random(seed)
    rows = events(Job(steps=6))
    for event in rows:
        if event.get("cat") == "kernel" and "AllReduce" not in event["name"]:
            factor = slow if "kernel_2" in event["name"] else 1.0
            event["dur"] = round(event["dur"] * factor * rng.uniform(0.9, 1.1), 3)
        if event.get("cat") == "cpu_op":
            event["dur"] = round(event["dur"] * rng.uniform(0.9, 1.1), 3)
    return rows


def test_two_runs_of_the_same_work_do_not_differ(tmp_path):
    a = write(tmp_path / "a.json", text(Job(), jittered(1)))
    b = write(tmp_path / "b.json", text(Job(), jittered(2)))
    result = compare(a, b).to_json()
    assert result["verdict"] == "none"


def test_one_slower_kernel_is_found(tmp_path):
    a = write(tmp_path / "a.json", text(Job(), jittered(1)))
    b = write(tmp_path / "b.json", text(Job(), jittered(2, slow=1.2)))
    result = compare(a, b)
    found = [(c.what, c.reason) for c in result.significant if c.what == "kernel"]
    assert found == [("kernel", "slower")]
    assert "kernel_2" in next(c.name for c in result.significant if c.what == "kernel")
    assert compare(b, a).significant[0].reason == "faster"


def test_kernels_on_one_side_only(tmp_path):
    rows = events(Job())
    a = write(tmp_path / "a.json", text(Job(), rows))
    renamed = [{**r, "name": r["name"].replace("kernel_3", "kernel_x")} for r in rows]
    b = write(tmp_path / "b.json", text(Job(), renamed))
    reasons = {c.reason for c in compare(a, b).significant}
    assert reasons == {"only in A", "only in B"}
