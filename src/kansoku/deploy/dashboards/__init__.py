"""Grafana dashboards as typed code, for the 11.6 schema."""

import json
from importlib import metadata
from typing import Any

from kansoku.errors import DependencyError

__all__ = ["dashboards"]

_SCHEMA = "11.6"
_DEVELOPER_WORKLOAD, _DEVELOPER_RESOURCE = "developer workload", "developer resource"
_OPERATOR_WORKLOAD, _OPERATOR_RESOURCE = "operator workload", "operator resource"
_VIEWS = {
    "kansoku-cluster": (_OPERATOR_WORKLOAD, _OPERATOR_RESOURCE),
    "kansoku-job": (_DEVELOPER_WORKLOAD, _DEVELOPER_RESOURCE, _OPERATOR_WORKLOAD),
    "kansoku-node": (_DEVELOPER_RESOURCE, _OPERATOR_RESOURCE),
    "kansoku-gpu": (_DEVELOPER_RESOURCE, _OPERATOR_RESOURCE),
    "kansoku-nic": (_OPERATOR_RESOURCE,),
    "kansoku-storage": (_DEVELOPER_RESOURCE, _OPERATOR_RESOURCE),
    "kansoku-slurm": (_OPERATOR_WORKLOAD,),
    "kansoku-fabric": (_OPERATOR_RESOURCE,),
    "kansoku-bursts": (_OPERATOR_RESOURCE,),
    "kansoku-incidents": (_OPERATOR_WORKLOAD,),
    "kansoku-telemetry": (_OPERATOR_RESOURCE,),
}
"""Which of the four views a dashboard serves: its tags in Grafana's search."""


def dashboards() -> dict[str, dict[str, Any]]:
    """Return every dashboard by file name, as the JSON that Grafana reads.

    Raises DependencyError where the ``grafana`` extra is missing or of another schema.
    """
    _check_sdk()
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    from kansoku.deploy.dashboards import machine, network, operation, overview

    made = {
        "kansoku-cluster": overview.cluster(),
        "kansoku-job": overview.job(),
        "kansoku-node": machine.node(),
        "kansoku-gpu": machine.gpu(),
        "kansoku-nic": network.nic(),
        "kansoku-storage": machine.storage(),
        "kansoku-slurm": operation.slurm(),
        "kansoku-fabric": network.fabric(),
        "kansoku-bursts": network.bursts(),
        "kansoku-incidents": operation.incidents(),
        "kansoku-telemetry": operation.telemetry(),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, board in made.items():
        found[name] = json.loads(JSONEncoder().encode(board.build()))
        found[name]["tags"] += _VIEWS[name]
        _place(found[name]["panels"])
    return found


_GRID = 24


def _place(panels: list[dict[str, Any]]) -> None:
    """Give panels their numbers and set them left to right, a new row where the next one has no room.

    The SDK's own placing lets a wide panel hang over the right edge.
    """
    x = y = row = 0
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
        at = panel["gridPos"]
        if x + at["w"] > _GRID:
            x, y, row = 0, y + row, 0
        at["x"], at["y"] = x, y
        x, row = x + at["w"], max(row, at["h"])


def _check_sdk() -> None:
    remedy = "pip install 'kansoku[grafana]', or --no-dashboards"
    try:
        version = metadata.version("grafana-foundation-sdk")
    except metadata.PackageNotFoundError:
        raise DependencyError(
            "dashboards need the package grafana-foundation-sdk", remedy=remedy
        ) from None
    if not version.rpartition("!")[2].startswith(f"{_SCHEMA}."):
        raise DependencyError(
            f"grafana-foundation-sdk {version} writes another schema than Grafana {_SCHEMA}'s",
            remedy=remedy,
        )
