"""Fabric: ToR × ToR and NIC × NIC by loss, RTT and delay; links; one pair's paths and history."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.app.web_columns import heatmap_columns
from kansoku.app.web_fleet._nodes import natural
from kansoku.app.web_fleet._window import (
    HOUR_PARAMETERS,
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
    Missing,
    MissingError,
    Page,
    Parameter,
    Remote,
    Screen,
    ScreenBlock,
)
from kansoku.app.web_reading import Reading
from kansoku.errors import ConfigurationError
from kansoku.view import Column, Heatmap, Line, Sentence, Series, Table, Tone

__all__ = ["FABRIC", "PAIR"]

_MOST_LINKS = 20
_AGE_S = 4.0
"""Paths of a window are read again after this."""
_LEAST_PROBES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    title: str
    unit: str
    scheme: str
    floor: float
    """The least upper end of the colours, so that noise does not shine."""


_MEASURES = {
    "loss": _Measure(title="Loss", unit="ratio", scheme="fault", floor=0.01),
    "rtt_p50": _Measure(title="RTT, median", unit="ns", scheme="heat", floor=1_000.0),
    "rtt_p99": _Measure(title="RTT, highest 99th percentile", unit="ns", scheme="heat",
                        floor=1_000.0),
    "delay": _Measure(title="Processing delay of the responder, median", unit="ns", scheme="heat",
                      floor=1_000.0),
    "probes": _Measure(title="Probes", unit="", scheme="heat", floor=1.0),
}  # fmt: skip
_KINDS = {
    "all": "all probes", "tor_mesh": "within a ToR", "inter_tor": "between ToRs",
    "service": "on the jobs' own paths",
}  # fmt: skip
_NAME = r"[A-Za-z0-9_.:/+\-]{1,255}"


def _tors(reading: Reading, paths: pl.DataFrame) -> dict[str, str]:
    """Return NIC to ToR: by the cluster file, else by the first hop of its own probes."""
    found: dict[str, str] = {}
    first = (
        paths.filter(pl.col("path").is_not_null())
        .with_columns(hops=pl.col("path").str.split(">"))
        .filter(pl.col("hops").list.len() >= 3)
        .group_by("source")
        .agg(pl.col("hops").list.get(1).mode().first())
    )
    found |= dict(first.rows())
    if reading.cluster is not None:
        from kansoku.fabric.topology import topology_of

        try:
            topology = topology_of(reading.cluster)
        except ConfigurationError:
            return found
        found |= {
            nic: topology.tors[tor]
            for nic, tor in zip(topology.rnics, topology.rnic_tor.tolist(), strict=True)
        }
    return found


def _all_paths(reading: Reading, kind: str | None, span: Span) -> pl.DataFrame:
    """Return every path of the window; asked for by a page and its matrix alike."""

    def ask(_: pl.DataFrame | None) -> tuple[pl.DataFrame, int]:
        frame = reading.query(
            "probe_paths", kind=kind, since_ns=span.since_ns, until_ns=span.until_ns
        )
        return frame, int(frame.estimated_size())

    return reading.memory.get(("paths", kind, span), _AGE_S, ask)


def _paths(reading: Reading, values: Mapping[str, str], span: Span) -> pl.DataFrame:
    kind = None if values["kind"] == "all" else values["kind"]
    frame = _all_paths(reading, kind, span)
    if "switch" in values:
        hop = values["switch"]
        frame = frame.filter(
            (pl.lit(">") + pl.col("path").fill_null("") + pl.lit(">")).str.contains(
                f">{hop}>", literal=True
            )
        )
    if "link" in values:
        a, _, b = values["link"].partition("-")
        padded = pl.lit(">") + pl.col("path").fill_null("") + pl.lit(">")
        frame = frame.filter(
            padded.str.contains(f">{a}>{b}>", literal=True)
            | padded.str.contains(f">{b}>{a}>", literal=True)
        )
    return frame


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    labels: list[str]
    values: npt.NDArray[np.float32]
    groups: list[tuple[str, int, int]]


def _matrix(reading: Reading, values: Mapping[str, str], paths: pl.DataFrame) -> _Matrix:
    """Sum probes and losses, average RTT by probes, take the worst 99th percentile."""
    tors = _tors(reading, paths)
    names = sorted(
        set(paths["source"].drop_nulls().to_list()) | set(paths["target"].drop_nulls().to_list()),
        key=lambda n: (natural(tors.get(n, "")), natural(n)),
    )
    if values["by"] == "tor":
        labels = sorted({tors.get(name, "unknown") for name in names}, key=natural)
        place = {name: labels.index(tors.get(name, "unknown")) for name in names}
        groups: list[tuple[str, int, int]] = []
    else:
        labels = names
        place = {name: number for number, name in enumerate(names)}
        groups = []
        for number, name in enumerate(names):
            tor = tors.get(name, "unknown")
            if groups and groups[-1][0] == tor:
                groups[-1] = (tor, groups[-1][1], number)
            else:
                groups.append((tor, number, number))
    size = len(labels)
    if not size:
        return _Matrix(labels=[], values=np.zeros((0, 0), np.float32), groups=[])
    known = paths.filter(pl.col("source").is_not_null() & pl.col("target").is_not_null())
    row = known["source"].replace_strict(place, return_dtype=pl.Int64).to_numpy()
    column = known["target"].replace_strict(place, return_dtype=pl.Int64).to_numpy()
    flat = row * size + column
    probes = known["probes"].to_numpy().astype(np.float64)
    count = np.bincount(flat, weights=probes, minlength=size * size)
    measure = values["measure"]
    if measure == "loss":
        total = np.bincount(
            flat, weights=known["lost"].to_numpy().astype(np.float64), minlength=size * size
        )
        cells = np.divide(total, count, out=np.full(size * size, np.nan), where=count > 0)
    elif measure == "probes":
        cells = np.where(count > 0, count, np.nan)
    elif measure == "rtt_p99":
        cells = np.full(size * size, -np.inf)
        worst = known["rtt_p99_ns"].cast(pl.Float64).fill_null(-np.inf).to_numpy()
        np.maximum.at(cells, flat, worst)
        cells[~np.isfinite(cells)] = np.nan
    else:
        name = "rtt_p50_ns" if measure == "rtt_p50" else "responder_delay_p50_ns"
        value = known[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
        good = np.isfinite(value)
        total = np.bincount(flat[good], weights=(value * probes)[good], minlength=size * size)
        weight = np.bincount(flat[good], weights=probes[good], minlength=size * size)
        cells = np.divide(total, weight, out=np.full(size * size, np.nan), where=weight > 0)
    return _Matrix(
        labels=labels, values=cells.reshape(size, size).astype(np.float32), groups=groups
    )


def _links(paths: pl.DataFrame) -> pl.DataFrame:
    """Return each link between switches: probes over it both ways, lost, loss ratio."""
    return (
        paths.filter(pl.col("path").is_not_null())
        .select("path", "probes", "lost")
        .with_row_index("row")
        .with_columns(pl.col("path").str.split(">"))
        .explode("path", empty_as_null=True, keep_nulls=True)
        .with_columns(other=pl.col("path").shift(-1).over("row"))
        .filter(pl.col("other").is_not_null())
        .with_columns(a=pl.min_horizontal("path", "other"), b=pl.max_horizontal("path", "other"))
        .group_by("a", "b")
        .agg(pl.col("probes").sum(), pl.col("lost").sum())
        .with_columns(loss=pl.col("lost") / pl.col("probes"))
        .filter((pl.col("probes") >= _LEAST_PROBES) & (pl.col("lost") > 0))
        .sort("loss", "lost", descending=True)
    )


def _verdict(reading: Reading, span: Span) -> list[dict[str, object]]:
    """Return what the fabric's analyser found and has not cleared, newest first."""
    frame = reading.query("findings", since_ns=None, until_ns=span.until_ns)
    mine = frame.filter(pl.col("source") == "fabric")
    return mine.filter(pl.col("verdict") == "found").to_dicts()


def _fabric(reading: Reading, values: Mapping[str, str]) -> Screen:
    reading.need_all()
    span = window_of(values, reading.clock_ns())
    paths = _paths(reading, values, span)
    found = _verdict(reading, span)
    measure = _MEASURES[values["measure"]]
    probes, lost = int(paths["probes"].sum()), int(paths["lost"].sum())
    links = _links(paths)
    narrowed = [f"{k}:{values[k]}" for k in ("link", "switch") if k in values]
    blocks: list[ScreenBlock] = [_verdict_block(found, probes)]
    blocks.append(
        Cards(
            cards=(
                Card(label="Probes", value=f"{probes:,}", note="in the window"),
                Card(
                    label="Lost", value=f"{lost / probes:.3%}" if probes else "–",
                    note=f"{lost:,} probes", tone=Tone.NOTICE if lost else Tone.PLAIN,
                ),
                Card(label="RTT, median", value=_ns(_weighted(paths, "rtt_p50_ns"))),
                Card(label="RTT, highest 99th percentile", value=_ns(paths["rtt_p99_ns"].max())),
                Card(
                    label="Processing delay, median",
                    value=_ns(_weighted(paths, "responder_delay_p50_ns")),
                    note="inside the responders' hosts",
                ),
            )
        )
    )  # fmt: skip
    blocks.append(
        Choices(
            choices=(
                Choice(name="measure", label="Colour", value=values["measure"],
                       options=[(name, one.title) for name, one in _MEASURES.items()]),
                Choice(name="by", label="Cells", value=values["by"],
                       options=[("tor", "ToR × ToR"), ("rnic", "NIC × NIC")]),
                Choice(name="kind", label="Probes", value=values["kind"],
                       options=list(_KINDS.items())),
                *window_choices(values),
            ),
            hidden=[(k, values[k]) for k in ("link", "switch") if k in values],
        )
    )  # fmt: skip
    if narrowed:
        blocks.append(Sentence(text=f"Only paths over {' and '.join(narrowed)}."))
    if probes:
        cells = "ToR to ToR" if values["by"] == "tor" else "NIC to NIC"
        blocks.append(
            Remote(
                title=f"{measure.title}, {cells}",
                name="matrix",
                note="Rows send, columns answer. Enter, or a second click, opens a pair's paths.",
            )
        )
        blocks.append(_links_block(links))
    else:
        blocks.append(
            Missing(
                text="No probe has arrived in this window.",
                remedy="Give this server the cluster file, and start an agent on every node.",
                command="kansoku fabric agent --controller http://THIS-SERVER:8080 --rnic …",
            )
        )
    return Screen(
        title="Fabric",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.fabric/1",
            "window": span.to_json(),
            "verdict": "unknown" if not probes else "found" if found else "none",
            "reason": None if probes else "no probe in the window",
            "probes": probes,
            "lost": lost,
            "findings": found,
            "links": links.head(_MOST_LINKS).to_dicts(),
        },
        live=("probes", "findings") if span.now else (),
    )


def _weighted(paths: pl.DataFrame, name: str) -> float | None:
    known = paths.filter(pl.col(name).is_not_null())
    weight = float(known["probes"].sum())
    return float((known[name] * known["probes"]).sum()) / weight if weight else None


def _ns(value: object) -> str:
    if not isinstance(value, int | float):
        return "–"
    return f"{value / 1e6:.3g} ms" if value >= 1e6 else f"{value / 1e3:.3g} µs"


def _verdict_block(found: list[dict[str, object]], probes: int) -> ScreenBlock:
    if found and not probes:
        first = found[0]
        return Sentence(
            text="Unknown now: no probe in this window.",
            detail=f"Not closed: {first['sentence']}; since {_when(first['onset_ns'])}",
            tone=Tone.NOTICE,
        )
    if found:
        first = found[0]
        blamed = (
            "It is a host, not the network" if first["domain"] == "host" else "It is the network"
        )
        return Sentence(
            text=f"{blamed}: {first['subject']}",
            detail=f"{first['sentence']}; since {_when(first['onset_ns'])}",
            tone=Tone.BAD,
        )
    if probes:
        return Sentence(text="The fabric's analyser has no open finding.", tone=Tone.GOOD)
    return Sentence(text="Unknown: no probe in this window.", tone=Tone.NOTICE)


def _when(value: object) -> str:
    return stamp(value) or "–" if isinstance(value, int) else "–"


def _links_block(links: pl.DataFrame) -> ScreenBlock:
    if links.is_empty():
        return Sentence(text="No link lost a probe in this window.", tone=Tone.GOOD)
    rows = [
        [f"{row['a']}-{row['b']}", row["probes"], row["lost"], f"{row['loss']:.2%}"]
        for row in links.head(_MOST_LINKS).iter_rows(named=True)
    ]
    return Table(
        title="Links by loss",
        columns=[
            Column(title="link", link="/fabric?link={}"), Column(title="probes", numeric=True),
            Column(title="lost", numeric=True), Column(title="loss", numeric=True),
        ],
        rows=rows,
        note="A lost probe counts on every link of its path: the link that is at fault stands out.",
    )  # fmt: skip


def _matrix_columns(reading: Reading, values: Mapping[str, str]) -> Columns:
    reading.need_all()
    span = window_of(values, reading.clock_ns())
    found = _matrix(reading, values, _paths(reading, values, span))
    measure = _MEASURES[values["measure"]]
    known = found.values[np.isfinite(found.values)]
    high = float(known.max()) if known.size else measure.floor
    if values["measure"] != "loss" and known.size:
        high = float(np.percentile(known, 99.5))
    block = Heatmap(
        title=measure.title,
        row_labels=found.labels,
        column_labels=found.labels,
        values=found.values,  # type: ignore[arg-type] # an array serves
        unit=measure.unit,
        low=0.0,
        high=max(high, measure.floor),
        row_title="sender",
        column_title="responder",
    )
    until = f"&until={values['until']}" if "until" in values else ""
    pair = f"/fabric/pair?by={values['by']}&window={values['window']}{until}"
    return heatmap_columns(
        block,
        links={"cell": pair + "&source={row}&target={column}"},
        alternative=_worst(found, measure),
        summary=[
            f"{len(found.labels)} by {len(found.labels)} cells, {known.size} with probes.",
            f"{stamp(span.since_ns)} – {stamp(span.until_ns)}.",
        ],
        groups=found.groups,
        scheme=measure.scheme,
    )


def _worst(found: _Matrix, measure: _Measure) -> Table:
    flat = found.values.reshape(-1)
    order = [n for n in np.argsort(-np.nan_to_num(flat, nan=-1.0))[:12] if np.isfinite(flat[n])]
    size = max(len(found.labels), 1)
    scale, unit = {"ratio": (100.0, "%"), "ns": (1e-3, "µs")}.get(measure.unit, (1.0, ""))
    return Table(
        title=f"Highest: {measure.title}",
        columns=[
            Column(title="sender"), Column(title="responder"),
            Column(title=f"{measure.title} {unit}".strip(), numeric=True),
        ],
        rows=[
            [found.labels[n // size], found.labels[n % size], round(float(flat[n]) * scale, 3)]
            for n in order
        ],
    )  # fmt: skip


_COMMON = (
    Parameter(name="kind", meaning="which probes", default="all", choices=tuple(_KINDS)),
    Parameter(name="link", meaning="a link such as leaf1-spine0", pattern=_NAME),
    Parameter(name="switch", meaning="the name of a switch", pattern=_NAME),
)
_BY = Parameter(name="by", meaning="what a cell joins", default="tor", choices=("tor", "rnic"))

FABRIC = Page(
    path="/fabric",
    title="Fabric",
    build=_fabric,
    columns={"matrix": _matrix_columns},
    parameters=(
        Parameter(name="measure", meaning="what the colours show", default="loss",
                  choices=tuple(_MEASURES)),
        _BY, *_COMMON, *HOUR_PARAMETERS,
    ),
    navigation=30,
    operators_only=True,
)  # fmt: skip


# One pair


def _pair_rows(reading: Reading, values: Mapping[str, str], span: Span) -> pl.DataFrame:
    if values["by"] == "rnic":
        return reading.query(
            "probe_paths", source=values["source"], target=values["target"],
            since_ns=span.since_ns, until_ns=span.until_ns,
        )  # fmt: skip
    frame = _all_paths(reading, None, span)
    tors = _tors(reading, frame)
    return frame.filter(
        pl.col("source").is_in([n for n, tor in tors.items() if tor == values["source"]])
        & pl.col("target").is_in([n for n, tor in tors.items() if tor == values["target"]])
    )


def _pair(reading: Reading, values: Mapping[str, str]) -> Screen:
    reading.need_all()
    for name in ("source", "target"):
        if name not in values:
            raise MissingError(f"no {name} is named", remedy="choose a cell of the matrix")
    span = window_of(values, reading.clock_ns())
    frame = _pair_rows(reading, values, span)
    title = f"{values['source']} → {values['target']}"
    blocks: list[ScreenBlock] = [
        Choices(
            choices=window_choices(values),
            hidden=[(k, values[k]) for k in ("by", "source", "target")],
        )
    ]
    rows = [
        [row["source"], row["target"], row["source_port"], _KINDS.get(row["kind"], row["kind"]),
         row["probes"], row["lost"], _us(row["rtt_p50_ns"]), _us(row["rtt_p99_ns"]),
         _us(row["responder_delay_p50_ns"]), _hops(row["path"])]
        for row in frame.sort("lost", descending=True).head(400).iter_rows(named=True)
    ]  # fmt: skip
    if rows:
        blocks += _history(reading, frame, span)
        blocks.append(
            Table(
                title="Paths",
                columns=[
                    Column(title="sender"), Column(title="responder"),
                    Column(title="port", numeric=True),
                    Column(title="probes of"), Column(title="probes", numeric=True),
                    Column(title="lost", numeric=True), Column(title="RTT P50, µs", numeric=True),
                    Column(title="RTT P99, µs", numeric=True),
                    Column(title="delay P50, µs", numeric=True), Column(title="hops"),
                ],
                rows=rows,
                tones=[Tone.BAD if isinstance(r[5], int) and r[5] else Tone.PLAIN for r in rows],
            )
        )  # fmt: skip
    else:
        blocks.append(
            Missing(
                text=f"No probe went from {values['source']} to {values['target']} in this window.",
                remedy="Choose a longer window, or another pair on the fabric page.",
            )
        )
    return Screen(
        title=title,
        blocks=blocks,
        answer={
            "schema": "kansoku.web.fabric_pair/1",
            "window": span.to_json(),
            "source": values["source"],
            "target": values["target"],
            "paths": frame.to_dicts(),
        },
        trail=(("Fabric", f"/fabric?by={values['by']}"),),
        live=("probes",) if span.now else (),
    )


def _us(value: float | None) -> float | None:
    return None if value is None else round(value / 1e3, 1)


def _hops(path: str | None) -> str | None:
    if not path:
        return None
    hops = path.split(">")
    inner = [f"switch:{hop}" for hop in hops[1:-1]]
    return " › ".join(inner) if inner else path


def _history(reading: Reading, frame: pl.DataFrame, span: Span) -> list[ScreenBlock]:
    """Return loss and RTT of the pair, a point per window."""
    sources = frame["source"].unique().to_list()
    targets = frame["target"].unique().to_list()
    rows = reading.table(
        "probes", span.since_ns, span.until_ns, {"source": sources, "target": targets}
    )
    each = (
        rows.group_by("time_ns")
        .agg(
            probes=pl.col("probes").fill_null(1).sum(),
            lost=pl.col("lost").fill_null(0).sum(),
            p50=pl.col("rtt_p50_ns").mean(),
            p99=pl.col("rtt_p99_ns").max(),
        )
        .sort("time_ns")
        .tail(500)
    )
    times = [float(t) for t in each["time_ns"].to_list()]
    loss = [100 * a / b if b else None for a, b in each.select("lost", "probes").iter_rows()]

    def line(name: str, key: str) -> Line:
        return Line(name=name, x=times, y=[None if v is None else v / 1e3 for v in each[key]])

    return [
        Series(
            title="Loss over time", x_title="time", y_title="%", x_is_time_ns=True,
            lines=[Line(name="loss", x=times, y=loss)],
        ),
        Series(
            title="RTT over time", x_title="time", y_title="µs", x_is_time_ns=True,
            lines=[line("median", "p50"), line("99th percentile", "p99")],
        ),
    ]  # fmt: skip


PAIR = Page(
    path="/fabric/pair",
    title="Pair",
    build=_pair,
    parameters=(
        Parameter(name="source", meaning="ToR or NIC that sends", pattern=_NAME),
        Parameter(name="target", meaning="ToR or NIC that answers", pattern=_NAME),
        _BY,
        *HOUR_PARAMETERS,
    ),
    operators_only=True,
)
