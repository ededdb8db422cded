"""Telemetry health: what arrives, from whom, how late, what was dropped."""

import json
from collections.abc import Mapping
from typing import Any

from kansoku.app.web_fleet._nodes import STALE_NS, natural
from kansoku.app.web_fleet._window import stamp
from kansoku.app.web_page import Card, Cards, Missing, Page, Screen, ScreenBlock
from kansoku.app.web_reading import Reading
from kansoku.jobs.edge.promql import node_of
from kansoku.model import TABLES
from kansoku.view import Column, Sentence, Table, Tone

__all__ = ["HEALTH"]

_RATE_NS = 300 * 10**9


def _latest(reading: Reading, metric: str) -> list[tuple[dict[str, str], int, float]]:
    frame = reading.latest(metric)
    return [
        (json.loads(text), time_ns, value)
        for text, time_ns, value in frame.select("labels", "time_ns", "value").iter_rows()
    ]


def _grown(reading: Reading, metric: str, now_ns: int) -> dict[str, float]:
    """Return each node's growth of a counter over the last five minutes."""
    frame = reading.metric_range(
        metric, start_ns=now_ns - _RATE_NS, end_ns=now_ns, step_ns=_RATE_NS, aggregate="increase",
        by=["host.name"], across="sum",
    )  # fmt: skip
    found: dict[str, float] = {}
    for text, value in frame.select("labels", "value").iter_rows():
        node = node_of(json.loads(text))
        if node is not None and value is not None:
            found[node] = found.get(node, 0.0) + value
    return found


def _agents(reading: Reading, now_ns: int) -> list[dict[str, Any]]:
    """Return one row per node that ever sent: heard, late, rate, drops, cost, failures."""
    heard: dict[str, int] = {}
    for metric in ("kansoku.agent.samples", "hw.power"):
        for labels, time_ns, _ in _latest(reading, metric):
            node = node_of(labels)
            if node is not None:
                heard[node] = max(heard.get(node, 0), time_ns)
    for text in reading.store.series("kansoku.agent.samples")["labels"]:
        node = node_of(json.loads(text))
        if node is not None:
            heard.setdefault(node, 0)
    samples = _grown(reading, "kansoku.agent.samples", now_ns)
    dropped = _grown(reading, "kansoku.agent.dropped", now_ns)
    cpu = _grown(reading, "kansoku.agent.cpu.time", now_ns)
    memory = {
        node_of(labels): value
        for labels, _, value in _latest(reading, "kansoku.agent.memory.usage")
    }
    failing: dict[str, list[str]] = {}
    for labels, time_ns, value in _latest(reading, "kansoku.agent.collector.last_success"):
        node = node_of(labels)
        if node is not None and time_ns / 1e9 - value > STALE_NS / 1e9:
            failing.setdefault(node, []).append(labels.get("kansoku.collector", "?"))
    return [
        {
            "node": node,
            "heard_ns": heard[node] or None,
            "late_s": (now_ns - heard[node]) / 1e9 if heard[node] else None,
            "samples_per_s": samples[node] / (_RATE_NS / 1e9) if node in samples else None,
            "dropped": dropped.get(node),
            "cpu_ratio": cpu[node] / (_RATE_NS / 1e9) if node in cpu else None,
            "memory_bytes": memory.get(node),
            "failing": sorted(failing.get(node, [])),
        }
        for node in sorted(heard, key=natural)
    ]


def _health(reading: Reading, _values: Mapping[str, str]) -> Screen:
    reading.need_all()
    now_ns = reading.clock_ns()
    agents = _agents(reading, now_ns)
    statistics = reading.statistics() if reading.statistics is not None else {}
    late = [a for a in agents if a["late_s"] is None or a["late_s"] > STALE_NS / 1e9]
    drops = [a for a in agents if a["dropped"]]
    expected = {n.name for n in reading.cluster.nodes} if reading.cluster else set()
    never = sorted(expected - {a["node"] for a in agents}, key=natural)
    store = statistics.get("store", {})
    process = statistics.get("process", {})
    rate = sum(a["samples_per_s"] or 0.0 for a in agents)
    blocks: list[ScreenBlock] = [
        Cards(
            cards=(
                Card(
                    label="Agents heard", value=f"{len(agents) - len(late)} of {len(agents)}",
                    note=f"{len(never)} nodes never sent" if never else None,
                    tone=Tone.NOTICE if late or never else Tone.PLAIN,
                ),
                Card(label="Samples from agents", value=f"{rate:,.0f} /s"),
                Card(
                    label="Agents that drop", value=str(len(drops)),
                    tone=Tone.BAD if drops else Tone.GOOD, note="in the last five minutes",
                ),
                Card(label="Rows kept", value=f"{store.get('rows_kept', 0):,}",
                     note=f"{store.get('rows_pending', 0):,} waiting"),
                *_commits_lost(store),
                Card(label="On disk", value=_gib(store.get("disk_bytes"))),
                Card(label="Memory of the server", value=_gib(process.get("memory_bytes"))),
            )
        )
    ]  # fmt: skip
    if agents:
        blocks.append(_agent_table(agents))
    else:
        blocks.append(
            Missing(
                text="No agent has sent anything.",
                remedy="Start one on every node; anything that speaks OTLP may send too.",
                command="kansoku agent --to http://THIS-SERVER:4318",
            )
        )
    if never:
        blocks.append(
            Sentence(
                text=f"{len(never)} nodes of the cluster file never sent anything.",
                detail=", ".join(f"node:{name}" for name in never[:40]),
                tone=Tone.NOTICE,
            )
        )
    arrivals = _arrivals(reading)
    blocks += [arrivals, *_server(statistics), _metrics(reading)]
    return Screen(
        title="Telemetry health",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.health/1",
            "time": stamp(now_ns),
            "agents": agents,
            "never": never,
            "server": statistics,
            "tables": [dict(zip(("table", "newest", "late_s"), r, strict=False))
                       for r in arrivals.rows],
        },
        live=("metrics", "events", "spans", "steps"),
    )  # fmt: skip


def _commits_lost(store: Mapping[str, Any]) -> list[Card]:
    """Return the card of what a damaged log took; none where the store counts no such thing."""
    lost = store.get("commits_lost")
    if lost is None:
        return []
    return [
        Card(
            label="Commits lost", value=f"{lost:,}", tone=Tone.BAD if lost else Tone.GOOD,
            note="the log was damaged when the store opened; a copy of it is kept"
            if lost
            else "when the store opened",
        )
    ]  # fmt: skip


def _gib(value: object) -> str:
    if not isinstance(value, int | float):
        return "–"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _agent_table(agents: list[dict[str, Any]]) -> Table:
    rows = [
        [a["node"], stamp(a["heard_ns"]), None if a["late_s"] is None else round(a["late_s"], 1),
         None if a["samples_per_s"] is None else round(a["samples_per_s"], 1),
         None if a["dropped"] is None else round(a["dropped"]),
         None if a["cpu_ratio"] is None else f"{a['cpu_ratio']:.1%}",
         None if a["memory_bytes"] is None else round(a["memory_bytes"] / 2**20),
         ", ".join(a["failing"]) or None]
        for a in agents
    ]  # fmt: skip
    tones = [
        Tone.BAD
        if a["dropped"]
        else Tone.NOTICE
        if a["failing"] or a["late_s"] is None or a["late_s"] > STALE_NS / 1e9
        else Tone.PLAIN
        for a in agents
    ]
    return Table(
        title="Agents",
        columns=[
            Column(title="node", link="/nodes/{}"), Column(title="last heard"),
            Column(title="late, s", numeric=True), Column(title="samples/s", numeric=True),
            Column(title="dropped in 5 min", numeric=True), Column(title="CPU", numeric=True),
            Column(title="memory, MiB", numeric=True), Column(title="collectors that fail"),
        ],
        rows=rows,
        tones=tones,
        note="Late: since the newest sample. CPU and memory are the agent's own.",
    )  # fmt: skip


def _arrivals(reading: Reading) -> Table:
    """Return each table's newest row."""
    now_ns = reading.clock_ns()
    rows: list[list[str | float | None]] = []
    for name, table in TABLES.items():
        if name == "metrics":
            newest = _newest_sample(reading)
        else:
            frame = reading.store.table(name, limit=1)
            newest = frame[table.time_column].to_list()[-1] if len(frame) else None
        late = None if newest is None else round((now_ns - newest) / 1e9, 1)
        rows.append([name, stamp(newest), late, table.row])
    return Table(
        title="What arrives",
        columns=[
            Column(title="table"), Column(title="newest row"),
            Column(title="late, s", numeric=True),
            Column(title="one row is"),
        ],
        rows=rows,
    )  # fmt: skip


def _newest_sample(reading: Reading) -> int | None:
    newest = [
        value
        for metric in ("kansoku.agent.samples", "hw.power", "system.cpu.time")
        if isinstance(value := reading.store.latest(metric)["time_ns"].max(), int)
    ]
    return max(newest, default=None)


def _server(statistics: Mapping[str, Any]) -> list[ScreenBlock]:
    """Return the server's own counters: intake and store, flat."""
    rows: list[list[str | int | float | None]] = []
    for part in ("intake", "store", "process"):
        for name, value in statistics.get(part, {}).items():
            if isinstance(value, Mapping):
                rows += [[part, f"{name}: {key}", one] for key, one in value.items()]
            elif isinstance(value, int | float):
                rows.append([part, name.replace("_", " "), value])
    if not rows:
        return []
    return [
        Table(
            title="The server's own counts",
            columns=[
                Column(title="part"),
                Column(title="what"),
                Column(title="count", numeric=True),
            ],
            rows=rows,
        )
    ]


def _metrics(reading: Reading) -> ScreenBlock:
    frame = reading.store.metrics().sort("series", descending=True)
    if frame.is_empty():
        return Sentence(text="No metric is known yet.", tone=Tone.MUTED)
    return Table(
        title="Metrics",
        columns=[Column(title="metric"), Column(title="unit"), Column(title="kind"),
                 Column(title="series", numeric=True), Column(title="meaning")],
        rows=[
            [r["metric"], r["unit"], r["kind"], r["series"],
             r["description"] or _meaning(r["metric"])]
            for r in frame.iter_rows(named=True)
        ],
    )  # fmt: skip


def _meaning(name: str) -> str | None:
    from kansoku.catalog.metrics import metrics

    known = metrics().get(name)
    return None if known is None else known.meaning


HEALTH = Page(
    path="/health",
    title="Telemetry",
    build=_health,
    navigation=90,
    operators_only=True,
)
