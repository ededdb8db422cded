"""Several small files read at once are what each of them is by itself, or are left to that."""

import json

import pytest
from tests.labs.kineto_files import Job, document, events, row, text, write

from kansoku.formats.kineto import _together, find_sources, read_together, read_trace

FLAT = Job(base=False)
FIELDS = ("file", "rank", "rank_source", "metadata", "operators", "rows", "slices")
FIELDS += ("host_start_ns", "host_end_ns", "damage", "set_aside", "problems", "notes")


@pytest.fixture(autouse=True)
def together(monkeypatch, compiled_reader):
    """Give it the compiled reader, whatever the user's cache holds."""
    monkeypatch.setattr(_together, "library", lambda _: compiled_reader)


def said(trace):
    """Return what a trace says, whatever its codes."""
    columns = {name: values.tolist() for name, values in trace.columns.items()}
    rows = range(len(columns["kind"]))
    details = {
        name: detail.at(list(rows), absent=-9).tolist() for name, detail in trace.details.items()
    }
    shapes = [*trace.collectives, None]
    return {
        **{field: getattr(trace, field) for field in FIELDS},
        "times": [columns[name] for name in ("kind", "start_ns", "duration_ns", "correlation")],
        "names": [trace.names[code] for code in columns["name"]],
        "lanes": [trace.lanes[code] for code in columns["lane"]],
        "bytes": details["bytes"],
        "sequence": details["sequence"],
        "collectives": [shapes[max(code, -1)] for code in details["collective"]],
    }


def both(paths):
    sources = find_sources(paths)
    found = read_together(sources)
    assert found is not None
    assert [said(trace) for trace in found] == [said(read_trace(source)) for source in sources]
    return found


def jobs(tmp_path):
    return [
        write(tmp_path / f"rank{rank}.json", text(Job(rank=rank), events(Job(rank=rank))))
        for rank in range(3)
    ]


def test_several_files(tmp_path):
    found = both(jobs(tmp_path))
    assert [len(trace.columns["kind"]) > 10 for trace in found] == [True] * 3


def test_empty_and_cut_ones_among_them(tmp_path):
    first, second, third = jobs(tmp_path)
    whole = second.read_text()
    second.write_text(whole[: whole.index("{", len(whole) // 2)].rstrip().rstrip(","))
    none = write(tmp_path / "none.json", text(FLAT, []))
    found = both([none, first, second, third, none])
    assert any("truncated" in why for why in found[2].problems)


def test_one_file_twice(tmp_path):
    one, *_ = jobs(tmp_path)
    first, second = both([one, one])
    assert said(first) == said(second)


@pytest.mark.parametrize(
    "odd",
    [
        text(FLAT, [row("kernel", "k", 0, 7, 5, 1, {}) | {"ts": "5"}]),  # a stamp as text
        text(FLAT, [row("kernel", "k", 0, 7, 5, 2e12, {}), row("kernel", "k", 0, 7, 9, 1, {})]),
        text(FLAT, [row("kernel", "k", 0, 7, 0, 1, {}), row("kernel", "k", 0, 7, 9, 1, {})]),
        json.dumps(document(FLAT, [row("kernel", "k", 0, 7, 5, 1, {})]))[:-30] + "\x00" * 9,
        "no trace",
    ],
    ids=["text", "endless", "zero", "damaged", "none"],
)
def test_what_is_odd_is_left_to_the_reader_of_one(tmp_path, odd):
    paths = jobs(tmp_path)
    path = write(tmp_path / "odd.json", odd)
    assert read_together(find_sources([*paths, path])) is None
    both(paths)  # nothing of it is left


def test_without_a_compiled_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(_together, "library", lambda _: None)
    assert read_together(find_sources(jobs(tmp_path))) is None
