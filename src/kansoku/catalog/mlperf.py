"""MLPerf Training's rules and reference convergence points, as data."""

import csv
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from kansoku.errors import InputError

__all__ = [
    "BenchmarkRule",
    "PublishedScore",
    "ReferencePoint",
    "benchmark_rule",
    "newest_ruleset",
    "published_scores",
    "reference_points",
    "rulesets",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRule:
    """What one MLPerf Training benchmark counts and how its score is made."""

    name: str
    runs: int
    """Runs that a score needs."""
    dropped: int
    """Fastest and slowest runs left out at each end (olympic scoring)."""
    unit: str
    """What convergence is counted in: ``tokens``, ``sequences``, ``samples``, ``epochs``."""
    position: str
    """Metadata key of eval_accuracy that holds the position in that unit."""
    sequence_length: int | None
    """Tokens in a sequence, where the rules fix it."""
    model: str | None
    """Name in the model catalogue, where FLOPs can be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePoint:
    """One reference convergence point (RCP)."""

    ruleset: str
    benchmark: str
    global_batch_size: int
    """Sequences or samples per step."""
    convergence: tuple[float, ...]
    """Every reference run's convergence, in the benchmark's unit, ascending."""
    min_acceptable_mean: float
    """Smallest mean that the official checker accepts; 0 accepts everything."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedScore:
    """A score in a result set that MLCommons published."""

    submitter: str
    system: str
    benchmark: str
    minutes: float
    source: str


def _text(name: str) -> str:
    return (resources.files("kansoku.catalog") / "data" / name).read_text("utf-8")


@cache
def _rules() -> dict[str, BenchmarkRule]:
    return {
        name: BenchmarkRule(
            name=name,
            runs=row["runs"],
            dropped=row["dropped"],
            unit=row["unit"],
            position=row["position"],
            sequence_length=row.get("sequence_length"),
            model=row.get("model"),
        )
        for name, row in tomllib.loads(_text("mlperf.toml")).items()
    }


def benchmark_rule(name: str) -> BenchmarkRule:
    """Return the rule of a benchmark; raise InputError naming the known ones."""
    try:
        return _rules()[name]
    except KeyError:
        raise InputError(
            f"no MLPerf rule for benchmark {name!r}", remedy=f"known: {', '.join(_rules())}"
        ) from None


@cache
def reference_points(ruleset: str, benchmark: str) -> tuple[ReferencePoint, ...]:
    """Return the RCPs of a benchmark, smallest batch first; empty where none are on file."""
    points = [
        ReferencePoint(
            ruleset=row["ruleset"],
            benchmark=row["benchmark"],
            global_batch_size=int(row["global_batch_size"]),
            convergence=tuple(sorted(float(v) for v in row["convergence"].split(";"))),
            min_acceptable_mean=float(row["min_acceptable_mean"]),
            source=row["source"],
        )
        for row in csv.DictReader(_text("mlperf_rcps.csv").splitlines())
        if row["ruleset"] == ruleset and row["benchmark"] == benchmark
    ]
    return tuple(sorted(points, key=lambda point: point.global_batch_size))


def rulesets(benchmark: str) -> list[str]:
    """Return the rulesets with reference points of a benchmark, oldest first."""
    found = {
        row["ruleset"]
        for row in csv.DictReader(_text("mlperf_rcps.csv").splitlines())
        if row["benchmark"] == benchmark
    }
    return sorted(found, key=lambda text: [int(part) for part in text.split(".")])


def newest_ruleset(benchmark: str) -> str | None:
    """Return the newest ruleset with reference points of a benchmark, or None."""
    return next(reversed(rulesets(benchmark)), None)


@cache
def published_scores() -> tuple[PublishedScore, ...]:
    """Return the scores on file that MLCommons published."""
    return tuple(
        PublishedScore(
            submitter=row["submitter"],
            system=row["system"],
            benchmark=row["benchmark"],
            minutes=float(row["minutes"]),
            source=row["source"],
        )
        for row in csv.DictReader(_text("mlperf_published.csv").splitlines())
    )
