"""A file of realistic size with damage drawn at random: what is intact is used, and stays right.

Every event is known, and so is every one that the damage touched; the rest must come out as if
nothing had happened.
"""

import json
import random

import numpy as np
import pytest
from tests.labs.kineto_files import Job, document, events, write

from kansoku.app.trace import breakdown
from kansoku.catalog.kernels import RowKind
from kansoku.formats.kineto import find_sources, read_trace

JOB = Job(steps=40, kernels=200)
EVENTS = events(JOB)
TEXTS = [json.dumps(event) for event in EVENTS]
DAMAGED_STEPS, DAMAGED_EVENTS = 8, 10
SEEDS = 3
FIGURES = ("span_us", "busy_us", "idle_us", "compute_us", "comm_us", "memory_us", "overlap_us",
           "exposed_comm_us")  # fmt: skip


def cut(text, rng):
    return text[: rng.randrange(1, len(text))]


def hole(text, rng):
    start = rng.randrange(len(text))
    return text[:start] + text[start + rng.randrange(1, 40) :]


def overwritten(text, rng):
    start, length = rng.randrange(len(text)), rng.randrange(1, 60)
    junk = "".join(chr(rng.randrange(256)) for _ in range(length))
    return text[:start] + junk + text[start + length :]


def punctuation(text, rng):
    start = rng.randrange(len(text))
    return text[:start] + rng.choice(['"', "{", "}", "[", "]", "\\", '",', "}}]", '{"a":']) + (
        text[start:]
    )  # fmt: skip


def doubled(text, rng):
    """A writer that began again in the middle."""
    return text[: rng.randrange(1, len(text))] + text


def zeroed(text, rng):
    start, length = rng.randrange(len(text)), rng.randrange(1, 80)
    return text[:start] + "\0" * len(text[start : start + length]) + text[start + length :]


KINDS = (cut, hole, overwritten, punctuation, doubled, zeroed)


def damaged(seed):
    """Return the file, the numbers of the events touched, and the steps these may change."""
    rng = random.Random(seed)
    per_step = len(EVENTS) // JOB.steps
    touched = [
        step * per_step + place
        for step in rng.sample(range(JOB.steps), DAMAGED_STEPS)
        for place in rng.sample(range(per_step), DAMAGED_EVENTS)
    ]
    texts = list(TEXTS)
    for place in touched:
        texts[place] = _broken(TEXTS[place], rng)
    head = json.dumps(document(JOB, []))
    before, after = head.split('"traceEvents": []')
    whole = f'{before}"traceEvents": [{", ".join(texts)}]{after}'
    # The last row of a step runs on into the next one's window.
    steps = {step for place in touched for step in (_step(place), _step(place) + 1)}
    return whole.encode("latin-1"), set(touched), steps


def _broken(text, rng):
    """Damage an event until no reader could take it for another one with other times."""
    while True:
        found = rng.choice(KINDS)(text, rng)
        try:
            event = json.loads(found, strict=False)
        except ValueError:
            return found
        if isinstance(event, dict) and all(
            event.get(key) == json.loads(text).get(key) for key in ("ph", "cat", "ts", "dur")
        ):
            return found


def _step(place):
    return 5 + place // (len(EVENTS) // JOB.steps)


def device_rows(trace):
    chosen = trace.of(RowKind.COMPUTE, RowKind.COLLECTIVE, RowKind.MEMCPY)
    start, duration = (trace.columns[name][chosen] for name in ("start_ns", "duration_ns"))
    names = [trace.names[code] for code in trace.columns["name"][chosen].tolist()]
    return set(zip(names, start.tolist(), duration.tolist(), strict=True))


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("k") / "t.json", json.dumps(document(JOB)))
    return breakdown([path]).to_json()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_intact_rows_are_used_and_undamaged_steps_unchanged(tmp_path, intact, seed):
    content, touched, steps = damaged(seed)
    path = write(tmp_path / "t.json", content)
    trace = read_trace(find_sources([path])[0])
    whole = [event for place, event in enumerate(EVENTS) if place not in touched]
    assert len(EVENTS) > 20_000
    assert trace.rows >= 0.99 * len(whole)
    assert trace.slices >= 0.99 * sum(event["ph"] == "X" for event in whole)
    wanted = {
        (e["name"], round(e["ts"] * 1000), round(e["dur"] * 1000))
        for e in whole
        if e.get("cat") in {"kernel", "gpu_memcpy"}
    }
    assert len(wanted & device_rows(trace)) >= 0.99 * len(wanted)

    result = breakdown([path]).to_json()
    figures = {row["step"]: row for row in intact["steps"]}
    compared = 0
    for row in result["steps"]:
        if row["step"] not in steps and row["step"] in figures:
            assert row == figures[row["step"]]
            compared += 1
    assert compared == len(figures.keys() - steps) >= JOB.steps - 2 * DAMAGED_STEPS
    (rank,) = result["ranks"]
    assert rank["incomplete"]
    assert all(rank[name] >= 0 for name in FIGURES)
    assert all(row[name] >= 0 for row in result["steps"] for name in FIGURES)


def test_damage_reads_the_same_in_any_order(tmp_path):
    """The stretches stay what they are; only their order in the file changes."""
    rng = random.Random(7)
    texts = [text if rng.random() > 0.002 else cut(text, rng) for text in TEXTS[:6000]]
    answers = []
    for trial in range(2):
        body = ",\n".join(texts)
        path = write(tmp_path / f"rank{trial}.json", f"[{body}]")
        trace = read_trace(find_sources([path])[0])
        answers.append((trace.rows, {n: np.sort(c).tolist() for n, c in trace.columns.items()
                                     if n.endswith("_ns")}))  # fmt: skip
        rng.shuffle(texts)
    assert answers[0] == answers[1]
