"""Cluster: what every GPU and NIC does over time, what is free, what is wrong; and one node."""

from collections.abc import Callable, Mapping

import numpy as np
import polars as pl

from kansoku.app.web_columns import heatmap_columns
from kansoku.app.web_fleet._heat import COLUMNS, HEAT, Heat, heat, hottest
from kansoku.app.web_fleet._nodes import Fleet, NodeNow, fleet_now, open_incidents
from kansoku.app.web_fleet._window import (
    WINDOW_PARAMETERS,
    Span,
    stamp,
    window_choices,
    window_of,
)
from kansoku.app.web_page import (
    Card,
    Cards,
    Choice,
    Choices,
    Columns,
    Grid,
    GridCell,
    Missing,
    MissingError,
    Page,
    Parameter,
    Remote,
    Screen,
    ScreenBlock,
    domain_words,
)
from kansoku.app.web_reading import Reading
from kansoku.view import Column, Facts, Heatmap, HeatmapBox, Sentence, Table, Tone

__all__ = ["CLUSTER", "NODE"]

_QUANTITY = Parameter(
    name="quantity", meaning="what the colours show", default="power", choices=tuple(HEAT)
)
S = 1_000_000_000


def _newest(reading: Reading) -> int | None:
    """Return the time of the newest GPU sample, for pages whose window is empty."""
    frame = reading.store.latest("hw.power")
    value = frame["time_ns"].max() if len(frame) else None
    return value if isinstance(value, int) else None


def _cluster(reading: Reading, values: Mapping[str, str]) -> Screen:
    reading.need_all()
    span = window_of(values, reading.clock_ns())
    kind = HEAT[values["quantity"]]
    fleet = fleet_now(reading, span.until_ns)
    blocks: list[ScreenBlock] = [_cards(fleet)]
    blocks.append(
        Choices(
            choices=(
                Choice(
                    name="quantity", label="Colour",
                    options=tuple((k.name, k.title) for k in HEAT.values()),
                    value=kind.name,
                ),
                *window_choices(values),
            )
        )
    )  # fmt: skip
    has_series = len(reading.store.series(kind.metric)) > 0
    if has_series or reading.cluster is not None:
        blocks.append(
            Remote(
                title=f"{kind.title} of every {'NIC' if kind.name in {'nic', 'pfc'} else 'GPU'}",
                name="heat",
                note="Rows are devices by node, columns are time; frames are jobs.",
            )
        )
    if not has_series:
        blocks.append(
            Missing(
                text=f"No {kind.title} has arrived.",
                remedy="The node agent sends it; start one on every node.",
                command="kansoku agent --to http://THIS-SERVER:4318",
            )
        )
    incidents = open_incidents(reading)
    blocks += _incidents(incidents)
    if fleet.nodes:
        silent = fleet.silent()
        blocks.append(
            Grid(
                title="Nodes",
                cells=[_node_cell(node, silent) for node in fleet.nodes],
                note="Green: holds a job. Grey: idle. Yellow: not heard for five minutes. "
                "Red: out of service or with an open incident.",
            )
        )
    blocks.append(_windows(fleet))
    return Screen(
        title="Cluster" if reading.cluster is None else f"Cluster {reading.cluster.title}",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.cluster/1",
            "window": span.to_json(),
            "quantity": kind.name,
            "nodes": [_node_json(node) for node in fleet.nodes],
            "free": _free_json(fleet),
            "incidents": incidents.to_dicts(),
        },
        live=("metrics", "jobs", "incidents") if span.now else (),
    )


def _free_json(fleet: Fleet) -> dict[str, object]:
    return {
        "time": stamp(fleet.time_ns),
        "nodes": fleet.free.nodes,
        "usable": fleet.free.usable,
        "idle": list(fleet.free.idle),
        "reserved": list(fleet.free.reserved),
        "gpus": fleet.free.gpus,
        "gpus_free": fleet.free.gpus_free,
        "windows": [
            {"from": stamp(w.from_ns), "until": stamp(w.until_ns), "nodes": w.nodes}
            for w in fleet.windows
        ],
    }


def _cards(fleet: Fleet) -> Cards:
    free, silent = fleet.free, fleet.silent()
    watts = [n.watts for n in fleet.nodes if n.watts is not None]
    troubled = sum(bool(n.incidents) for n in fleet.nodes)
    return Cards(
        cards=(
            Card(
                label="Nodes in service",
                value=f"{free.usable} of {free.nodes}",
                note=f"{len(silent)} not heard" if silent else "all heard",
                tone=Tone.NOTICE if silent or free.usable < free.nodes else Tone.PLAIN,
            ),
            Card(
                label="GPUs free now",
                value=f"{free.gpus_free} of {free.gpus}",
                note=f"{len(free.idle)} nodes idle",
            ),
            Card(
                label="Jobs",
                value=f"{fleet.running} running",
                note=f"{fleet.pending} pending",
                link="/jobs",
            ),
            Card(
                label="GPU power",
                value=f"{sum(watts) / 1e3:,.1f} kW" if watts else "–",
                note=f"{len(watts)} nodes report" if watts else "no samples",
            ),
            Card(
                label="Nodes with incidents",
                value=str(troubled),
                tone=Tone.BAD if troubled else Tone.GOOD,
                link="/incidents",
            ),
        )
    )


def _tone(node: NodeNow, silent: frozenset[str]) -> Tone:
    if node.incidents or not node.usable:
        return Tone.BAD
    if node.name in silent:
        return Tone.NOTICE
    return Tone.GOOD if node.jobs else Tone.MUTED


def _node_cell(node: NodeNow, silent: frozenset[str]) -> GridCell:
    tone = _tone(node, silent)
    states = {Tone.BAD: "out of service", Tone.NOTICE: "not heard", Tone.MUTED: "idle"}
    parts = []
    if node.incidents:
        count = len(node.incidents)
        parts.append(f"{count} open incident{'s' * (count != 1)}")
    elif tone in states:
        parts.append(states[tone])
    if node.slurm:
        parts.append(", ".join(node.slurm).lower())
    parts += [f"job {job}" for job in node.jobs[:3]]
    if node.watts is not None:
        parts.append(f"{node.watts:,.0f} W")
    return GridCell(
        label=node.name, text="; ".join(parts) or "idle", tone=tone, link=f"/nodes/{node.name}"
    )


def _node_json(node: NodeNow) -> dict[str, object]:
    return {
        "name": node.name,
        "slurm": list(node.slurm),
        "usable": node.usable,
        "jobs": list(node.jobs),
        "gpus": node.gpus,
        "power_w": node.watts,
        "heard": stamp(node.heard_ns or None),
        "incidents": list(node.incidents),
        "reserved": node.reserved,
    }


def _incidents(incidents: pl.DataFrame) -> list[ScreenBlock]:
    if incidents.is_empty():
        return [Sentence(text="No open incident.", tone=Tone.GOOD)]
    rows = [
        [row["id"], row["kind"], row["subject"], domain_words(row["domain"]),
         stamp(row["onset_ns"]), row["state"]]
        for row in incidents.head(8).iter_rows(named=True)
    ]  # fmt: skip
    return [
        Table(
            title="Open incidents",
            columns=[
                Column(title="incident", link="/incidents/{}"), Column(title="kind"),
                Column(title="subject"), Column(title="domain"), Column(title="onset"),
                Column(title="state"),
            ],
            rows=rows,
            tones=[Tone.BAD] * len(rows),
        )
    ]  # fmt: skip


def _windows(fleet: Fleet) -> ScreenBlock:
    if not fleet.windows:
        return Sentence(text="No node becomes free within a week, by the jobs' time limits.")
    return Table(
        title="Free capacity now and next, by the jobs' time limits",
        columns=[Column(title="from"), Column(title="until"), Column(title="nodes", numeric=True)],
        rows=[
            [stamp(w.from_ns), stamp(w.until_ns) or "no end known", w.nodes]
            for w in fleet.windows[:12]
        ],
    )


def _heat_columns(reading: Reading, values: Mapping[str, str]) -> Columns:
    reading.need_all()
    span = window_of(values, reading.clock_ns())
    kind = HEAT[values["quantity"]]
    # A column's worth of time passes before the picture changes to the eye.
    age_s = min(max(span.step_ns(COLUMNS) / S / 4, 1.5), 15.0)

    def make(_: Columns | None) -> tuple[Columns, int]:
        found = _drawn(heat(reading, kind, span), span)
        return found, 200_000  # the cells themselves are counted where they are kept

    key = ("drawn", kind.name, values["window"], values.get("until"))
    return reading.memory.get(key, age_s, make)


def _drawn(found: Heat, span: Span) -> Columns:
    matrix, kind = found.matrix, found.kind
    known = matrix.values[np.isfinite(matrix.values)]
    silent = int((~np.isfinite(matrix.values)).all(axis=1).sum()) if matrix.rows else 0
    high = kind.high
    if high is None and known.size:
        # A few wild samples must not wash the colours out.
        high = float(np.percentile(known[:: max(known.size // 200_000, 1)], 99.8))
    summary = [
        (
            f"{len(matrix.rows)} rows on {len(found.groups)} nodes, {stamp(span.since_ns)} to "
            f"{stamp(span.until_ns)}, {matrix.step_ns / 1e9:g} s a column."
        ),
        f"{len({box.label for box in matrix.boxes})} jobs are drawn.",
        f"{silent} rows have no data at all.",
    ]
    block = Heatmap(
        title=kind.title,
        row_labels=["/".join(part for part in row if part) for row in matrix.rows],
        column_labels=[],
        column_times_ns=matrix.times_ns.tolist(),
        values=matrix.values,  # type: ignore[arg-type] # an array serves
        unit=kind.unit,
        low=kind.low,
        high=max(high or 1.0, kind.low + 1e-9),
        boxes=[
            HeatmapBox(
                label=box.label, row_from=box.row_from, row_to=box.row_to,
                column_from=box.column_from, column_to=box.column_to,
            )
            for box in matrix.boxes
        ],
        row_title="device",
        column_title="time",
    )  # fmt: skip
    return heatmap_columns(
        block,
        links={"row": "/nodes/{node}"},
        alternative=hottest(found),
        summary=summary,
        groups=found.groups,
        box_links=[f"/jobs/{box.label}" for box in matrix.boxes],
        scheme=kind.scheme,
    )


CLUSTER = Page(
    path="/cluster",
    title="Cluster",
    build=_cluster,
    columns={"heat": _heat_columns},
    parameters=(_QUANTITY, *WINDOW_PARAMETERS),
    navigation=10,
    operators_only=True,
)


# One node


def _node(reading: Reading, values: Mapping[str, str]) -> Screen:
    reading.need_all()
    span = window_of(values, reading.clock_ns())
    fleet = fleet_now(reading, span.until_ns)
    name = values["node"]
    node = next((one for one in fleet.nodes if one.name == name), None)
    if node is None:
        raise MissingError(
            f"no node {name!r} is known here", remedy="see the names on the cluster page"
        )
    facts = [
        ("State", _state(node, fleet.silent())),
        ("GPUs", str(node.gpus) if node.gpus is not None else "unknown"),
        ("GPU power", "–" if node.watts is None else f"{node.watts:,.0f} W"),
        ("Last heard", stamp(node.heard_ns or None) or "never"),
        ("Jobs now", ", ".join(f"job:{job}" for job in node.jobs) or "none"),
    ]
    jobs = _node_jobs(reading, name, span)
    events = _node_events(reading, name, span)
    incidents = open_incidents(reading).filter(pl.col("id").is_in(list(node.incidents)))
    blocks: list[ScreenBlock] = [
        Facts(items=facts),
        *(_incidents(incidents) if node.incidents else ()),
        Choices(choices=window_choices(values)),
        *(
            Remote(title=HEAT[one].title, name=one)
            for one in HEAT
            if len(reading.store.series(HEAT[one].metric, {"host.name": name}))
        ),
        Table(
            title="Jobs on this node",
            columns=[
                Column(title="job", link="/jobs/{}"), Column(title="name"), Column(title="user"),
                Column(title="state"), Column(title="start"), Column(title="end"),
                Column(title="nodes", numeric=True),
            ],
            rows=jobs,
        )
        if jobs
        else Sentence(text="No job held this node in the window.", tone=Tone.MUTED),
        Table(
            title="Events of this node",
            columns=[Column(title="time"), Column(title="severity"), Column(title="kind"),
                     Column(title="subject"), Column(title="text")],
            rows=events,
        )
        if events
        else Sentence(text="No event of this node in the window.", tone=Tone.MUTED),
    ]  # fmt: skip
    return Screen(
        title=f"Node {name}",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.node/1",
            "window": span.to_json(),
            "node": _node_json(node),
            "jobs": jobs,
            "events": events,
        },
        trail=(("Cluster", "/cluster"),),
        live=("metrics", "events", "incidents") if span.now else (),
    )


def _state(node: NodeNow, silent: frozenset[str]) -> str:
    if node.slurm:
        return ", ".join(node.slurm).lower()
    if node.name in silent:
        return "not heard"
    return "holds a job" if node.jobs else "idle"


def _node_jobs(reading: Reading, name: str, span: Span) -> list[list[str | int | None]]:
    from kansoku.app.web_fleet._nodes import _nodes

    frame = reading.jobs(span.since_ns, span.until_ns).filter(pl.col("node_list").is_not_null())
    return [
        [row["job_id"], row["name"], row["user"], row["state"], stamp(row["start_ns"]),
         stamp(row["end_ns"]), row["nodes"]]
        for row in frame.iter_rows(named=True)
        if name in _nodes(row["node_list"])
    ][:200]  # fmt: skip


def _node_events(reading: Reading, name: str, span: Span) -> list[list[str | None]]:
    frame = reading.table("events", span.since_ns, span.until_ns, limit=20_000)
    mine = frame.filter(
        (pl.col("subject") == f"node:{name}")
        | pl.col("subject").str.starts_with(f"gpu:{name}/")
        | pl.col("subject").str.starts_with(f"nic:{name}/")
    )
    return [
        [stamp(row["time_ns"]), row["severity"], row["kind"], row["subject"], row["body"]]
        for row in mine.tail(200).reverse().iter_rows(named=True)
    ]


def _node_columns(one: str) -> Callable[[Reading, Mapping[str, str]], Columns]:
    def build(reading: Reading, values: Mapping[str, str]) -> Columns:
        reading.need_all()
        span = window_of(values, reading.clock_ns())
        return _drawn(heat(reading, HEAT[one], span, columns=720, node=values["node"]), span)

    return build


NODE = Page(
    path="/nodes/{node}",
    title="Node",
    build=_node,
    columns={one: _node_columns(one) for one in HEAT},
    parameters=(
        Parameter(name="node", meaning="name of the node", in_path=True,
                  pattern=r"[A-Za-z0-9_.\-]{1,255}"),
        *WINDOW_PARAMETERS,
    ),
    operators_only=True,
)  # fmt: skip
