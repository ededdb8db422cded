"""Score MLPerf Training logs of any submitter: files or folders to one answer."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kansoku.bench.score import RcpCheck, RunScore, check_convergence, olympic_mean, score_run
from kansoku.catalog.mlperf import (
    BenchmarkRule,
    benchmark_rule,
    newest_ruleset,
    published_scores,
    reference_points,
    rulesets,
)
from kansoku.errors import InputError
from kansoku.formats.mllog import read_log
from kansoku.model import Mfu
from kansoku.view import Column, Facts, Sentence, Table, Tone, View

__all__ = ["MfuOfRun", "ScoredResult", "ScoredRun", "score", "score_json", "score_view"]

SCHEMA = "kansoku.bench.score/1"
# Published tables round to a hundredth or thousandth of a minute.
_SAME_MINUTES = 0.01

MfuOfRun = Callable[[RunScore, dict[str, Any]], tuple[Mfu | None, str]]
"""From a run and its system description to its MFU, or None, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRun:
    """One run with its MFU."""

    run: RunScore
    mfu: Mfu | None
    mfu_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResult:
    """The runs of one folder, scored together."""

    folder: str
    benchmark: str | None
    runs: tuple[ScoredRun, ...]
    score_minutes: float | None
    scaling_factor: float
    rcp: RcpCheck | None
    label: str
    """``unverified``, or ``published`` for a score in MLCommons' published result sets."""
    source: str | None
    notes: tuple[str, ...]
    scorable: bool
    """There are as many runs as a score needs, whatever became of them."""

    @property
    def finding(self) -> bool:
        """Runs converge faster than the reference allows, or there are too few good ones."""
        if self.rcp is not None and self.rcp.verdict == "fail":
            return True
        if self.scorable and self.score_minutes is None:
            return True
        return all(one.run.status != "success" for one in self.runs)


def _log_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(
            "no such file or folder",
            where=str(path),
            remedy="name log files, or a folder of result_*.txt",
        )
    found = sorted(path.rglob("result_*.txt")) or sorted(path.rglob("*.log"))
    if not found:
        raise InputError(
            "no result_*.txt or *.log in the folder",
            where=str(path),
            remedy="name the log files themselves",
        )
    return found


def _json_object(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{path}: not read: {error}")
        return {}
    return value if isinstance(value, dict) else {}


def _scaling_factor(folder: Path, notes: list[str]) -> float:
    """Return the review committee's factor from scaling.json; 1 where there is none."""
    table = _json_object(folder / "scaling.json", notes)
    factor = table.get("scaling_factor", 1.0)
    right = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not right or not math.isfinite(factor) or factor <= 0:
        notes.append(f"{folder / 'scaling.json'}: scaling_factor {factor!r} is no positive number")
        return 1.0
    return float(factor)


def _rule(benchmark: str | None, notes: list[str]) -> BenchmarkRule | None:
    if benchmark is None:
        notes.append("no submission_benchmark in the logs: samples and reference are unknown")
        return None
    try:
        return benchmark_rule(benchmark)
    except InputError as error:
        notes.append(str(error))
        return None


def _chosen_rules(ruleset: str | None, rule: BenchmarkRule) -> str | None:
    """Return the ruleset asked for, or the newest; refuse one that is not on file."""
    known = rulesets(rule.name)
    if ruleset is not None and known and ruleset not in known:
        raise InputError(
            f"no reference points of {rule.name} for ruleset {ruleset!r}",
            remedy=f"--ruleset {', '.join(known)}",
        )
    return ruleset or newest_ruleset(rule.name)


def _published(
    system: dict[str, Any],
    benchmark: str | None,
    minutes: float | None,
    *,
    runs: Sequence[RunScore],
) -> tuple[str, str | None]:
    """Return the label and its source; a set with a damaged log is not the one published."""
    if any(run.status not in {"success", "aborted"} for run in runs):
        return "unverified", None
    for entry in published_scores():
        if (
            minutes is not None
            and entry.submitter == system.get("submitter")
            and entry.system == system.get("system_name")
            and entry.benchmark == benchmark
            and abs(entry.minutes - minutes) < _SAME_MINUTES
        ):
            return "published", entry.source
    return "unverified", None


def _score_folder(
    folder: Path, files: Sequence[Path], ruleset: str | None, mfu: MfuOfRun
) -> ScoredResult:
    notes: list[str] = []
    logs = [read_log(path) for path in files]
    if not any(log.events for log in logs):
        raise InputError(
            f"no :::MLLOG line in {sum(log.lines for log in logs):,} lines",
            where=str(files[0] if len(files) == 1 else folder),
            remedy="name the logs of MLPerf Training runs",
        )
    named = [log.first("submission_benchmark") for log in logs]
    names = {str(event.value) for event in named if event is not None}
    if len(names) > 1:
        raise InputError(
            f"logs of different benchmarks: {', '.join(sorted(names))}",
            where=str(folder),
            remedy="score each benchmark's folder by itself",
        )
    benchmark = names.pop() if names else None
    rule = _rule(benchmark, notes)
    runs = [score_run(log, rule) for log in logs]
    system = _json_object(folder / "system.json", notes)
    factor = _scaling_factor(folder, notes)
    minutes, rcp = None, None
    if rule is not None:
        good = [r.minutes if r.status == "success" and r.minutes else float("inf") for r in runs]
        mean = olympic_mean(good, rule.dropped)
        minutes = None if mean is None else mean * factor
        if len(runs) != rule.runs:
            notes.append(f"{len(runs)} runs; MLPerf scores {rule.name} over {rule.runs}")
        if mean is None:
            notes.append("no score: too few converged runs remain after dropping the extremes")
        chosen = _chosen_rules(ruleset, rule)
        points = reference_points(chosen, rule.name) if chosen else ()
        rcp = check_convergence(runs, rule, points, chosen)
    label, source = _published(system, benchmark, minutes, runs=runs)
    if rcp is not None and rcp.verdict != "pass" and rulesets(benchmark or ""):
        # The published runs converged as the reference does; these are others.
        label, source = "unverified", None
    scored = []
    for run in runs:
        value, reason = mfu(run, system)
        scored.append(ScoredRun(run=run, mfu=value, mfu_reason=reason))
    return ScoredResult(
        folder=str(folder),
        benchmark=benchmark,
        runs=tuple(scored),
        score_minutes=minutes,
        scaling_factor=factor,
        rcp=rcp,
        label=label,
        source=source,
        notes=tuple(notes),
        scorable=rule is not None and len(runs) > 2 * rule.dropped,
    )


def score(
    paths: Sequence[Path], *, mfu: MfuOfRun, ruleset: str | None = None
) -> list[ScoredResult]:
    """Score every folder of logs among ``paths``; files of one folder belong together.

    ``ruleset`` is the MLPerf Training round whose reference convergence points count, such as
    ``4.1.0``; the newest on file otherwise. Raises InputError for files that cannot be read.
    """
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        for file in _log_files(path):
            files = folders.setdefault(file.parent, [])
            if file not in files:
                files.append(file)
    return [_score_folder(folder, files, ruleset, mfu) for folder, files in folders.items()]


def _run_json(scored: ScoredRun) -> dict[str, object]:
    run = scored.run
    return {
        "file": run.file,
        "minutes": run.minutes,
        "status": run.status,
        "samples": run.samples,
        "unit": run.unit,
        "tokens": run.tokens,
        "mfu": None if scored.mfu is None else scored.mfu.to_json(),
        "mfu_reason": scored.mfu_reason,
        "global_batch_size": run.global_batch_size,
        "sequence_length": run.sequence_length,
        "evaluations": run.evaluations,
        "evaluation_share": run.evaluation_share,
        "step_s": run.step_s,
        "tokens_per_s": run.tokens_per_s,
        "tokens_per_s_in_steps": run.tokens_per_s_in_steps,
        "seed": run.seed,
        "notes": list(run.notes),
    }


def _rcp_json(check: RcpCheck | None) -> dict[str, object] | None:
    if check is None:
        return None
    return {
        "verdict": check.verdict,
        "reason": check.reason,
        "ruleset": check.ruleset,
        "submission_mean": check.submission_mean,
        "reference_mean": check.reference_mean,
        "min_acceptable_mean": check.min_acceptable_mean,
        "normalisation": check.normalisation,
    }


def _result_json(result: ScoredResult) -> dict[str, object]:
    return {
        "folder": result.folder,
        "benchmark": result.benchmark,
        "runs": [_run_json(run) for run in result.runs],
        "score_minutes": result.score_minutes,
        "scaling_factor": result.scaling_factor,
        "rcp": _rcp_json(result.rcp),
        "label": result.label,
        "source": result.source,
        "notes": list(result.notes),
    }


def score_json(results: Sequence[ScoredResult]) -> dict[str, object]:
    """Return the versioned answer; one folder stands at the top, several under ``results``."""
    if len(results) == 1:
        return {"schema": SCHEMA, **_result_json(results[0])}
    return {
        "schema": SCHEMA,
        "runs": [_run_json(run) for result in results for run in result.runs],
        "score_minutes": None,
        "rcp": None,
        "label": "unverified",
        "results": [_result_json(result) for result in results],
    }


def _number(value: float | None, digits: int = 3) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def score_view(results: Sequence[ScoredResult]) -> View:
    """Return what a person reads."""
    blocks: list[Facts | Table | Sentence] = []
    for result in results:
        known = result.score_minutes is not None
        blocks.append(
            Facts(
                items=[
                    ("folder", result.folder),
                    ("benchmark", result.benchmark or "unknown"),
                    (
                        "score",
                        f"{result.score_minutes:.3f} min, {result.label}" if known else "no score",
                    ),
                    ("convergence", _convergence(result.rcp)),
                ]
            )
        )
        blocks.append(_runs_table(result))
        blocks += [Sentence(text=note, tone=Tone.NOTICE) for note in result.notes]
        blocks += [
            Sentence(text=f"{Path(s.run.file).name}: {note}", tone=Tone.NOTICE)
            for s in result.runs
            for note in s.run.notes
        ]
        if result.label == "unverified":
            blocks.append(
                Sentence(text="Result not verified by MLCommons Association.", tone=Tone.MUTED)
            )
    return View(title="MLPerf Training score", blocks=blocks)


def _convergence(check: RcpCheck | None) -> str:
    if check is None:
        return "not checked"
    rules = f" (rules {check.ruleset})" if check.ruleset else ""
    return f"{check.verdict}: {check.reason}{rules}"


def _runs_table(result: ScoredResult) -> Table:
    columns = [
        Column(title="run"),
        Column(title="minutes", numeric=True),
        Column(title="status"),
        Column(title="samples", numeric=True),
        Column(title="step s", numeric=True),
        Column(title="tokens/s", numeric=True),
        Column(title="eval %", numeric=True),
        Column(title="MFU %", numeric=True),
    ]
    rows = [
        (
            Path(scored.run.file).name,
            _number(scored.run.minutes),
            scored.run.status,
            _number(scored.run.samples, 0),
            _number(scored.run.step_s),
            _number(scored.run.tokens_per_s, 0),
            None
            if scored.run.evaluation_share is None
            else f"{100 * scored.run.evaluation_share:.2f}",
            None if scored.mfu is None else f"{100 * scored.mfu.value:.1f}",
        )
        for scored in result.runs
    ]
    mfu = next((s for s in result.runs if s.mfu is not None), None)
    note = (
        f"MFU: {mfu.mfu.convention}, {mfu.mfu.peak_source}"
        if mfu is not None and mfu.mfu is not None
        else (result.runs[0].mfu_reason if result.runs else None)
    )
    return Table(title="Runs", columns=columns, rows=rows, note=note)
