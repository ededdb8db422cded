"""The fabric controller as part of the server: its routes, and its windows in the store."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from kansoku.app.serve.access import Access
from kansoku.catalog import Cluster
from kansoku.store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from kansoku.fabric.controller import Outcome
    from kansoku.fabric.edge.http import FabricService

__all__ = ["fabric_counts", "fabric_service", "has_fabric"]


def has_fabric(cluster: Cluster | None) -> bool:
    """Return whether a cluster file says which RNIC hangs on which leaf."""
    return cluster is not None and cluster.fabric is not None and bool(cluster.fabric.leaves)


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

    def keep(outcome: "Outcome") -> None:
        # Without any agent there is nothing to say: not even that nothing is at fault.
        if service.controller.members():
            tables = outcome_tables(service.controller, outcome)
            store.commit({name: frame for name, frame in tables.items() if frame.height})

    service = make_service(
        cluster, settings=policy, switches=switches, on_outcome=keep, refuse=refuse,
        clock=clock_ns,
    )  # fmt: skip
    return service


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
