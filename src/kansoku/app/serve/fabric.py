"""The fabric controller as part of the server: its routes, and its windows in the store."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from starlette.requests import Request

from kansoku.app.serve.access import Access
from kansoku.catalog import Cluster
from kansoku.model import table_schema
from kansoku.store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from kansoku.fabric.controller import Outcome
    from kansoku.fabric.edge.http import FabricService

__all__ = ["Inherited", "fabric_counts", "fabric_service", "has_fabric"]


_CLEAR_WINDOWS = 3


def has_fabric(cluster: Cluster | None) -> bool:
    """Return whether a cluster file says which RNIC hangs on which leaf."""
    if cluster is None or cluster.fabric is None or not cluster.fabric.leaves:
        return False
    return any(node.kind.fabric_nics for node in cluster.nodes)


def fabric_service(
    cluster: Cluster,
    settings: Path | None,
    *,
    store: LocalStore,
    access: Access,
    clock_ns: "Callable[[], int]",
) -> "FabricService":
    """Return the controller of a cluster; its windows go to the store.

    Who may send (agents, operators) registers, fetches pinglists and reports; the verdict is for
    those who see the whole machine. Raises ConfigurationError for a file of settings that cannot
    be read.
    """
    from kansoku.app.fabric import load_settings, make_service, outcome_tables

    policy, switches = load_settings(settings)

    def refuse(request: Request, does: str) -> tuple[int, str] | None:
        principal = access.identify(
            request.headers.get("authorization"), request.scope.get("kansoku.certificate")
        )
        if principal is None:
            return 401, "a bearer token or client certificate is needed"
        allowed = principal.may_send if does == "send" else principal.role in {"local", "operator"}
        return None if allowed else (403, f"role {principal.role} may not do this")

    inherited = Inherited(store.query("findings"))

    def keep(outcome: "Outcome") -> None:
        # Without any agent there is nothing to say: not even that nothing is at fault.
        if service.controller.members():
            tables = outcome_tables(service.controller, outcome)
            closed = inherited.judge(outcome.analysis.verdict, outcome.window.end_ns)
            tables["findings"] = pl.concat([tables["findings"], closed])
            store.commit({name: frame for name, frame in tables.items() if frame.height})

    service = make_service(
        cluster, settings=policy, switches=switches, on_outcome=keep, refuse=refuse,
        clock=clock_ns,
    )  # fmt: skip
    return service


class Inherited:
    """Findings that a controller left open when the server ended.

    The one that starts knows nothing of them, so nobody would ever close what healed meanwhile.
    They are closed after :data:`_CLEAR_WINDOWS` clear windows in a row; what is still at fault is
    found anew before.
    """

    def __init__(self, findings: pl.DataFrame) -> None:
        """Take the answer of the query ``findings``."""
        mine = (pl.col("source") == "fabric") & (pl.col("verdict") == "found")
        self._open = findings.filter(mine)
        self._clear = 0

    def judge(self, verdict: str, time_ns: int) -> pl.DataFrame:
        """Return rows of ``findings`` that a window closes; empty until it is sure."""
        self._clear = self._clear + 1 if verdict == "clear" else 0
        rows = self._open.clear()
        if self._clear >= _CLEAR_WINDOWS and not self._open.is_empty():
            sentence = pl.col("subject") + " is not at fault any more: seen anew, network cleared"
            rows = self._open.with_columns(
                time_ns=pl.lit(time_ns, pl.Int64), verdict=pl.lit("none"),
                severity=pl.lit("info"), sentence=sentence,
            )  # fmt: skip
            self._open = self._open.clear()
        return rows.select(list(table_schema("findings")))


def fabric_counts(service: "FabricService") -> dict[str, Any]:
    """Return what the controller counts of itself, for the server's statistics."""
    controller = service.controller
    return {
        "rnics": len(controller.topology.rnics),
        "registered": len(controller.members()),
        "windows": len(controller.history),
        "strangers": controller.strangers,
        "refused_reports": service.refused,
        "failures": service.failures,
        "analysis_s": service.analysis_s,
    }
