"""Checkpoints of a job: which one it can resume from, and what would be lost if it died now.

Pure: what lies in the job's folder is read by ``edge.checkpoints``, its save spans by the
application.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kansoku.view.units import in_bytes, in_time

__all__ = ["Checkpoint", "CheckpointState", "checkpoint_sentences", "checkpoint_state"]

_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint: a file or a folder, or a save that a run's record speaks of."""

    name: str
    """Relative to the folder it was found in."""
    kind: str
    """``torch``, ``distributed``, ``huggingface``, ``safetensors``, ``files``, or ``span``."""
    step: int | None
    """From its name, or of the save; None where nothing says it."""
    size_bytes: int | None
    saved_ns: int
    """Unix time of its last change, or of the save's end."""
    problem: str | None = None
    """Why it is not complete; None where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What a job could resume from."""

    last: Checkpoint | None
    """The newest complete one."""
    incomplete: tuple[Checkpoint, ...]
    """Those newer than it that are not whole, newest first."""
    source: str
    lost_ns: int | None
    """Work since it was saved; None where there is none, or the job's last progress is unknown."""
    lost_steps: int | None = None


def checkpoint_state(
    found: Sequence[Checkpoint],
    *,
    source: str,
    until_ns: int | None,
    step: int | None = None,
    step_ends: Sequence[int] = (),
) -> CheckpointState:
    """Return the last complete checkpoint and the work that is lost without a newer one.

    ``until_ns`` is the job's last progress (now, for a job that runs), ``step`` its last step.
    ``step_ends`` are unix times of ends of steps; without a step in the checkpoint's name those
    after the save are counted.
    """
    ordered = sorted(found, key=lambda c: (c.saved_ns, -1 if c.step is None else c.step))
    whole = [c for c in ordered if c.problem is None]
    last = whole[-1] if whole else None
    since = last.saved_ns if last else 0
    broken = [c for c in ordered if c.problem is not None and c.saved_ns >= since]
    lost_ns = lost_steps = None
    if last is not None and until_ns is not None:
        lost_ns = max(0, until_ns - last.saved_ns)
    if last is not None and step is not None and last.step is not None:
        lost_steps = max(0, step - last.step)
    elif last is not None and step_ends:
        lost_steps = sum(end > last.saved_ns for end in step_ends)
    return CheckpointState(
        last=last,
        incomplete=tuple(reversed(broken)),
        source=source,
        lost_ns=lost_ns,
        lost_steps=lost_steps,
    )


def checkpoint_sentences(state: CheckpointState) -> list[str]:
    """Return what a person reads of it."""
    said = []
    last = state.last
    if last is None:
        said.append("no complete checkpoint was found: all work is lost if the job dies")
    else:
        step = f" of step {last.step}" if last.step is not None else ""
        size = f", {in_bytes(last.size_bytes)}" if last.size_bytes is not None else ""
        text = f"last complete checkpoint: {last.name}{step}{size}"
        if state.lost_ns is not None:
            steps = f" ({state.lost_steps} steps)" if state.lost_steps is not None else ""
            text += f"; {in_time(state.lost_ns / _SECOND)} of work{steps} since it would be lost"
        said.append(text)
    said += [f"{c.name} is not complete: {c.problem}" for c in state.incomplete[:4]]
    return said
