"""Named queries: the questions that reports, views and analyses ask of the tables.

SQL runs on any store: embedded on its own rows, for fleets on the rows fetched of the tables that
a query names. ``{table}`` stands for the rows of a table within ``since_ns`` and ``until_ns``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kansoku.errors import InputError

__all__ = ["QUERIES", "NamedQuery", "Parameter", "named_query"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a query."""

    name: str
    kind: type
    meaning: str
    default: Any = None


_WINDOW = (
    Parameter(name="since_ns", kind=int, meaning="from, Unix ns"),
    Parameter(name="until_ns", kind=int, meaning="until, Unix ns"),
)
_RUN = Parameter(name="run", kind=str, meaning="run id; all runs without it")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedQuery:
    """One question."""

    name: str
    answers: str
    """What one row of the answer is."""
    tables: tuple[str, ...]
    sql: str
    parameters: tuple[Parameter, ...] = _WINDOW

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return every parameter's value; raise InputError for unknown names and wrong types."""
        known = {one.name: one for one in self.parameters}
        if unknown := set(given) - set(known):
            raise InputError(
                f"query {self.name} has no parameter {', '.join(sorted(unknown))}",
                remedy=f"its parameters are {', '.join(known)}",
            )
        values = {}
        for name, one in known.items():
            value = given.get(name, one.default)
            if value is not None and not isinstance(value, one.kind):
                try:
                    value = one.kind(value)
                except (TypeError, ValueError):
                    raise InputError(
                        f"query {self.name}: {name}={value!r} is not {one.kind.__name__}"
                    ) from None
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise InputError(f"query {self.name}: {name} does not fit 64 bits")
            values[name] = value
        return values

    def bound(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the SQL itself names."""
        return {name: value for name, value in values.items() if f"${name}" in self.sql}


_ALL = (
    NamedQuery(
        name="runs",
        answers="one run: first and last step, ranks, median step time",
        tables=("steps",),
        sql="SELECT run, count(DISTINCT rank) AS ranks, min(step) AS first_step, "
        "max(step) AS last_step, min(start_ns) AS start_ns, "
        "max(start_ns + duration_ns) AS end_ns, median(duration_ns)::BIGINT AS step_p50_ns, "
        "sum(tokens) AS tokens FROM {steps} GROUP BY run ORDER BY start_ns DESC",
    ),
    NamedQuery(
        name="step_phases",
        answers="one step of a run, from its ranks' last start to their last end: mean of each "
        "phase over the ranks, slowest rank",
        tables=("steps",),
        parameters=(_RUN, *_WINDOW),
        sql="SELECT run, step, max(start_ns) AS start_ns, "
        "max(start_ns + duration_ns) - max(start_ns) AS duration_ns, "
        "arg_max(rank, duration_ns) AS slowest_rank, count(*) AS ranks, "
        + ", ".join(
            f"avg({phase}_ns) AS {phase}_ns"
            for phase in ("data_wait", "forward", "backward", "optimizer", "collective",
                          "checkpoint", "other")
        )
        + " FROM {steps} WHERE $run IS NULL OR run = $run GROUP BY run, step ORDER BY run, step",
    ),
    NamedQuery(
        name="rank_phases",
        answers="one rank of a run: median step and own work (step less collective), newest step",
        tables=("steps",),
        parameters=(_RUN, *_WINDOW),
        sql="SELECT run, rank, count(*) AS steps, median(duration_ns) AS step_p50_ns, "
        "median(duration_ns - collective_ns) AS work_p50_ns, "
        "median(data_wait_ns) AS data_wait_p50_ns, median(forward_ns) AS forward_p50_ns, "
        "median(backward_ns) AS backward_p50_ns, median(collective_ns) AS collective_p50_ns, "
        "max(step) AS last_step, max(start_ns) AS last_ns, arg_max(tokens, step) AS tokens, "
        "arg_max(flops, step) AS flops "
        "FROM {steps} WHERE $run IS NULL OR run = $run GROUP BY run, rank ORDER BY run, rank",
    ),
    NamedQuery(
        name="run_jobs",
        answers="one run and the id of the job that its sender named",
        tables=("steps",),
        parameters=_WINDOW,
        sql="SELECT DISTINCT o.run, o.job FROM main.owners o "
        "WHERE o.job IS NOT NULL AND o.run IN (SELECT run FROM {steps}) ORDER BY o.run",
    ),
    NamedQuery(
        name="span_kinds",
        answers="one kind of span of a rank: count, total and longest",
        tables=("spans",),
        parameters=(_RUN, *_WINDOW),
        sql="SELECT run, rank, kind, count(*) AS spans, sum(duration_ns)::BIGINT AS total_ns, "
        "max(duration_ns) AS longest_ns FROM {spans} WHERE $run IS NULL OR run = $run "
        "GROUP BY run, rank, kind ORDER BY run, rank, kind",
    ),
    NamedQuery(
        name="open_spans",
        answers="one span that began and has not ended",
        tables=("spans",),
        parameters=(_RUN, *_WINDOW),
        sql="SELECT * FROM {spans} WHERE duration_ns IS NULL AND ($run IS NULL OR run = $run) "
        "ORDER BY start_ns",
    ),
    NamedQuery(
        name="event_counts",
        answers="one kind of event of a subject: count, first and last",
        tables=("events",),
        sql="SELECT source, kind, subject, severity, count(*) AS events, min(time_ns) AS first_ns, "
        "max(time_ns) AS last_ns FROM {events} GROUP BY ALL ORDER BY events DESC, source, kind",
    ),
    NamedQuery(
        name="incidents",
        answers="the newest version of each incident",
        tables=("incidents",),
        parameters=(
            Parameter(name="state", kind=str, meaning="open, updated or closed; all without it"),
            *_WINDOW,
        ),
        sql="SELECT * FROM (SELECT * FROM {incidents} QUALIFY "
        "row_number() OVER (PARTITION BY id ORDER BY time_ns DESC) = 1) "
        "WHERE $state IS NULL OR state = $state ORDER BY onset_ns DESC",
    ),
    NamedQuery(
        name="findings",
        answers="the newest report of each finding",
        tables=("findings",),
        sql="SELECT * FROM {findings} QUALIFY row_number() OVER "
        "(PARTITION BY id, subject ORDER BY time_ns DESC) = 1 ORDER BY time_ns DESC",
    ),
    NamedQuery(
        name="jobs",
        answers="the newest row of each incarnation of a job",
        tables=("jobs",),
        parameters=(
            Parameter(name="user", kind=str, meaning="only this user's"),
            Parameter(name="state", kind=str, meaning="only this state"),
            *_WINDOW,
        ),
        sql="SELECT * FROM (SELECT * FROM {jobs} QUALIFY row_number() OVER (PARTITION BY cluster, "
        "raw_id, submit_ns ORDER BY end_ns DESC NULLS LAST) = 1) "
        'WHERE ($user IS NULL OR "user" = $user) AND ($state IS NULL OR state = $state) '
        "ORDER BY submit_ns DESC",
    ),
    NamedQuery(
        name="probe_matrix",
        answers="one source and target: probes, lost, mean of the windows' p50, worst p99",
        tables=("probes",),
        parameters=(Parameter(name="kind", kind=str, meaning="tor_mesh, inter_tor or service"),
                    *_WINDOW),
        sql="SELECT source, target, sum(probes)::BIGINT AS probes, sum(lost)::BIGINT AS lost, "
        "avg(rtt_p50_ns) AS rtt_p50_ns, max(rtt_p99_ns) AS rtt_p99_ns FROM {probes} "
        "WHERE $kind IS NULL OR kind = $kind GROUP BY source, target ORDER BY source, target",
    ),
    NamedQuery(
        name="probe_paths",
        answers="one path of a source, target and port: probes, lost, means of RTT and delay",
        tables=("probes",),
        parameters=(Parameter(name="kind", kind=str, meaning="tor_mesh, inter_tor or service"),
                    Parameter(name="source", kind=str, meaning="only from this NIC, NODE/DEV"),
                    Parameter(name="target", kind=str, meaning="only to this NIC"),
                    *_WINDOW),
        sql="SELECT source, target, kind, path, source_port, sum(n)::BIGINT AS probes, "
        "sum(gone)::BIGINT AS lost, sum(rtt_p50_ns * n) / sum(n) FILTER (rtt_p50_ns IS NOT NULL) "
        "AS rtt_p50_ns, max(rtt_p99_ns) AS rtt_p99_ns, sum(responder_delay_p50_ns * n) / sum(n) "
        "FILTER (responder_delay_p50_ns IS NOT NULL) AS responder_delay_p50_ns FROM (SELECT *, "
        "coalesce(probes, 1) AS n, coalesce(lost, (outcome = 'lost')::INT, 0) AS gone "
        "FROM {probes} WHERE ($kind IS NULL OR kind = $kind) AND ($source IS NULL OR "
        "source = $source) AND ($target IS NULL OR target = $target)) GROUP BY ALL "
        "ORDER BY source, target, source_port",
    ),
    NamedQuery(
        name="burst_ports",
        answers="one port and direction: bursts, bytes, highest peak, longest",
        tables=("bursts",),
        sql="SELECT node, port, direction, count(*) AS bursts, sum(bytes)::BIGINT AS bytes, "
        "max(peak_ratio) AS peak_ratio, max(duration_ns) AS longest_ns FROM {bursts} "
        "GROUP BY node, port, direction ORDER BY bursts DESC, node, port",
    ),
)  # fmt: skip

QUERIES: dict[str, NamedQuery] = {query.name: query for query in _ALL}


def named_query(name: str) -> NamedQuery:
    """Return a query; raise InputError with the known names."""
    try:
        return QUERIES[name]
    except KeyError:
        raise InputError(f"no query {name!r}", remedy=f"known: {', '.join(QUERIES)}") from None
