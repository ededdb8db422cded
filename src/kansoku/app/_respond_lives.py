"""How nodes' lives are shown: JSON and a table."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kansoku.diagnose.life import NodeLife, Stage
from kansoku.view import Column, Table, Tone

__all__ = ["lives_json", "lives_table"]


def lives_json(lives: Mapping[str, NodeLife]) -> list[dict[str, Any]]:
    """Return each node's stage, recurrences and events as plain data."""
    return [
        {
            "node": life.node,
            "stage": str(life.stage),
            "times_out": len(life.out_ns),
            "out_s": round(life.out_for_ns / 1e9, 1),
            "events": [
                {"time_ns": time_ns, "event": str(stage), "reason": reason}
                for time_ns, stage, reason in life.events
            ],
        }
        for _, life in sorted(lives.items())
    ]


def _day(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")


def lives_table(lives: Mapping[str, NodeLife]) -> Table:
    """Return where each node stands."""
    shown = [life for _, life in sorted(lives.items())]
    rows = []
    for life in shown:
        time_ns, _, reason = life.events[-1]
        rows.append(
            (life.node, str(life.stage).replace("_", " "), len(life.out_ns), _day(time_ns), reason)
        )
    return Table(
        title="Nodes",
        columns=[
            Column(title="node"), Column(title="stage"), Column(title="times out", numeric=True),
            Column(title="since (UTC)"), Column(title="why"),
        ],
        rows=rows,
        tones=[Tone.PLAIN if life.stage is Stage.RETURNED else Tone.NOTICE for life in shown],
    )  # fmt: skip
