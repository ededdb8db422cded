"""What one reader of the web pages may ask of the store: the API's own rules, in one object."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.app.serve.access import LOCAL, Principal, hide_inside, rows_of
from kansoku.app.web_memory import Memory
from kansoku.catalog import Cluster
from kansoku.errors import KansokuError
from kansoku.model import table_schema
from kansoku.store import Filters, LocalStore, Matchers

__all__ = ["Reading", "RefusedError"]


class RefusedError(KansokuError):
    """The reader may not see this: answered with 403."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The store as one principal sees it."""

    store: LocalStore
    principal: Principal = LOCAL
    clock_ns: Callable[[], int] = time.time_ns
    statistics: Callable[[], dict[str, Any]] | None = None
    """Counts of every stage of the server."""
    cluster: Cluster | None = None
    """The cluster file the server was given."""
    memory: Memory = field(default_factory=Memory)
    """What was computed a moment ago; keys must not let one reader see another's."""
    asked: dict[Hashable, Any] = field(default_factory=dict)
    """Answers within one request, which asks for the same run more than once."""

    @property
    def folder(self) -> Path:
        """The store's folder: job history lies beside the rows."""
        return self.store.folder

    @property
    def sees_all(self) -> bool:
        """Whether the reader sees every job, node and the fabric."""
        return rows_of(self.principal) is None

    def need_all(self) -> None:
        """Raise RefusedError for those who see only their own jobs."""
        if not self.sees_all:
            raise RefusedError("this page is for operators: a tenant sees its own jobs")

    def table(
        self,
        name: str,
        since_ns: int | None = None,
        until_ns: int | None = None,
        filters: Filters | None = None,
        *,
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return rows of a table in time order; with a limit, the newest."""
        where = (rows_of(self.principal) or {}).get(name, "true")
        frame = self.store.table(name, since_ns, until_ns, filters, limit=limit, where=where)
        return hide_inside(frame, self.principal, self._consents())

    def query(self, name: str, **params: Any) -> pl.DataFrame:
        """Return the answer of a named query."""
        frame = self.store.query(name, allowed=rows_of(self.principal), **params)
        return hide_inside(frame, self.principal, self._consents())

    def jobs(self, since_ns: int | None = None, until_ns: int | None = None) -> pl.DataFrame:
        """Return jobs that waited or ran in the window, newest version of each incarnation.

        Columns of the jobs table, from the imported history and from rows that were sent; the
        newest submission first. A tenant gets its own.
        """
        names = list(table_schema("jobs"))
        frames = [self.query("jobs").select(names)]
        if (self.folder / "job-history").is_dir():
            from kansoku.app.jobs._context import open_history

            lazy = open_history(self.folder).scan("jobs").select(names)
            frames.insert(0, lazy.filter(_overlaps(since_ns, until_ns)).collect())
        found = pl.concat(frames).filter(_overlaps(since_ns, until_ns))
        if not self.sees_all:
            who = self.principal
            found = found.filter(
                (pl.col("user") == (who.user or "\0")).fill_null(value=False)
                | pl.col("account").is_in(list(who.accounts)).fill_null(value=False)
            )
        return found.unique(
            ["cluster", "raw_id", "submit_ns", "job_id"], keep="first", maintain_order=True
        ).sort("submit_ns", descending=True, nulls_last=True)

    def metric_range(
        self,
        metric: str,
        matchers: Matchers = None,
        *,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        aggregate: str = "avg",
        by: Sequence[str] | None = None,
        across: str = "avg",
    ) -> pl.DataFrame:
        """Return ``labels, time_ns, value`` of a metric; for those who see every node."""
        self.need_all()
        return self.store.metric_range(
            metric, matchers, start_ns=start_ns, end_ns=end_ns, step_ns=step_ns,
            aggregate=aggregate, by=by, across=across,
        )  # fmt: skip

    def latest(
        self, metric: str, matchers: Matchers = None, *, at_ns: int | None = None
    ) -> pl.DataFrame:
        """Return each series' last sample; for those who see every node."""
        self.need_all()
        return self.store.latest(metric, matchers, at_ns=at_ns)

    def job_metric_range(
        self,
        metric: str,
        job: str,
        *,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        aggregate: str = "avg",
        by: Sequence[str] | None = None,
        across: str = "avg",
    ) -> pl.DataFrame:
        """Return a metric of a job's nodes while it ran; a tenant may ask for its own jobs.

        Raises InputError where there is no such job or its nodes were shared.
        """
        from kansoku.app.serve.jobs import job_window

        where = (rows_of(self.principal) or {}).get("jobs", "true")
        window = job_window(self.store, job, where=where, now_ns=self.clock_ns())
        since, until = window.clip(start_ns, end_ns)
        if not self.sees_all:
            # Whole steps inside the job only: a step that began before shows others' load.
            since, until = -(-since // step_ns) * step_ns, until // step_ns * step_ns
        if since >= until:
            return pl.DataFrame(
                schema={"labels": pl.String, "time_ns": pl.Int64, "value": pl.Float64}
            )
        return self.store.metric_range(
            metric, window.matchers, start_ns=since, end_ns=until, step_ns=step_ns,
            aggregate=aggregate, by=by, across=across,
        )  # fmt: skip

    def _consents(self) -> Mapping[str, bool | None]:
        if self.principal.role != "operator":
            return {}
        consents: dict[str, bool | None] = {}
        for row in self.store.owners():
            consents[row[0]] = row[4] if row[4] is not None else consents.get(row[0])
        return consents


def _overlaps(since_ns: int | None, until_ns: int | None) -> pl.Expr:
    inside = pl.lit(value=True)
    if since_ns is not None:
        inside &= pl.col("end_ns").is_null() | (pl.col("end_ns") > since_ns)
    if until_ns is not None:
        inside &= pl.coalesce("submit_ns", "start_ns").fill_null(until_ns) < until_ns
    return inside
