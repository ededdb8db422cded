"""What users reported of broken files: each is read right, or says why it is incomplete.

The expected figures are those of the intact file, which tests/corpus checks against other tools.
"""

import gzip
import json
import random
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.labs.kineto_files import START_US, Job, document, events, row, text, write

from kansoku.app.trace import breakdown
from kansoku.errors import InputError
from kansoku.formats.kineto._events import decode
from kansoku.formats.kineto._scan import Piece

JOB = Job()
FIGURES = (
    "span_us",
    "busy_us",
    "idle_us",
    "compute_us",
    "comm_us",
    "memory_us",
    "overlap_us",
    "exposed_comm_us",
)


def answer(path):
    return breakdown([path]).to_json()


def figures(result):
    return [result["ranks"][0][name] for name in FIGURES]


def steps(result):
    return {s["step"]: [s[name] for name in FIGURES] for s in result["steps"]}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    return answer(write(tmp_path_factory.mktemp("k") / "intact.json", text(JOB)))


@pytest.fixture
def same(tmp_path, intact):
    """Check that a file's content gives the intact figures, and what it says of itself."""

    def check(content, *, incomplete=(), name="t.json"):
        result = answer(write(tmp_path / name, content))
        assert figures(result) == figures(intact)
        assert steps(result) == steps(intact)
        said = result["ranks"][0]["incomplete"]
        assert len(said) == len(incomplete), said
        for why, wanted in zip(said, incomplete, strict=True):
            assert wanted in why
        return result

    return check


def test_intact_figures_by_hand(intact):
    # 3 steps of 36 kernels of 10.001 µs, 12 all-reduces of 30.5 µs of which 20 … see Job; comm:
    # a step has 4 of 30.5 µs apart by 200 µs; each overlaps the next step's first kernel 16.5 µs
    # after its own start only at step edges, where a copy of 5 µs follows.
    row_ = intact["ranks"][0]
    assert row_["comm_us"] == 12 * 30.5
    assert row_["compute_us"] == pytest.approx(108 * 10.001)
    assert row_["memory_us"] == 15.0
    # An all-reduce runs from 6 to 36.5, the next kernel from 26 to 36.001 (9 of 12 in a step's
    # middle), or from 36 to 46.001 after the copy (2 at step edges), or nothing follows (the last).
    assert row_["overlap_us"] == pytest.approx(9 * 10.001 + 2 * 0.5)
    assert row_["incomplete"] == []


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_any_layout(same, indent):
    same(text(JOB, indent=indent))


def test_compact_without_any_space(same):
    same(json.dumps(document(JOB), separators=(",", ":")))


def test_sorted_keys(same):
    same(json.dumps(document(JOB), sort_keys=True))


def test_gzip(same):
    same(gzip.compress(text(JOB).encode()), name="t.json.gz")


def test_gzip_without_the_suffix_and_in_two_members(same):
    half = len(text(JOB)) // 2
    data = text(JOB).encode()
    same(gzip.compress(data[:half]) + gzip.compress(data[half:]), name="t.json")


def test_bare_array(same):
    result = same(json.dumps(events(JOB)), incomplete=["rank unknown"])
    assert result["ranks"][0]["rank"] is None


def test_bare_array_of_a_named_rank_and_never_closed(same):
    same(json.dumps(events(JOB))[:-1], name="rank5.json")


def test_metadata_after_the_events(same):
    whole = document(JOB)
    moved = {"traceEvents": whole.pop("traceEvents"), **whole}
    assert same(json.dumps(moved, indent=2))["ranks"][0]["rank"] == 0


def test_byte_order_mark(same):
    same(b"\xef\xbb\xbf" + text(JOB).encode())


def test_windows_line_ends(same):
    same(text(JOB).replace("\n", "\r\n"))


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "nan", "-inf", "1.#IND"])
def test_bare_not_a_number(same, word):
    same(text(JOB).replace('"cbid": 211', f'"cbid": {word}'))


def test_a_string_that_only_looks_like_it_is_kept(tmp_path):
    rows = events(JOB)
    rows.append(row("kernel", "loss: NaN, bad", 0, 7, START_US + 5, 1.0, {"x": 1}))
    broken = text(JOB, rows).replace('"cbid": 211', '"cbid": NaN')
    result = answer(write(tmp_path / "t.json", broken))
    assert "loss: NaN, bad" in [k["name"] for k in result["kernels"]]


def test_invalid_utf8(same):
    same(text(JOB).encode().replace(b"aten::op3", b"aten::\xff\xfe\xc3op3"))


def test_invalid_utf8_in_a_kernel_name(same):
    same(text(JOB).encode().replace(b"native::kernel_3", b"native::k\xffrnel_3"))


def test_control_bytes(same):
    same(text(JOB).replace("aten::op3", "aten::\x01\x00op\x1f3"))


def test_line_feed_inside_a_name(same):
    same(text(JOB).replace("native::kernel_2", "native::\nkernel_2"))


def test_unescaped_quotes(same):
    same(text(JOB).replace("native::kernel_2<float", 'native::"kernel"_2<float'))


def test_unescaped_quotes_with_commas(same):
    same(text(JOB).replace("aten::op3", 'say "hello", friend'))


def test_unescaped_backslashes(same):
    same(text(JOB).replace("native::kernel_2", r"C:\work\users\kernel_2"))


def test_lone_surrogate(same):
    same(text(JOB).replace("aten::op3", r"aten::\ud800op3"))


def test_comma_decimals(same):
    same(re.sub(r'("(?:ts|dur)": \d+)\.(\d+)', r"\1,\2", text(JOB)))


def test_comma_decimals_in_text(same):
    same(re.sub(r'("(?:ts|dur)": )(\d+)\.(\d+)', r'\1"\2,\3"', text(JOB)))


def test_stamps_as_text(same):
    same(re.sub(r'("(?:ts|dur)": )([\d.]+)', r'\1"\2"', text(JOB)))


def test_duplicate_keys(same):
    same(
        text(JOB)
        .replace('"cbid": 211', '"cbid": 211, "cbid": 212')
        .replace('"ph": "X",', '"ph": "X", "ph": "X",')
    )


def test_duplicate_stamp_last_wins(same):
    same(re.sub(r'("dur": )([\d.]+)', r'"dur": 99999, \1\2', text(JOB)))


@pytest.mark.parametrize("wide", [2**64 - 1, 2**63, -(2**63) - 5, 10**30])
def test_ids_beyond_64_bits(same, wide):
    rows = events(JOB)
    for event in rows:
        if "correlation" in event.get("args", {}):
            event["args"]["correlation"] += wide
    result = same(text(JOB, rows))
    assert result["launches"][0]["rows"] == 120


def test_negative_durations_are_set_aside(same):
    rows = events(JOB)
    rows += [row("kernel", "k", 0, 7, START_US + 100 * n, -3.0, {}) for n in range(4)]
    same(text(JOB, rows), incomplete=["4 slices set aside: negative duration"])


def test_zero_stamps_are_set_aside(same):
    rows = events(JOB)
    rows += [row("kernel", "k", 0, 7, 0, 3.0, {}) for _ in range(2)]
    same(text(JOB, rows), incomplete=["2 slices set aside: stamp of zero"])


def test_a_trace_that_begins_at_zero_is_whole(tmp_path):
    rows = events(JOB)
    for event in rows:
        event["ts"] = round(event["ts"] - START_US, 3)
    result = answer(write(tmp_path / "t.json", text(JOB, rows)))
    assert result["ranks"][0]["incomplete"] == []


@pytest.mark.parametrize("stamp", ['""', "null", '"soon"', "[]", "1e999"])
def test_unreadable_stamps(same, stamp):
    extra = text(JOB).rstrip().removesuffix("}").rstrip()
    bad = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": S, "dur": 5},'
    bad = bad.replace("S", stamp)
    content = extra.replace('"traceEvents": [', '"traceEvents": [' + bad, 1) + "}"
    same(content, incomplete=["1 slices set aside: no readable stamp"])


def test_slices_without_duration(same):
    rows = events(JOB)
    rows.insert(
        7, {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": START_US + 1}
    )
    same(text(JOB, rows), incomplete=["no readable stamp"])


def test_odd_types_everywhere(same):
    rows = events(JOB)
    rows += [
        {"ph": "X", "cat": None, "name": None, "ts": START_US, "dur": 1},
        {
            "ph": "X",
            "cat": 7,
            "name": 3,
            "pid": [1],
            "tid": {},
            "ts": START_US,
            "dur": 1,
            "args": [],
        },
        {"ph": "X", "cat": "cpu_op", "name": 12, "ts": START_US + 1, "dur": 1, "args": "x"},
        {"ph": "Q", "name": "unknown type", "ts": START_US},
        {"ph": 5, "ts": 1},
    ]
    # The category and the two types say not what those are: a kernel may be among them.
    same(text(JOB, rows), incomplete=["3 damaged stretches"])


@pytest.mark.parametrize(("key", "value"), [("ph", 5), ("ph", "Y"), ("cat", 7), ("cat", [])])
def test_a_kernel_that_does_not_say_what_it_is_is_missed(tmp_path, intact, key, value):
    rows = events(JOB)
    place = next(n for n, one in enumerate(rows) if one.get("cat") == "kernel")
    rows[place] = {**rows[place], key: value}
    result = answer(write(tmp_path / "t.json", text(JOB, rows)))
    assert figures(result) != figures(intact)
    assert result["ranks"][0]["incomplete"][0].startswith("1 damaged stretches")
    changed = [s for s, row in steps(result).items() if row != steps(intact)[s]]
    assert changed == [min(steps(intact))]


def test_overlapping_slices_count_once(tmp_path):
    rows = [
        row("kernel", "a", 0, 7, 1000.0, 10.0, {}),
        row("kernel", "b", 0, 7, 1005.0, 10.0, {}),
        row("kernel", "a", 0, 8, 1000.0, 30.0, {}),
        row("kernel", "a", 0, 8, 1050.0, 0.0, {}),
    ]
    result = answer(write(tmp_path / "t.json", text(Job(base=False), rows)))
    assert figures(result)[:4] == [50.0, 30.0, 20.0, 30.0]
    idle = result["idle"][0]
    assert idle["host_bound_us"] + idle["kernel_wait_us"] + idle["other_us"] == 20.0


def test_missing_commas_between_events(same):
    same(re.sub(r"\}\s*,\s*\{\s*\"ph\"", '} {"ph"', text(JOB), count=5))


def test_truncated_at_an_event(tmp_path, intact):
    whole = text(JOB)
    cut = whole[: whole.index('"ProfilerStep#7"')]
    result = answer(write(tmp_path / "t.json", cut))
    said = result["ranks"][0]["incomplete"]
    assert any("truncated" in why for why in said)
    kept = steps(result)
    assert kept == {number: row_ for number, row_ in steps(intact).items() if number in kept}
    assert set(kept) == {5, 6}


def test_truncated_gzip(tmp_path):
    data = gzip.compress(text(JOB).encode())
    result = answer(write(tmp_path / "t.json.gz", data[: len(data) // 2]))
    assert any("truncated" in why for why in result["ranks"][0]["incomplete"])
    assert result["ranks"][0]["busy_us"] > 0


def test_damaged_gzip(tmp_path):
    data = bytearray(gzip.compress(text(Job(kernels=400)).encode(), 1))
    data[len(data) // 2] ^= 0xFF
    result = answer(write(tmp_path / "t.json.gz", bytes(data)))
    assert result["ranks"][0]["incomplete"]
    assert result["ranks"][0]["busy_us"] > 0


def test_beginning_lost_but_for_a_bracket(tmp_path, intact):
    whole = text(JOB).replace('"traceEvents": [', "", 1)
    result = answer(write(tmp_path / "x.json", ("]" + whole).encode()))
    calls = [sum(k["calls"] for k in of["kernels"]) for of in (intact, result)]
    assert calls[1] >= calls[0] - 1


def test_beginning_lost(tmp_path):
    whole = text(JOB)
    result = answer(write(tmp_path / "t.json", whole[whole.index("aten::op3") :]))
    assert any("beginning" in why for why in result["ranks"][0]["incomplete"])
    assert result["ranks"][0]["busy_us"] > 0


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"hello", b"\x00" * 5000, b'{"a": [1, 2]}', b"[1, 2, 3"]
)
def test_no_trace_at_all(tmp_path, content):
    path = write(tmp_path / "t.json", content)
    if content.startswith(b"["):
        assert answer(path)["ranks"][0]["busy_us"] is None
        return
    with pytest.raises(InputError, match=r"t\.json"):
        breakdown([path])


def test_empty_array(tmp_path):
    result = answer(write(tmp_path / "t.json", '{"traceEvents": []}'))
    assert result["ranks"][0]["span_us"] is None
    assert any("no GPU rows" in why for why in result["ranks"][0]["incomplete"])


def _offsets(whole: str) -> tuple[int, int]:
    """Return where the events of step 6 lie in the file."""
    return whole.index('"ProfilerStep#5"') + 200, whole.index('"ProfilerStep#6"') - 200


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "junk",
    [
        "",
        "\x00\x00\x00",
        '"',
        "{",
        "}",
        "[",
        "]",
        "\\",
        '{"ph": "X", "na',
        "}}]]",
        ',"a":[',
        "\xff\xfe",
    ],
)
def test_a_damaged_stretch_costs_only_itself(tmp_path, intact, junk, indent):
    whole = text(JOB, indent=indent)
    low, high = _offsets(whole)
    random.seed(3)
    for trial in range(8):
        start = random.randrange(low, high)
        length = random.choice([1, 7, 90, 400])
        broken = whole[:start] + junk + whole[min(start + length, high) :]
        result = answer(write(tmp_path / f"{trial}.json", broken.encode("latin-1")))
        kept = steps(result)
        for step in (5, 7):
            assert kept[step] == steps(intact)[step], (trial, start, length)
        lost = sum(k["calls"] for k in intact["kernels"]) - sum(
            k["calls"] for k in result["kernels"]
        )
        assert lost <= 5


def test_an_end_before_the_first_event_ends_nothing(tmp_path, intact):
    whole = text(JOB).replace('"traceEvents": [', '"traceEvents": []', 1)
    assert whole != text(JOB)
    result = answer(write(tmp_path / "x.json", whole.encode()))
    assert sum(k["calls"] for k in result["kernels"]) == sum(k["calls"] for k in intact["kernels"])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_bytes_anywhere_never_crash(tmp_path, intact, data):
    whole = bytearray(text(JOB).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        junk = data.draw(st.binary(min_size=0, max_size=12))
        whole[place : place + data.draw(st.integers(0, 30))] = junk
    try:
        result = answer(write(tmp_path / "x.json", bytes(whole)))
    except InputError:
        return
    total = sum(k["calls"] for k in intact["kernels"])
    assert sum(k["calls"] for k in result["kernels"]) >= total * 0.9
    for r in result["ranks"]:
        assert all(r[name] is None or r[name] >= 0 for name in FIGURES)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_order_of_events_never_matters(tmp_path, intact, seed):
    rows = events(JOB)
    random.Random(seed).shuffle(rows)
    result = answer(write(tmp_path / "x.json", text(JOB, rows)))
    for key in (
        "ranks",
        "steps",
        "kernels",
        "collectives",
        "idle",
        "launches",
        "queues",
        "annotations",
    ):
        one, other = result[key], intact[key]
        for item in (*one, *other):
            item.pop("file", None)
        assert one == other, key


def test_slices_longer_than_ten_days_are_set_aside(same):
    rows = events(JOB)
    rows += [row("kernel", "k", 0, 7, START_US, 1e15, {}) for _ in range(100)]
    same(text(JOB, rows), incomplete=["100 slices set aside: longer than ten days"])


def test_sizes_beyond_64_bits_are_unknown(tmp_path):
    arguments = {"Collective name": "allreduce", "In msg nelems": 10**30, "Out msg nelems": 10**30,
                 "Group size": 10**25, "dtype": "Float", "Seq": 2**70}  # fmt: skip
    rows = [row("kernel", "ncclDevKernel_AllReduce", 0, 7, START_US, 5.0, arguments)]
    (found,) = answer(write(tmp_path / "t.json", text(JOB, rows)))["collectives"]
    assert [found[key] for key in ("op", "bytes", "group_size", "seq")] == [
        "all_reduce", None, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "name", "rank"),
    [(5 * 10**12, "t.json", None), (5 * 10**12, "rank3.json", 3), (None, "rank16941282015450.json", None)],
)  # fmt: skip
def test_a_rank_that_no_job_has_is_none(tmp_path, said, name, rank):
    content = json.dumps({"distributedInfo": {"rank": said}, "traceEvents": events(JOB)})
    assert answer(write(tmp_path / name, content))["ranks"][0]["rank"] == rank


def test_steps_of_more_than_nine_digits_are_no_steps(tmp_path):
    rows = [
        {**one, "name": f"ProfilerStep#{10**30}"} if "ProfilerStep" in str(one["name"]) else one
        for one in events(JOB)
    ]
    found = answer(write(tmp_path / "t.json", text(JOB, rows)))["steps"]
    assert [(one["step"], one["source"]) for one in found] == [(None, "window")]


def test_a_stretch_of_spaces_costs_no_time_of_its_own():
    # As a small file may inflate to: lines of ours that ran are counted, not seconds.
    piece = Piece(kind="events", data=b" ," * (1 << 20), offset=0)
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "line"
        return count

    sys.settrace(count)
    try:
        assert decode(piece).events == []
    finally:
        sys.settrace(None)
    assert calls < 1000
