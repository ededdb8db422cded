"""Several traces in one set of columns answer as each of them alone."""

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.labs.kineto_files import Job, row, text, write

from kansoku.app._trace_set import map_traces
from kansoku.formats.kineto import find_sources, read_trace
from kansoku.trace.kineto.breakdown import unions
from kansoku.trace.kineto.joined import alone, join, sums_between
from kansoku.trace.kineto.report import break_down, break_down_together
from kansoku.trace.kineto.rows import device_rows

FLAT = Job(base=False)


def some_trace(path, seed):
    """Write a small trace in which much happens: equal times, shared ids, several streams."""
    rng = random.Random(seed)
    device = seed % 5 != 4
    base = rng.choice((0, 100, 4_000_000_000))
    rows = []
    for number in range(rng.choice((0, 1, 3, 120))):
        at, corr = base + rng.randrange(2000) / 8, rng.choice((0, -1, number, number % 7))
        stream, process = rng.choice((7, 9, 20)), rng.choice((0, 1))
        arguments = {"device": process, "stream": stream, "correlation": corr}
        category, name = rng.choice(
            (("kernel", "gemm"), ("kernel", "ncclDevKernel_AllReduce_Sum_f32(x)"),
             ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"), ("gpu_memset", "Memset (Device)"))
        )  # fmt: skip
        if name.startswith("Mem") and rng.random() < 0.5:
            arguments["bytes"] = rng.randrange(1 << 20)
        if device:
            length = rng.choice((0, 0.5, 3, 40))
            rows.append(row(category, name, process, stream, at, length, arguments))
        if seed % 4 != 3:
            launch = rng.choice(("cudaLaunchKernel", "cudaGraphLaunch"))
            rows.append(
                row("cuda_runtime", launch, 5, rng.choice((5, 6)), max(at - rng.randrange(99), 0), 2,
                    {"correlation": corr})
            )  # fmt: skip
        if number % 9 == 0:
            step = rng.choice((f"ProfilerStep#{number // 18}", "step 3", "fwd"))
            name = step if seed % 3 else rng.choice(("Optimizer.step#Adam.step", "fwd"))
            rows.append(row("user_annotation", name, 5, rng.choice((5, 6)), at, 60, None))
        if number % 6 == 0:
            rows.append(row("python_function", f"nn.Module: L_{number % 4}", 5, 5, at, 80, None))
    return write(path, text(FLAT, rows))


def read(paths):
    return [read_trace(source) for source in find_sources(paths)]


@pytest.fixture
def traces(tmp_path):
    return read([some_trace(tmp_path / f"rank{seed}.json", seed) for seed in range(20)])


def test_together_as_alone(traces):
    assert len(join(traces)) == 1
    each = [break_down(trace, rank) for rank, trace in enumerate(traces)]
    assert sum(len(part.steps) for part in each) > 20
    assert break_down_together(traces, range(len(traces))) == each
    backwards = break_down_together(traces[::-1], range(len(traces))[::-1])
    assert backwards == each[::-1]


def test_parts_never_touch(tmp_path):
    # Both run from 100 to 110 µs: as one set of times they would be one stretch.
    kernel = row("kernel", "k", 0, 7, 100, 10, {"device": 0, "stream": 7, "correlation": 1})
    paths = [write(tmp_path / f"rank{n}.json", text(FLAT, [kernel])) for n in range(3)]
    (joined,) = join(read(paths))
    rows = device_rows(joined)
    busy = unions(rows).busy
    assert (busy.ends - busy.starts).tolist() == [10_000] * 3
    found = break_down_together(joined.traces, [0, 1, 2])
    assert [part.figures.busy_ns for part in found] == [10_000] * 3
    assert [part.start_ns for part in found] == [100_000] * 3


def test_one_alone_is_not_copied(traces):
    (joined,) = join(traces[:1])
    assert joined.columns is traces[0].columns
    assert joined.shifts == [0]


@pytest.mark.parametrize("column", ["start_ns", "correlation"])
def test_what_does_not_fit_stays_apart(traces, column):
    trace = next(trace for trace in traces if len(trace.columns["kind"]) > 50)
    values = trace.columns[column].astype(np.int64)
    values[0], values[-1] = 5, (1 << 62) - 5
    wide = replace(trace, columns=trace.columns | {column: values})
    assert len(join([wide, wide, wide])) == 3
    each = break_down(wide)
    assert break_down_together([wide, wide, wide], [None] * 3) == [each] * 3


def test_of_nothing():
    assert break_down_together([], []) == []


def test_sums_between_edges():
    values, edges = np.array([1, 2, 3]), np.array([0, 0, 2, 2, 3, 3])
    assert sums_between(values, edges).tolist() == [0, 3, 0, 3, 0]
    assert sums_between(values[:0], np.zeros(3, np.int64)).tolist() == [0, 0]


def test_begins_of_parts_without_rows(traces):
    empty = next(trace for trace in traces if not len(trace.columns["kind"]))
    assert alone(empty).begins.tolist() == [np.iinfo(np.int64).max]


def test_small_traces_go_together_in_their_order(tmp_path, monkeypatch):
    paths = [some_trace(tmp_path / f"rank{seed}.json", seed) for seed in (1, 2, 5, 6, 8)]
    monkeypatch.setattr(
        "kansoku.app._trace_set._TOGETHER_BYTES", sum(p.stat().st_size for p in paths[:2])
    )
    sizes = []

    def together(traces, ranks):
        sizes.append(len(traces))
        return list(ranks)

    found = map_traces(lambda _, rank: rank, paths, together=together)
    assert found == [1, 2, 5, 6, 8]
    assert sizes[0] == 2
