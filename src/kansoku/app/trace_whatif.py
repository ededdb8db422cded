"""How fast the job would be without stragglers: from operations to the culprit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.app._trace_paths import readable_paths
from kansoku.app._trace_whatif_sources import kineto_operations, run_operations
from kansoku.formats.operation_trace import find_trace, read_operation_trace
from kansoku.model import Verdict
from kansoku.trace.whatif.analyse import WhatIf, what_if
from kansoku.trace.whatif.judge import Part, Swap
from kansoku.trace.whatif.program import COMMUNICATION, pipeline_program
from kansoku.trace.whatif.record import operations_of
from kansoku.view import Block, Column, Facts, Heatmap, Sentence, Table, Tone, View

__all__ = ["WhatIfResult", "whatif"]

SCHEMA = "kansoku.trace.whatif/1"
_TOP_ROWS = 10
_VISIBLY_BELOW = -0.0005
"""A share that is drawn as -0.1%, not as -0.0%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfResult:
    """The answer for one job; tables are Polars DataFrames."""

    source: str
    """``operations``, ``run`` or ``kineto``."""
    analysis: WhatIf | None
    """None: nothing to analyse."""
    reason: str

    @property
    def verdict(self) -> Verdict:
        """Found, none or unknown."""
        return Verdict.UNKNOWN if self.analysis is None else Verdict(self.analysis.verdict)

    @property
    def workers(self) -> pl.DataFrame:
        """One row per worker: dp, pp, rank, share, slowdown."""
        return self._frame("workers", ["dp", "pp", "rank", "share", "slowdown"])

    @property
    def stages(self) -> pl.DataFrame:
        """One row per pipeline stage: pp, share, slowdown."""
        return self._frame("stages", ["pp", "share", "slowdown"])

    @property
    def operations(self) -> pl.DataFrame:
        """One row per operation type: type, share, slowdown."""
        return self._frame("operations", ["type", "share", "slowdown"])

    def _frame(self, name: str, columns: list[str]) -> pl.DataFrame:
        rows = [] if self.analysis is None else self.to_json()[name]
        kinds = {"type": pl.String, "share": pl.Float64, "slowdown": pl.Float64}
        return pl.DataFrame(rows, schema={key: kinds.get(key, pl.Int64) for key in columns})

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer. Shares are of the loss, actual − ideal step time."""
        found = self.analysis
        if found is None:
            return {
                "schema": SCHEMA,
                "slowdown": None,
                "ideal_s": None,
                "actual_s": None,
                "workers": [],
                "stages": [],
                "operations": [],
                "verdict": "unknown",
                "culprit": None,
                "reason": self.reason,
                "source": self.source,
            }
        return {
            "schema": SCHEMA,
            "slowdown": found.slowdown,
            "ideal_s": found.ideal_s,
            "actual_s": found.actual_s,
            "workers": [
                {"dp": part.dp, "pp": part.pp, "rank": part.rank, **_effects(part)}
                for part in found.workers
            ],
            "stages": [{"pp": part.pp, **_effects(part)} for part in found.stages],
            "operations": [{"type": part.kind, **_effects(part)} for part in found.operations],
            "verdict": found.verdict,
            "culprit": self._culprit(found),
            "reason": found.reason,
            "source": self.source,
            "measured_s": found.measured_s,
            "mw": None if found.slow_workers is None else found.slow_workers.removed_share,
            "ms": None if found.last_stage is None else found.last_stage.removed_share,
            "slow_workers": {
                "workers": [{"dp": dp, "pp": pp} for dp, pp in found.suspects],
                **_swap(found, found.slow_workers),
            },
            "last_stage": _swap(found, found.last_stage),
            "causes": [
                {"cause": one.cause, "share": one.share, "evidence": one.evidence}
                for one in found.causes
            ],
            "sequence_correlation": found.imbalance.correlation,
            "varying_share": found.imbalance.varying_share,
            "last_stage_ratio": found.imbalance.last_stage_ratio,
            "dp_ranks": [{"dp": part.dp, **_effects(part)} for part in found.dp_ranks],
            "steps": [
                {"step": step, "actual_s": actual, "slowdown": actual / found.ideal_s}
                for step, actual in zip(found.steps, found.step_actual_s, strict=True)
            ],
            "incomplete": list(found.missing),
        }

    @staticmethod
    def _culprit(found: WhatIf) -> dict[str, Any] | None:
        culprit = found.culprit
        if culprit is None:
            return None
        return {
            "kind": culprit.kind,
            "dp": culprit.dp,
            "pp": culprit.pp,
            "share": culprit.share,
            "type": culprit.type,
            "workers": [{"dp": dp, "pp": pp} for dp, pp in culprit.workers],
        }

    def view(self) -> View:
        """Return what a person reads."""
        found = self.analysis
        if found is None:
            return View(title="What if", blocks=[Sentence(text=self.reason, tone=Tone.NOTICE)])
        tone = {"found": Tone.BAD, "none": Tone.GOOD, "unknown": Tone.NOTICE}[found.verdict]
        blocks: list[Block] = [
            Sentence(text=found.reason[:1].upper() + found.reason[1:] + ".", tone=tone),
            Facts(items=_facts(found)),
        ]
        if found.causes:
            blocks.append(
                Table(
                    title="Causes",
                    columns=[
                        Column(title="cause"),
                        Column(title="of the loss", numeric=True),
                        Column(title="evidence"),
                    ],
                    rows=[
                        (one.cause.replace("_", " "), f"{one.share:.0%}", one.evidence)
                        for one in found.causes
                    ],
                )
            )
        if len(found.stages) > 1:
            blocks.append(_table("Stages", ["pp"], found.stages))
        blocks.append(_table("Operation types", ["type"], found.operations))
        if len(found.workers) > 1:
            blocks += [_table("Workers", ["dp", "pp", "rank"], found.workers), _heatmap(found)]
        blocks += [Sentence(text=line, tone=Tone.NOTICE) for line in found.missing]
        return View(title="What if", blocks=blocks)


def _facts(found: WhatIf) -> list[tuple[str, str]]:
    return [
        ("slowdown", f"{found.slowdown:.2f}"),
        ("step, without host delays", f"{found.actual_s:.4f} s"),
        ("ideal step", f"{found.ideal_s:.4f} s"),
        ("step as recorded", f"{found.measured_s:.4f} s"),
        ("steps", str(len(found.steps))),
        ("workers", str(len(found.workers))),
    ]


def _effects(part: Part) -> dict[str, float | None]:
    return {"share": part.share, "slowdown": part.slowdown}


def _swap(found: WhatIf, swap: Swap | None) -> dict[str, float | None]:
    return {
        "trem": None if swap is None else swap.removed_s,
        "tadd": None if swap is None else swap.added_s,
        "tori": found.actual_s,
        "tideal": found.ideal_s,
        "rem": None if swap is None else swap.removed_share,
        "add": None if swap is None else swap.added_share,
    }


def _table(title: str, names: Sequence[str], parts: Sequence[Part]) -> Table:
    rows = []
    for part in parts[:_TOP_ROWS]:
        own = {"dp": part.dp, "pp": part.pp, "rank": part.rank, "type": part.kind}
        share = None if part.share is None else _percent(part.share)
        rows.append((*(own[name] for name in names), share, f"{part.slowdown:.3f}"))
    return Table(
        title=title,
        columns=[
            *(Column(title=name, numeric=name != "type") for name in names),
            Column(title="of the loss", numeric=True),
            Column(title="slowdown alone", numeric=True),
        ],
        rows=rows,
        note=_note(parts),
    )


def _percent(share: float) -> str:
    text = f"{share:.1%}"
    return "0.0%" if text == "-0.0%" else text


def _note(parts: Sequence[Part]) -> str | None:
    """Return what the table leaves out and, where a share is no part of a whole, why.

    The paper's shares are not cut off at 0 and 1, and neither are these: what lies outside tells
    that parts hide one another.
    """
    shares = [part.share for part in parts if part.share is not None]
    said = []
    if len(parts) > _TOP_ROWS:
        said.append(f"{len(parts) - _TOP_ROWS} more")
    if any(share <= _VISIBLY_BELOW for share in shares):
        said.append(
            "below 0: were this part alone ideal, the step would be longer, since where the step "
            "waits for it, it was faster than its mean"
        )
    if any(share >= 1 - _VISIBLY_BELOW for share in shares):
        said.append(
            "above 100%: more than the loss, since ideal times of the others cost a part of it"
        )
    return "; ".join(said) or None


def _heatmap(found: WhatIf) -> Heatmap:
    rows = max(part.pp or 0 for part in found.workers) + 1
    columns = max(part.dp or 0 for part in found.workers) + 1
    values: list[list[float | None]] = [[None] * columns for _ in range(rows)]
    for part in found.workers:
        values[part.pp or 0][part.dp or 0] = part.slowdown
    return Heatmap(
        title="Slowdown by worker",
        row_labels=[f"pp {pp}" for pp in range(rows)],
        column_labels=[f"dp {dp}" for dp in range(columns)],
        values=values,
        unit="×",
        low=1.0,
    )


def whatif(
    paths: Sequence[Path | str],
    *,
    stages: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WhatIfResult:
    """Replay a job without its stragglers.

    ``paths`` is one operation trace (``trace-NAME.parquet``, or the folder with it), one run
    directory, or Kineto traces of all ranks. ``stages`` is the pipeline size of the latter two:
    ranks are then split in that many blocks, in order. ``progress`` gets what is done and how much
    there is: replays, or bytes of Kineto traces. Raises InputError if nothing is readable.
    """
    given = readable_paths(paths)
    if len(given) == 1:
        trace = find_trace(given[0])
        if trace is not None:
            return _operation_trace(trace, progress)
        if (given[0] / "run.json").is_file():
            found = run_operations(given[0], stages=stages, progress=progress)
            return _phases("run", found)
    return _phases("kineto", kineto_operations(given, stages=stages, progress=progress))


def _operation_trace(path: Path, progress: Callable[[int, int], None] | None) -> WhatIfResult:
    trace = read_operation_trace(path)
    operations = operations_of(trace.operations, source=str(path))
    parallel = trace.meta.get("dsp_size", 1)
    sequence_parallel = parallel if isinstance(parallel, int) else 1
    program = pipeline_program(operations, data_parallel=operations.dp_size * sequence_parallel > 1)
    found = what_if(
        operations, program, communication=COMMUNICATION, missing=trace.missing, progress=progress
    )
    return WhatIfResult(source="operations", analysis=found, reason=found.reason)


def _phases(source: str, found: WhatIf | str) -> WhatIfResult:
    if isinstance(found, str):
        return WhatIfResult(source=source, analysis=None, reason=found)
    return WhatIfResult(source=source, analysis=found, reason=found.reason)
