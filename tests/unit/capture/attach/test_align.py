"""Trainings of several ranks, each heard from any position on: the same number is the same step."""

import itertools
import random

import pytest

from kansoku.capture.attach.align import BY_TIME, Alignment
from kansoku.capture.attach.book import Book, Call
from kansoku.capture.attach.probes import PROBES
from kansoku.model import ring

MAIN = 100
MILLISECOND = 1_000_000
STEP = ring.KIND_CODES["step"]
PROBE = {probe.role: probe for probe in PROBES}
REDUCE = next(p for p in PROBES if p.role == "collective" and p.name == "all_reduce")

# What a rank calls in a step; a word alone is a collective of the group of that name.
DATA, FORWARD, BACKWARD, END, UPDATE = "data", "forward", "backward", "end", "update"
FORMS = {
    "ddp": [DATA, FORWARD, BACKWARD, "0", "0", END, UPDATE],
    "the loss after the update": [DATA, FORWARD, BACKWARD, "0", END, UPDATE, "0"],
    "only after the update": [DATA, BACKWARD, END, UPDATE, "0"],
    "no loader": [BACKWARD, "0", END, UPDATE],
    "accumulated": [DATA, BACKWARD, END, DATA, BACKWARD, "0", END, UPDATE],
    "two optimizers": [DATA, BACKWARD, "0", END, UPDATE, UPDATE],
    "by turns": [DATA, BACKWARD, "0", END, UPDATE, BACKWARD, "0", END, UPDATE],
    "sharded": ["0", FORWARD, BACKWARD, "0", "0", END, "0", UPDATE],
}
MESH = [DATA, "tp", FORWARD, BACKWARD, "tp", "dp", END, UPDATE]
SILENT = [DATA, BACKWARD, END, UPDATE]


class Unwritten:
    """A ring that keeps only how many steps were closed."""

    steps = 0

    def set_count(self, kind, count, _):
        if kind == STEP:
            self.steps = count

    def __getattr__(self, _):
        return lambda *_, **__: 1


def calls_of(form):
    """Return how many calls of a rank are noted in one round of its form."""
    return sum({DATA: 2, FORWARD: 3, BACKWARD: 1, END: 1, UPDATE: 2}.get(word, 4) for word in form)


def told(form, steps):
    """Return [(word, step)]: what one rank calls, and in which step."""
    story, step, over = [], 0, False
    for word in form * steps:
        step += over and word != UPDATE
        over = word == UPDATE
        story.append((word, step))
    return story, step + over


class Rank:
    """One rank of a training; the observer does not hear its first ``cut`` calls."""

    def __init__(self, alignment, number, story, cut, *, born=False, group_of=lambda group: group):
        self.story, self.cut, self.group_of = story, cut, group_of
        self.at, self.issued, self.pending, self.calls = 0, {}, None, 0
        self.heard_at = None
        """Step of the first call that was heard."""
        self.unsure = []
        self.place = alignment.place(number, self.unsure.append)
        self.place.shared = True
        if not born:
            self.place.at_work()
        self.writer = Unwritten()
        self.book = Book(self.writer)
        self.book.place = self.place
        self.numbers = []
        """Step in truth, number in the record, of every backward that counts."""

    def hear(self, now, role, probe=None, **more):
        self.calls += 1
        if self.calls > self.cut:
            if self.heard_at is None:
                self.heard_at = self.story[self.at][1]
            call = {"thread": MAIN, "leads": True, "stack": 3000, "this": 1} | more
            self.book.see(Call(probe=probe or PROBE[role], time_ns=now, **call))

    def go_on(self, now, ranks):
        """Make the next call; False where it waits for other ranks."""
        word, step = self.story[self.at]
        if word == DATA:
            self.hear(now, "mark", text="enumerate(DataLoader)#x")
            self.hear(now, "mark_end", returned=True)
        elif word == FORWARD:
            self.hear(now, "mark", text="DistributedDataParallel.forward")
            self.hear(now, "forward_trains")
            self.hear(now, "mark_end", returned=True)
        elif word == BACKWARD:
            self.hear(now, "backward")
            if self.calls > self.cut and not self.book.late:
                self.numbers.append((step, self.book.step))
        elif word == END:
            self.hear(now, "backward", stack=3008, returned=True)
        elif word == UPDATE:
            self.hear(now, "mark", text="Optimizer.step#SGD.step")
            self.hear(now, "mark_end", returned=True)
        elif not self.reduce(now, self.group_of(word), ranks):
            return False
        self.at += 1
        return True

    def reduce(self, now, group, ranks):
        if self.pending is None:
            self.pending = self.issued[group] = self.issued.get(group, 0) + 1
            self.hear(now, "collective", REDUCE, group=group, bytes=4)
            self.hear(now, "work", number=self.pending)
            self.hear(now, "wait")
        members = [rank for rank in ranks if group in {rank.group_of(w) for w, _ in rank.story}]
        if any(rank.issued.get(group, 0) < self.pending for rank in members):
            return False
        self.hear(now, "work_done")
        self.pending = None
        return True


def train(ranks, seed, *, pace_ns=MILLISECOND):
    """Let the ranks go on in a random order until all are through."""
    dice, now = random.Random(seed), 0
    while waiting := [rank for rank in ranks if rank.at < len(rank.story)]:
        now += pace_ns
        dice.choice(waiting).go_on(now, ranks)
    for rank in ranks:
        rank.book.finish(now)


def check(ranks, steps, *, born=False):
    """The same step has the same number on all ranks, none is left out, none counted too much."""
    apart = {number - step for rank in ranks for step, number in rank.numbers}
    assert len(apart) == 1
    assert not born or apart == {0}
    for rank in ranks:
        first = rank.numbers[0][0]
        # The first update tells where whole steps begin, the next ones which step is which.
        assert first <= max(other.heard_at for other in ranks) + 3
        assert rank.writer.steps == steps - first
        assert rank.unsure == []


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_heard_from_any_position_on_number_steps_alike(form):
    story, steps = told(FORMS[form], 7)
    a_step = calls_of(FORMS[form])
    for seed, cuts in enumerate(itertools.product(range(a_step), range(2 * a_step))):
        alignment = Alignment()
        ranks = [Rank(alignment, number, story, cut) for number, cut in enumerate(cuts)]
        train(ranks, seed)
        check(ranks, steps)


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_was_there_before_its_training_gives_the_numbers(form):
    """One was watched before it made its group, the other after: the first step is 0 on both."""
    story, steps = told(FORMS[form], 7)
    for cut in range(calls_of(FORMS[form]) * 3):
        alignment = Alignment()
        ranks = [Rank(alignment, 0, story, 0, born=True), Rank(alignment, 1, story, cut)]
        train(ranks, cut)
        check(ranks, steps, born=True)


def test_ranks_of_a_mesh_share_no_group_but_by_others():
    """Ranks 0 and 3 of 2 x 2 make no collective together."""
    story, steps = told(MESH, 8)
    for seed in range(100):
        alignment = Alignment()
        cuts = random.Random(-seed).choices(range(2 * calls_of(MESH)), k=4)
        ranks = [
            Rank(
                alignment, n, story, cut,
                group_of=lambda g, n=n: g + str(n % 2 if g == "dp" else n // 2),
            )
            for n, cut in enumerate(cuts)
        ]  # fmt: skip
        train(ranks, seed)
        check(ranks, steps)


def test_a_new_group_in_the_middle_is_no_beginning():
    """Groups made by ranks that were heard training leave the numbers as they are."""
    story, steps = told(FORMS["ddp"], 7)
    for cuts in itertools.product(range(20), repeat=2):
        alignment = Alignment()
        ranks = [Rank(alignment, number, story, cut) for number, cut in enumerate(cuts)]
        for rank in ranks:
            rank.hear = with_group(rank, at=17)
        train(ranks, sum(cuts))
        check(ranks, steps)


def with_group(rank, at):
    hear = rank.hear

    def heard(now, role, *probe, **more):
        if rank.at == at:
            rank.book.begins()
        hear(now, role, *probe, **more)

    return heard


@pytest.mark.parametrize("cut", range(1, calls_of(SILENT)))
def test_a_process_that_trains_alone_counts_from_its_second_update(cut):
    story, steps = told(SILENT, 5)
    rank = Rank(Alignment(), 0, story, cut)
    rank.place.shared = False
    train([rank], 0)
    first = 2 if cut < calls_of(SILENT) - 1 else 3  # heard within its update, that one is not known
    assert rank.numbers == [(step, step - first) for step in range(first, steps)]
    assert rank.writer.steps == steps - first


def test_what_no_collective_tells_is_told_by_time_and_said():
    """Steps of two seconds, ranks 0.2 s apart: numbered by the nearest end of a step."""
    for first, second in itertools.product(range(8), repeat=2):
        alignment = Alignment()
        places, said, numbers = [], [[], []], [{}, {}]
        for number in range(2):
            places.append(alignment.place(number, said[number].append))
            places[number].at_work()
            places[number].shared = True
        for step in range(14):
            for number, cut in enumerate((first, second)):
                if step >= cut:
                    places[number].trains()
                    got = places[number].updates(
                        (10 + 2 * step) * 10**9 + number * 200 * MILLISECOND
                    )
                    if got is not None:
                        numbers[number][step] = got
        common = numbers[0].keys() & numbers[1].keys()
        assert len(common) >= 2
        assert all(numbers[0][step] == numbers[1][step] for step in common)
        assert said == [[BY_TIME], [BY_TIME]]


def test_point_to_point_operations_make_a_groups_numbers_useless():
    """They count too, and a rank in the middle of a pipeline makes more of them."""
    alignment = Alignment()
    places = [alignment.place(number) for number in range(2)]
    for place in places:
        place.at_work()
        place.mixes("0")
    for number, sequence in [(0, 1), (1, 2)] * 2:
        places[number].trains()
        places[number].collects("0", sequence)
        assert places[number].updates(0) is None


def test_an_ended_process_says_nothing_any_more():
    """One started again in its place begins its groups' sequences anew."""
    alignment = Alignment()
    old, new = alignment.place(1), alignment.place(2)
    for sequence in range(5):
        old.collects("0", sequence)
        old.updates(sequence)
    alignment.forget(1)
    new.at_work()
    for now in range(2):
        new.trains()
        new.collects("0", now + 2)
        number = new.updates(now)
    assert number == 0


def test_what_was_heard_before_the_first_update_tells_nothing():
    """Of a rank heard first within an update that end is missed: its count is one short there."""
    alignment = Alignment()
    other, late = alignment.place(1), alignment.place(2)
    other.collects("0", 5)
    late.at_work()
    late.shared = True
    late.collects("0", 5)  # by the optimizer; then comes the end that is not seen
    late.trains()
    late.updates(0)
    late.trains()
    assert late.updates(1) is None
