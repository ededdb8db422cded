"""Which checkpoint counts, and what would be lost: counted by hand."""

from kansoku.diagnose.checkpoints import Checkpoint, checkpoint_sentences, checkpoint_state

S = 1_000_000_000
T = 1_790_000_000 * S


def one(step, seconds, problem=None, **more):
    return Checkpoint(
        name=f"step_{step}", kind="torch", step=step, size_bytes=3 << 30, saved_ns=T + seconds * S,
        problem=problem, **more,
    )  # fmt: skip


def test_the_newest_whole_one_counts_and_broken_ones_after_it_are_told():
    found = [one(10, 100), one(30, 300, "cut off"), one(20, 200), one(5, 50, "cut off")]
    state = checkpoint_state(found, source="x", until_ns=T + 500 * S, step=44)
    assert state.last.step == 20
    assert [c.step for c in state.incomplete] == [30]
    assert (state.lost_ns, state.lost_steps) == (300 * S, 24)
    first, second = checkpoint_sentences(state)
    assert first.startswith("last complete checkpoint: step_20 of step 20, 3 GiB; ")
    assert first.endswith("5.0 min of work (24 steps) since it would be lost")
    assert second == "step_30 is not complete: cut off"


def test_without_a_whole_one_everything_would_be_lost():
    state = checkpoint_state([one(10, 100, "cut off")], source="x", until_ns=T)
    assert (state.last, state.lost_ns, state.lost_steps) == (None, None, None)
    assert "all work is lost" in checkpoint_sentences(state)[0]


def test_steps_after_the_save_are_counted_where_its_name_says_none():
    found = [Checkpoint(name="c.pt", kind="torch", step=None, size_bytes=1, saved_ns=T)]
    ends = [T - 2 * S, T - S, T + S, T + 2 * S, T + 3 * S]
    assert checkpoint_state(found, source="x", until_ns=ends[-1], step_ends=ends).lost_steps == 3


def test_a_job_that_saved_after_its_last_step_loses_nothing():
    state = checkpoint_state([one(10, 100)], source="x", until_ns=T + 90 * S, step=9)
    assert (state.lost_ns, state.lost_steps) == (0, 0)
