"""Use case ``trace compare``: what changed between two sets of traces."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kansoku.app._trace_set import Progress, is_own_run, map_traces, short_name
from kansoku.errors import InputError
from kansoku.trace.kineto.compare import Change, ComparePolicy, compare_profiles, profile
from kansoku.view import Block, Column, Sentence, Table, Tone, View

if TYPE_CHECKING:
    import polars as pl

__all__ = ["CompareResult", "compare"]

SCHEMA = "kansoku.trace.compare/1"
_TITLES = {
    "phase": "Phases",
    "kernel": "Kernels",
    "collective": "Collectives",
    "operator": "Operators",
}
_TOP_ROWS = 15


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """Changes from A to B."""

    a: str
    b: str
    found: tuple[Change, ...]
    policy: ComparePolicy
    remarks: tuple[str, ...]

    @cached_property
    def changes(self) -> "pl.DataFrame":
        """One row per phase, kernel, collective and operator."""
        import polars as pl

        return pl.DataFrame(self._rows(), infer_schema_length=None)

    @property
    def significant(self) -> tuple[Change, ...]:
        """The changes that are more than chance."""
        return tuple(change for change in self.found if change.significant)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "what": row.what,
                "name": row.name,
                "calls_a": row.calls_a,
                "calls_b": row.calls_b,
                "total_a_us": row.total_a_ns / 1000,
                "total_b_us": row.total_b_ns / 1000,
                "difference_us": row.difference_ns / 1000,
                "mean_a_us": None if row.mean_a_ns is None else row.mean_a_ns / 1000,
                "mean_b_us": None if row.mean_b_ns is None else row.mean_b_ns / 1000,
                "p_value": row.p_value,
                "significant": row.significant,
                "reason": row.reason,
            }
            for row in self.found
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer; figures are per step and rank."""
        return {
            "schema": SCHEMA,
            "a": self.a,
            "b": self.b,
            "verdict": "found" if self.significant else "none",
            "reason": self._reason(),
            "policy": {
                "false_discovery_ratio": self.policy.false_discovery_ratio,
                "min_change_ratio": self.policy.min_change_ratio,
                "min_calls": self.policy.min_calls,
            },
            "changes": self._rows(),
            "incomplete": list(self.remarks),
        }

    def _reason(self) -> str:
        return f"{len(self.significant)} of {len(self.found)} names changed significantly"

    def view(self) -> View:
        """Return the screen."""
        tone = Tone.NOTICE if self.significant else Tone.GOOD
        blocks: list[Block] = [Sentence(text=self._reason(), tone=tone)]
        blocks += [Sentence(text=remark, tone=Tone.NOTICE) for remark in self.remarks]
        for what, title in _TITLES.items():
            rows = [row for row in self.found if row.what == what]
            shown = rows if what == "phase" else rows[:_TOP_ROWS]
            if not rows:
                continue
            blocks.append(
                Table(
                    title=title,
                    columns=[
                        Column(title="name"),
                        Column(title="A ms", numeric=True),
                        Column(title="B ms", numeric=True),
                        Column(title="change ms", numeric=True),
                        Column(title="calls A→B"),
                        Column(title="verdict"),
                    ],
                    rows=[
                        [
                            short_name(row.name),
                            f"{row.total_a_ns / 1e6:,.3f}",
                            f"{row.total_b_ns / 1e6:,.3f}",
                            f"{row.difference_ns / 1e6:+,.3f}",
                            f"{row.calls_a:.4g}→{row.calls_b:.4g}",
                            row.reason,
                        ]
                        for row in shown
                    ],
                    tones=[_tone(row) for row in shown],
                    note=f"the first {_TOP_ROWS} of {len(rows)} by difference"
                    if len(shown) < len(rows)
                    else None,
                )
            )
        return View(
            title=f"Trace comparison: A {self.a}, B {self.b} (per step and rank)", blocks=blocks
        )


def _tone(row: Change) -> Tone:
    if not row.significant:
        return Tone.MUTED
    return Tone.BAD if row.difference_ns > 0 else Tone.GOOD


def compare(
    a: Path | str,
    b: Path | str,
    *,
    policy: ComparePolicy | None = None,
    processes: int | None = None,
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> CompareResult:
    """Compare two traces (or folders, or archives of many ranks, or runs); A is the reference."""
    policy = policy or ComparePolicy()
    sides = [Path(side) for side in (a, b)]
    own = [is_own_run(side) for side in sides]
    if any(own) and not all(own):
        raise InputError(
            "a run by the host's clock and a device trace have no names in common",
            where=f"{a}, {b}",
            remedy="compare two runs, or two traces",
        )
    if all(own):
        from kansoku.app._trace_own_run import own_run_profiles

        left, right = (own_run_profiles(side) for side in sides)
    else:
        left, right = (
            map_traces(profile, [side], processes=processes, scheduler=scheduler, progress=progress)
            for side in sides
        )
    return CompareResult(
        a=str(a),
        b=str(b),
        found=tuple(compare_profiles(left, right, policy)),
        policy=policy,
        remarks=tuple(
            dict.fromkeys(
                f"{part.file}: {why}" for part in (*left, *right) for why in part.incomplete
            )
        ),
    )
