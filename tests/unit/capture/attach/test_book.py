"""Calls become spans: by hand, without a kernel."""

import mmap

import polars as pl
import pytest

from kansoku.capture.attach.book import Book, Call
from kansoku.capture.attach.probes import PROBES
from kansoku.formats.run_directory import read_run
from kansoku.model import ring

MAIN, WORKER = 100, 101


def probe(role, name=""):
    return next(p for p in PROBES if p.role == role and (not name or p.name == name))


class Story:
    """A process whose calls are told one after the other, in microseconds."""

    def __init__(self, tmp_path, *, late=False):
        self.path = tmp_path / "n-1.ring"
        with self.path.open("w+b") as stream:
            stream.truncate(1 << 20)
            self.buffer = mmap.mmap(stream.fileno(), 1 << 20)
        ring.format_ring(self.buffer, pid=1, process_start=1, anchor=(0, 1), lane_shares=(1,))
        self.book = Book(ring.RingWriter(self.buffer), peak_rss=lambda: 7 << 20)
        if late:
            self.book.place.at_work()
        self.now = 0

    def call(self, role, after=10, *, thread=MAIN, stack=5000, this=1, name="", **more):
        self.now += after
        self.book.see(
            Call(
                probe=probe(role, name),
                time_ns=self.now * 1000,
                thread=thread,
                leads=thread == MAIN,
                stack=stack,
                this=this,
                **more,
            )
        )

    def mark(self, text, after=10):
        self.call("mark", after, text=text)

    def end_mark(self, after=10):
        self.call("mark_end", after, returned=True)

    def backward(self, after=100):
        self.call("backward", stack=3000)
        self.call("backward", after, stack=3008, returned=True)

    def update(self, name="SGD"):
        self.mark(f"Optimizer.step#{name}.step")
        self.end_mark()

    def spans(self, kind=None):
        self.book.finish(self.now * 1000)
        spans = read_run(self.path).spans
        return spans if kind is None else spans.filter(pl.col("kind") == kind)


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path)


def times(frame):
    return [(s // 1000, d // 1000) for s, d in frame.select("start_ns", "duration_ns").rows()]


def test_a_step_of_ddp(story):
    story.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")  # 10
    story.end_mark()  # 20
    story.mark("DistributedDataParallel.forward")  # 30
    story.call("forward_trains")
    story.end_mark()  # 50
    story.call("backward", stack=3000)  # 60
    story.call("collective", name="all_reduce", group="0", bytes=400)  # 70
    story.call("work", this=9, number=5)
    story.call("finalize", 20)  # 100
    story.call("work_done", 30, thread=WORKER, this=9)  # 130
    story.call("backward", 10, stack=3008, returned=True)  # 140
    story.update()  # 150 to 160
    story.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    spans = story.spans()
    first = spans.filter(pl.col("step") == 0)
    told = {k: (s, d) for k, (s, d) in zip(first["kind"], times(first), strict=True)}
    assert told == {
        "step": (10, 150),
        "data_wait": (10, 10),
        "forward": (30, 20),
        "backward": (60, 80),
        "collective": (70, 60),
        "collective_wait": (100, 30),
        "optimizer": (150, 10),
    }
    collective = first.filter(pl.col("kind") == "collective").to_dicts()[0]
    assert (collective["sequence"], collective["bytes"], collective["group"]) == (4, 400, "0")
    assert times(spans.filter(pl.col("step") == 1))[0][0] == 160  # where the step before ended


def test_a_forward_that_nothing_follows_is_an_evaluation(story):
    for _ in range(2):
        story.mark("DistributedDataParallel.forward")
        story.end_mark()
    story.backward()  # accumulated without synchronisation: no reducer told us
    kinds = story.spans()["kind"].to_list()
    assert kinds == ["step", "evaluation", "forward", "backward"]


def test_updates_that_follow_each_other_are_one_step(story):
    for _ in range(3):
        story.backward()
        story.update("SGD")
        story.update("AdamW")
    steps = story.spans("step")
    assert steps["duration_ns"].null_count() == 0
    assert [a is None for a in steps["attributes"]] == [True] * 3


def test_without_ddp_the_forward_lasts_until_the_backward(story):
    story.mark("enumerate(DataLoader)#x")  # 10
    story.end_mark()  # 20
    story.backward()  # 30
    forward = story.spans("forward")
    assert times(forward) == [(20, 10)]
    assert "derived" in forward["attributes"][0]


def test_one_collective_made_of_several_works(story):
    story.backward()
    story.call("collective", name="reduce_scatter", group="0", bytes=8)
    story.call("work", this=1, number=1)
    story.call("work_done", thread=WORKER, this=1)  # before the second is made
    story.call("work", this=2, number=2)
    story.call("wait", this=2)
    story.call("work_done", 50, thread=WORKER, this=2)
    (collective,) = story.spans("collective").to_dicts()
    assert collective["duration_ns"] == 90_000


def test_a_subclass_that_calls_the_class_above_is_one_update(story):
    story.mark("Optimizer.step#Mine.step")
    story.mark("Optimizer.step#SGD.step")
    story.end_mark()
    story.end_mark()
    assert story.spans("optimizer")["name"].to_list() == ["Mine"]


def test_an_end_seen_twice_ends_one_mark(story):
    story.mark("Optimizer.step#SGD.step")
    story.mark("something")
    story.call("mark_end", stack=4000)  # by its entry
    story.call("mark_end", 0, stack=4008, returned=True)  # and where it returns to
    story.call("mark_end", 20, stack=4008, returned=True)  # 50: another one, soon after
    story.mark("something else", 100)
    assert times(story.spans("optimizer")) == [(10, 40)]


def test_a_backward_whose_return_is_not_watched_yet_ends_with_the_next_phase(story):
    story.call("backward", stack=3000, blind=True)
    story.update()
    assert times(story.spans("backward")) == [(10, 10)]
    assert len(story.spans("step")) == 1


def test_pairs_are_counted_only_from_a_groups_birth(story):
    story.book.born("7")
    for group in ("7", "8"):
        for work in (1, 2):
            story.call("collective", name="send", group=group, bytes=4, peer=3)
            story.call("work", this=work, number=9)
            story.call("work_done", this=work)
    assert story.spans("collective")["sequence"].to_list() == [0, 1, None, None]


def test_what_is_open_when_a_process_is_killed_stays_open(story):
    story.backward()
    story.update()
    story.call("backward", stack=3000)
    story.call("collective", name="all_reduce", group="0", bytes=4)
    story.call("work", this=1, number=1)
    story.book.stop()
    spans = read_run(story.path).spans
    assert spans.filter(pl.col("duration_ns").is_null())["kind"].to_list() == [
        "step", "backward", "collective",
    ]  # fmt: skip


def reduce(story, number):
    story.call("collective", name="all_reduce", group="0", bytes=4)
    story.call("work", this=1, number=number)
    story.call("wait", this=1)
    story.call("work_done", this=1)


def test_a_rank_at_work_counts_from_its_second_update(tmp_path):
    """The first one said only where whole steps begin."""
    story = Story(tmp_path, late=True)
    for number in range(1, 5):
        story.backward()
        reduce(story, number)
        story.update()
    spans = story.spans()
    steps = {kind: spans.filter(pl.col("kind") == kind)["step"].to_list() for kind in KINDS}
    assert steps == {
        "collective": [None, None, 0, 1],
        "backward": [None, None, 0, 1],
        "optimizer": [None, None, 0, 1],
        "step": [0, 1],
    }


KINDS = ("collective", "backward", "optimizer", "step")


def test_ranks_that_agree_after_the_last_update_begin_no_step(story):
    """A loss or a flag is reduced after each update: of three steps, no fourth is begun."""
    for number in range(1, 4):
        story.backward()
        story.update()
        reduce(story, number)
    spans = story.spans()
    assert spans.filter(pl.col("kind") == "step")["step"].to_list() == [0, 1, 2]
    # They stand in the step that follows, of which the last was not begun.
    assert spans.filter(pl.col("kind") == "collective")["step"].to_list() == [1, 2, 3]
    assert spans.filter(pl.col("kind") == "collective_wait")["step"].to_list() == [1, 2, 3]


def inner_update(story, number):
    """An update inside a backward, after its gradient was reduced."""
    reduce(story, number)
    story.update()


@pytest.mark.parametrize("blind", [False, True], ids=["", "first-end-unseen"])
def test_updates_inside_a_backward_end_the_step_with_it(story, blind):
    """One optimizer a parameter, as in the recorder inside the process: three backwards, three steps."""
    for step in range(3):
        story.call("backward", stack=3000, blind=blind and step == 0)
        inner_update(story, 2 * step + 1)
        inner_update(story, 2 * step + 2)
        if step or not blind:
            story.call("backward", 30, stack=3008, returned=True)
    story.mark("enumerate(DataLoader)#x")
    spans = story.spans()
    whole = spans.filter((pl.col("kind") == "step") & (pl.col("step") < 3))
    backward = spans.filter(pl.col("kind") == "backward")
    assert whole["step"].to_list() == backward["step"].to_list() == [0, 1, 2]
    ends = whole["start_ns"] + whole["duration_ns"]
    assert (
        ends.to_list()[blind:]
        == ((backward["start_ns"] + backward["duration_ns"]).to_list()[blind:])
    )
    for kind in ("optimizer", "collective"):
        assert spans.filter(pl.col("kind") == kind)["step"].to_list() == [0, 0, 1, 1, 2, 2]


def test_a_rank_at_work_that_updates_inside_its_backwards_counts_too(tmp_path):
    story = Story(tmp_path, late=True)
    for step in range(4):
        story.call("backward", stack=3000)
        inner_update(story, 2 * step + 1)
        inner_update(story, 2 * step + 2)
        story.call("backward", 30, stack=3008, returned=True)
    spans = story.spans()
    steps = {kind: spans.filter(pl.col("kind") == kind)["step"].to_list() for kind in KINDS}
    assert steps == {
        "collective": [None] * 4 + [0, 0, 1, 1],
        "optimizer": [None] * 4 + [0, 0, 1, 1],
        "backward": [None, None, 0, 1],
        "step": [0, 1],
    }


def test_what_is_reduced_between_two_updates_stands_in_their_step(story):
    """The second optimizer's gradients are clipped by their norm over all ranks."""
    for number in (1, 3):
        story.backward()
        story.update("SGD")
        reduce(story, number)
        story.update("AdamW")
        reduce(story, number + 1)  # the loss
    story.backward()
    spans = story.spans()
    assert spans.filter(pl.col("kind") == "step")["step"].to_list() == [0, 1, 2]
    for kind in ("collective", "collective_wait"):
        assert spans.filter(pl.col("kind") == kind)["step"].to_list() == [0, 1, 1, 2]


def test_the_first_backward_of_a_process_says_that_it_is_new(tmp_path):
    """Found while torch was being imported: its steps count from the first one on."""
    story = Story(tmp_path, late=True)
    for step in range(3):
        story.mark("enumerate(DataLoader)#x")
        story.end_mark()
        story.call("backward", stack=3000)
        if step == 0:
            story.call("first_backward", stack=2000)
        story.call("backward", stack=3008, returned=True)
        story.update()
    spans = story.spans()
    assert spans.filter(pl.col("kind") == "data_wait")["step"].to_list() == [0, 1, 2]
    steps = spans.filter(pl.col("kind") == "step")
    assert steps["step"].to_list() == [0, 1, 2]
    assert times(steps)[0][0] == 10  # with what came before that backward


def test_backwards_without_an_update_are_told(story):
    for _ in range(2):
        story.backward()
    assert story.book.unseen() == ""  # gradients may be accumulated
    story.backward()
    assert "no update by a torch optimizer" in story.book.unseen()
    story.update()
    assert story.book.unseen() == ""


def test_updates_without_numbers_are_told(tmp_path):
    """One rank of three: operations of a pair of them make the group's numbers useless."""
    story = Story(tmp_path, late=True)
    story.book.place.mixes("0")
    story.backward()
    story.update()
    assert "third update" in story.book.unseen()
    for number in range(1, 5):
        story.backward(1_000_000)
        reduce(story, number)
        story.update()
    story.book.finish(story.now * 1000)
    assert "no collective told which of its steps is which within the 4.0 s" in story.book.unseen()
    story.backward(2_000_000)
    story.update()
    story.book.finish(story.now * 1000)
    assert story.book.unseen() == ""  # numbered by time


def test_a_hang_before_it_is_known_whether_the_process_is_new_is_seen_while_it_lasts(tmp_path):
    story = Story(tmp_path, late=True)
    story.mark("DistributedDataParallel.forward")
    story.call("collective", name="broadcast", group="0", bytes=8)
    story.call("work", this=9, number=1)
    for seconds in (1, 6):
        assert read_run(story.path).spans.height == 0
        story.book.idle((story.now + seconds * 1_000_000) * 1000)
    held = read_run(story.path).spans.filter(pl.col("duration_ns").is_null())
    assert sorted(held["kind"]) == ["collective", "forward"]
