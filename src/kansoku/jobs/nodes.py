"""Node health: who failed more than its share, with evidence.

A failed job of n nodes blames each of them 1/n. A node's blame is compared with what the
cluster's own rate would give it for the time and sizes it ran: the chance of seeing that much
blame or more decides, so that busy nodes are not lemons for being busy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from kansoku.formats.slurm import expand_nodes
from kansoku.stats.intervals import gamma_cdf

__all__ = ["NodeHealth", "NodePolicy", "node_health"]

_NS_PER_HOUR = 3_600_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePolicy:
    """When a node is a lemon candidate and what its score is made of."""

    least_jobs: int = 5
    """Below this a node is greyed: too few jobs to judge."""
    chance: float = 0.01
    """A node is a candidate when chance explains its blame this rarely (before the correction
    for the number of nodes looked at)."""
    excluded_by: int = 2
    """Users who exclude the node by name before that counts as evidence."""
    xids: int = 2
    """Hardware Xids before they count as evidence on their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """One node."""

    node: str
    score: float
    """0 (sick) to 1 (well): the chance of its record under the cluster's rate, lowered by each
    further sign."""
    lemon: bool
    greyed: bool
    jobs: int
    run_hours: float
    blame: float
    """Sum over failed jobs of 1/n."""
    expected_blame: float
    chance: float
    """Probability of at least this blame if the node were like the others."""
    node_fails: int
    failed_node: int
    """Times Slurm named it as the node that failed."""
    downs: int
    xids: int
    excluded_by: int
    evidence: tuple[str, ...] = field(default=())


def node_health(
    jobs: pl.DataFrame,
    *,
    node_events: pl.DataFrame | None = None,
    xids: Mapping[str, int] | None = None,
    exclusions: Mapping[str, Sequence[str]] | None = None,
    known_nodes: Sequence[str] = (),
    policy: NodePolicy | None = None,
) -> list[NodeHealth]:
    """Return every node, sickest first.

    ``jobs`` has node_list, run_ns, nodes, outcome, failed_node and ``blamed`` (the job failed and
    neither its owner's wish nor a limit ended it). ``xids`` counts hardware Xids per node,
    ``exclusions`` gives the users who keep away from a node.
    """
    policy = policy or NodePolicy()
    table = _per_node(jobs)
    blame_total = sum(r["blame"] for r in table.values())
    hours_total = sum(r["hours"] for r in table.values())
    rate = blame_total / hours_total if hours_total else 0.0
    downs, reasons = _downs(node_events)
    names = sorted({*table, *downs, *(xids or {}), *(exclusions or {}), *known_nodes})
    looked_at = max(sum(1 for n in table.values() if n["jobs"] >= policy.least_jobs), 1)
    answers = []
    for name in names:
        row = table.get(name, _EMPTY)
        # The node's own blame stays out of what is expected of it.
        others = hours_total - row["hours"]
        fair = (blame_total - row["blame"]) / others if others > 0 else rate
        expected = fair * row["hours"]
        chance = _chance(row["blame"], expected)
        answers.append(
            _health(
                name, row, expected, chance, looked_at, downs.get(name, 0),
                (xids or {}).get(name, 0), tuple((exclusions or {}).get(name, ())),
                reasons.get(name, ()), policy,
            )
        )  # fmt: skip
    return sorted(answers, key=lambda h: (h.greyed, not h.lemon, h.score, -h.blame, h.node))


_EMPTY = {"jobs": 0, "hours": 0.0, "blame": 0.0, "node_fails": 0, "named": 0}


def _chance(blame: float, expected: float) -> float:
    """Return the probability of at least this much blame: Poisson, continued to fractions."""
    if blame <= 0:
        return 1.0
    if expected <= 0:
        return 0.0 if blame >= 1 else 1.0
    return gamma_cdf(blame, expected)


def _per_node(jobs: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Spread jobs over their nodes; each distinct list is expanded once."""
    ran = jobs.filter(pl.col("node_list").is_not_null() & (pl.col("run_ns") >= 0))
    grouped = ran.group_by("node_list").agg(
        jobs=pl.len(),
        hours=pl.col("run_ns").sum() / _NS_PER_HOUR,
        blamed=pl.col("blamed").sum(),
        node_fails=(pl.col("outcome") == "NODE_FAIL").sum(),
    )
    table: dict[str, dict[str, float]] = {}
    for text, count, hours, blamed, fails in grouped.iter_rows():
        try:
            names = expand_nodes(text)
        except ValueError:
            continue
        for name in names:
            row = table.setdefault(name, dict(_EMPTY))
            row["jobs"] += count
            row["hours"] += hours
            row["blame"] += blamed / len(names)
            row["node_fails"] += fails
    named = ran.filter(pl.col("failed_node").is_not_null()).group_by("failed_node").len()
    for text, count in named.iter_rows():
        for name in text.split(","):
            if name in table:
                table[name]["named"] += count
    return table


def _downs(
    node_events: pl.DataFrame | None,
) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    counts: dict[str, int] = {}
    reasons: dict[str, tuple[str, ...]] = {}
    if node_events is None:
        return counts, reasons
    for row in node_events.iter_rows(named=True):
        name = row["node"]
        counts[name] = counts.get(name, 0) + 1
        said = f"{row['state']}: {row['reason'] or 'no reason given'}"
        if said not in reasons.get(name, ()):
            reasons[name] = (*reasons.get(name, ()), said)
    return counts, reasons


def _health(  # noqa: PLR0913, PLR0917 - the signs of one node, each named
    name: str,
    row: Mapping[str, float],
    expected: float,
    chance: float,
    looked_at: int,
    downs: int,
    xids: int,
    excluders: Sequence[str],
    reasons: Sequence[str],
    policy: NodePolicy,
) -> NodeHealth:
    greyed = row["jobs"] < policy.least_jobs
    evidence = []
    unlikely = not greyed and row["blame"] >= 1 and chance * looked_at < policy.chance
    if row["blame"] > 0:
        evidence.append(
            f"blame {row['blame']:.2f} in {row['jobs']:.0f} jobs, expected {expected:.2f} "
            f"(chance {chance:.2g})"
        )
    if row["node_fails"]:
        evidence.append(f"in {row['node_fails']:.0f} jobs that ended NODE_FAIL")
    if row["named"]:
        evidence.append(f"named by Slurm as the failed node {row['named']:.0f} times")
    if xids:
        evidence.append(f"{xids} hardware Xids")
    if excluders:
        evidence.append(f"excluded by {', '.join(sorted(excluders)[:5])}")
    evidence += [f"was {reason}" for reason in reasons[:3]]
    signs = (
        unlikely,
        xids >= policy.xids,
        len(excluders) >= policy.excluded_by,
        row["named"] >= 2 or downs >= 3,
    )
    score = chance
    for sign in signs[1:]:
        score *= 0.5 if sign else 1.0
    # Chance alone is not enough of a reason to pull a node, nor is one sign without it.
    lemon = not greyed and (unlikely or sum(signs[1:]) >= 2)
    return NodeHealth(
        node=name,
        score=score,
        lemon=lemon,
        greyed=greyed,
        jobs=int(row["jobs"]),
        run_hours=row["hours"],
        blame=row["blame"],
        expected_blame=expected,
        chance=chance,
        node_fails=int(row["node_fails"]),
        failed_node=int(row["named"]),
        downs=downs,
        xids=xids,
        excluded_by=len(excluders),
        evidence=tuple(evidence),
    )
