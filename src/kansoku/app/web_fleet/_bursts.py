"""Bursts: ports × time, the busiest ports, and one burst with what happened around it."""

import json
from collections.abc import Mapping

import numpy as np
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
from kansoku.errors import InputError
from kansoku.view import Column, Facts, Heatmap, Line, Sentence, Series, Table, Tone

__all__ = ["BURST", "BURSTS"]

_COLUMNS = 720
_MEASURES = {
    "share": ("Share of time in bursts", "ratio"),
    "count": ("Bursts", ""),
    "peak": ("Highest peak, of line rate", "ratio"),
}
_NAME = r"[A-Za-z0-9_.:/+\-]{1,255}"
_WAYS = {"both": "both directions", "receive": "receive", "transmit": "transmit"}


def _rows(reading: Reading, values: Mapping[str, str], span: Span) -> pl.DataFrame:
    way = {} if values["direction"] == "both" else {"direction": values["direction"]}
    return reading.table("bursts", span.since_ns, span.until_ns, way)


def _bursts(reading: Reading, values: Mapping[str, str]) -> Screen:
    reading.need_all()
    span = window_of(values, reading.clock_ns())
    frame = _rows(reading, values, span)
    blocks: list[ScreenBlock] = []
    if len(frame):
        lengths = frame["duration_ns"].cast(pl.Float64)
        blocks.append(
            Cards(
                cards=(
                    Card(label="Bursts", value=f"{len(frame):,}", note="in the window"),
                    Card(label="Ports with bursts",
                         value=str(frame.select("node", "port").n_unique())),
                    Card(label="Length, median", value=_ms(lengths.median())),
                    Card(label="Length, 90 % below", value=_ms(lengths.quantile(0.9))),
                    Card(label="Highest peak", value=f"{_max(frame['peak_ratio']):.0%}",
                         note="of the line rate"),
                )
            )
        )  # fmt: skip
    blocks.append(
        Choices(
            choices=(
                Choice(name="measure", label="Colour", value=values["measure"],
                       options=[(k, v[0]) for k, v in _MEASURES.items()]),
                Choice(name="direction", label="Direction", value=values["direction"],
                       options=list(_WAYS.items())),
                *window_choices(values),
            )
        )
    )  # fmt: skip
    if len(frame):
        blocks.append(
            Remote(
                title=f"{_MEASURES[values['measure']][0]}, ports by time",
                name="ports",
                note="A burst is a stretch above half of the line rate.",
            )
        )
        blocks.append(_ports(frame, span))
        blocks.append(_strongest(frame))
    else:
        blocks.append(
            Missing(
                text="No burst has arrived in this window.",
                remedy="The node agent finds them where it may sample the ports fast.",
                command="kansoku burst watch",
            )
        )
    return Screen(
        title="Bursts",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.bursts/1",
            "window": span.to_json(),
            "bursts": len(frame),
            "ports": _port_frame(frame, span).to_dicts(),
        },
        live=("bursts",) if span.now else (),
    )


def _ms(value: object) -> str:
    return f"{value / 1e6:.3g} ms" if isinstance(value, int | float) else "–"


def _max(series: pl.Series) -> float:
    value = series.max()
    return float(value) if isinstance(value, int | float) else 0.0


def _port_frame(frame: pl.DataFrame, span: Span) -> pl.DataFrame:
    """Return per port and direction: bursts, lengths, share of the window's time, bytes."""
    length = span.until_ns - span.since_ns
    return (
        frame.group_by("node", "port", "direction")
        .agg(
            bursts=pl.len(),
            median_ns=pl.col("duration_ns").median(),
            p90_ns=pl.col("duration_ns").quantile(0.9),
            longest_ns=pl.col("duration_ns").max(),
            peak_ratio=pl.col("peak_ratio").max(),
            bytes=pl.col("bytes").sum(),
            time_ratio=pl.col("duration_ns").sum() / length,
        )
        .sort("bursts", "node", "port", descending=[True, False, False])
    )


def _ports(frame: pl.DataFrame, span: Span) -> Table:
    rows = [
        [f"node:{r['node']}", r["port"], r["direction"], r["bursts"], _one(r["median_ns"]),
         _one(r["p90_ns"]), _one(r["longest_ns"]), f"{r['peak_ratio']:.0%}",
         f"{r['time_ratio']:.3%}", f"{r['bytes'] / 1e9:,.2f}"]
        for r in _port_frame(frame, span).head(100).iter_rows(named=True)
    ]  # fmt: skip
    return Table(
        title="Ports",
        columns=[
            Column(title="node"), Column(title="port"), Column(title="direction"),
            Column(title="bursts", numeric=True), Column(title="median, ms", numeric=True),
            Column(title="90 % below, ms", numeric=True), Column(title="longest, ms", numeric=True),
            Column(title="highest peak", numeric=True),
            Column(title="time in bursts", numeric=True),
            Column(title="GB in bursts", numeric=True),
        ],
        rows=rows,
    )  # fmt: skip


def _one(value: float | None) -> float | None:
    return None if value is None else round(value / 1e6, 3)


def burst_key(row: Mapping[str, object]) -> str:
    """Return what names a burst in an address."""
    return f"{row['node']}~{row['port']}~{row['direction']}~{row['start_ns']}"


def _strongest(frame: pl.DataFrame) -> Table:
    top = frame.sort("peak_ratio", "bytes", descending=True, nulls_last=True).head(25)
    return Table(
        title="Strongest bursts",
        columns=[
            Column(title="burst", link="/bursts/{}"), Column(title="start"),
            Column(title="length, ms", numeric=True), Column(title="peak", numeric=True),
            Column(title="mean", numeric=True), Column(title="MB", numeric=True),
            Column(title="samples", numeric=True),
        ],
        rows=[
            [burst_key(r), stamp(r["start_ns"]), _one(r["duration_ns"]),
             _share(r["peak_ratio"]), _share(r["mean_ratio"]),
             None if r["bytes"] is None else round(r["bytes"] / 1e6, 2), r["samples"]]
            for r in top.iter_rows(named=True)
        ],
    )  # fmt: skip


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def _columns(reading: Reading, values: Mapping[str, str]) -> Columns:
    reading.need_all()
    span, step = window_of(values, reading.clock_ns()).grid(_COLUMNS)
    frame = _rows(reading, values, span)
    width = (span.until_ns - span.since_ns) // step
    keyed = frame.with_columns(
        key=pl.format("{}/{} {}", "node", "port", "direction"),
        column=(pl.col("start_ns") - span.since_ns) // step,
    ).filter(pl.col("key").is_not_null() & pl.col("duration_ns").is_not_null())
    labels = sorted(keyed["key"].unique().to_list(), key=natural)
    place = {name: number for number, name in enumerate(labels)}
    cells = np.zeros((len(labels), int(width)), np.float64)
    if len(keyed):
        row = keyed["key"].replace_strict(place, return_dtype=pl.Int64).to_numpy()
        at = (row, keyed["column"].to_numpy())
        if values["measure"] == "peak":
            np.maximum.at(cells, at, keyed["peak_ratio"].fill_null(0.0).to_numpy())
        elif values["measure"] == "count":
            np.add.at(cells, at, 1.0)
        else:
            np.add.at(cells, at, keyed["duration_ns"].to_numpy() / step)
    title, unit = _MEASURES[values["measure"]]
    block = Heatmap(
        title=title,
        row_labels=labels,
        column_labels=[],
        column_times_ns=(span.since_ns + np.arange(int(width)) * step).tolist(),
        values=cells,  # type: ignore[arg-type] # an array serves
        unit=unit,
        low=0.0,
        high=1.0 if values["measure"] == "peak" else None,
        row_title="port",
        column_title="time",
    )
    busiest: list[int] = np.argsort(-cells.sum(axis=1))[:12].tolist()
    return heatmap_columns(
        block,
        links={"row": "/nodes/{node}"},
        summary=[
            f"{len(keyed)} bursts on {len(labels)} ports and directions, "  # noqa: ISC004
            f"{stamp(span.since_ns)} to {stamp(span.until_ns)}."
        ],
        alternative=Table(
            title=f"Highest: {title}",
            columns=[Column(title="port"), Column(title="highest column", numeric=True)],
            rows=[[labels[n], round(float(cells[n].max()), 4)] for n in busiest],
        ),
    )


BURSTS = Page(
    path="/bursts",
    title="Bursts",
    build=_bursts,
    columns={"ports": _columns},
    parameters=(
        Parameter(name="measure", meaning="what the colours show", default="share",
                  choices=tuple(_MEASURES)),
        Parameter(name="direction", meaning="which direction", default="both",
                  choices=tuple(_WAYS)),
        *HOUR_PARAMETERS,
    ),
    navigation=40,
    operators_only=True,
)  # fmt: skip


# One burst


def _burst(reading: Reading, values: Mapping[str, str]) -> Screen:
    reading.need_all()
    parts = values["burst"].split("~")
    if len(parts) != 4 or not parts[3].isdigit() or int(parts[3]) >= 2**62:
        raise InputError(
            f"burst={values['burst'][:60]!r} does not name a burst",
            remedy="follow a link of the bursts page",
        )
    node, port, way, start = parts[0], parts[1], parts[2], int(parts[3])
    frame = reading.table(
        "bursts", start, start + 1, {"node": node, "port": port, "direction": way}
    )
    if frame.is_empty():
        raise MissingError(f"no such burst on {node} {port}", remedy="it may be older than is kept")
    row = frame.row(0, named=True)
    end = start + (row["duration_ns"] or 0)
    blocks: list[ScreenBlock] = [
        Facts(
            items=[
                ("Port", f"node:{node} {port}, {way}"),
                ("Start", stamp(start) or "–"),
                ("Length", _ms(row["duration_ns"])),
                ("Peak", f"{row['peak_ratio']:.1%} of the line rate"),
                ("Mean", _share(row["mean_ratio"]) or "–"),
                ("Bytes", f"{(row['bytes'] or 0) / 1e6:,.2f} MB"),
                ("Samples", f"{row['samples']} every {_ms(row['sampling_ns'])}"),
            ]
        )
    ]
    blocks += _samples(row)
    blocks.append(_neighbours(reading, node, port, way, start))
    spans, probes = _phases(reading, start, end), _probes(reading, node, start, end)
    blocks += [spans, probes]
    return Screen(
        title=f"Burst on {node} {port}",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.burst/1",
            "burst": row,
            "raw": _raw(row),
        },
        trail=(("Bursts", "/bursts"),),
    )


def _raw(row: Mapping[str, object]) -> dict[str, object]:
    """Return what the sampler kept with a burst; nothing where it is not a JSON object."""
    try:
        found = json.loads(str(row.get("attributes") or "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _samples(row: Mapping[str, object]) -> list[ScreenBlock]:
    """Return the raw samples around the burst and the growth of other counters beside it."""
    kept = _raw(row)
    at, ratio = kept.get("raw_us"), kept.get("raw_ratio")
    blocks: list[ScreenBlock] = []
    good = isinstance(at, list) and isinstance(ratio, list) and len(at) == len(ratio) > 1
    if good and isinstance(at, list) and isinstance(ratio, list):
        points = [(x, y) for x, y in zip(at, ratio, strict=True) if _number(x) and _number(y)]
        blocks.append(
            Series(
                title="Raw samples", x_title="ms since the burst began", y_title="% of line rate",
                lines=[
                    Line(
                        name=f"{row['port']} {row['direction']}",
                        x=[x / 1000 for x, _ in points], y=[y * 100 for _, y in points],
                    )
                ],
            )
        )  # fmt: skip
    else:
        blocks.append(
            Sentence(text="The raw samples of this burst were not kept.", tone=Tone.MUTED)
        )
    beside = kept.get("beside")
    if isinstance(beside, dict) and beside:
        blocks.append(
            Table(
                title="Other counters of the port during the burst",
                columns=[Column(title="counter"), Column(title="grew by", numeric=True)],
                rows=[[str(k), v if _number(v) else None] for k, v in beside.items()],
            )
        )
    return blocks


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _neighbours(reading: Reading, node: str, port: str, way: str, start: int) -> ScreenBlock:
    """Return bursts of the same port a second around: whether it is a rhythm."""
    frame = reading.table(
        "bursts", start - 10**9, start + 10**9, {"node": node, "port": port, "direction": way}
    )
    if len(frame) < 2:
        return Sentence(text="It stands alone within a second.", tone=Tone.MUTED)
    return Table(
        title="Bursts of this port within a second",
        columns=[
            Column(title="burst", link="/bursts/{}"), Column(title="after, ms", numeric=True),
            Column(title="length, ms", numeric=True), Column(title="peak", numeric=True),
        ],
        rows=[
            [burst_key(r), round((r["start_ns"] - start) / 1e6, 3), _one(r["duration_ns"]),
             _share(r["peak_ratio"])]
            for r in frame.head(60).iter_rows(named=True)
        ],
    )  # fmt: skip


def _phases(reading: Reading, start: int, end: int) -> ScreenBlock:
    """Return spans that overlap the burst."""
    spans = reading.table("spans", start - 10**10, end, limit=200_000).filter(
        (pl.col("start_ns") < end)
        & (pl.col("start_ns") + pl.col("duration_ns").fill_null(0) > start)
        & (pl.col("kind") != "step")
    )
    if spans.is_empty():
        return Sentence(
            text="No phase of a training is known at that moment.",
            detail="kansoku run or the agent's rings bring phases and collectives",
            tone=Tone.MUTED,
        )
    return Table(
        title="Phases and collectives at that moment",
        columns=[
            Column(title="run"), Column(title="rank", numeric=True),
            Column(title="step", numeric=True), Column(title="kind"), Column(title="name"),
            Column(title="length, ms", numeric=True),
        ],
        rows=[
            [r["run"], r["rank"], r["step"], r["kind"], r["name"], _one(r["duration_ns"])]
            for r in spans.head(60).iter_rows(named=True)
        ],
        note="Spans of every run at that moment, whatever its nodes.",
    )  # fmt: skip


def _probes(reading: Reading, node: str, start: int, end: int) -> ScreenBlock:
    """Return probes' RTT of the node's NICs before, during and after."""
    minute = 120 * 10**9
    frame = reading.table("probes", start - minute, end + minute).filter(
        pl.col("source").str.starts_with(f"{node}/") | pl.col("target").str.starts_with(f"{node}/")
    )
    if frame.is_empty():
        return Sentence(text="No probe of this node around that moment.", tone=Tone.MUTED)
    each = (
        frame.group_by("time_ns")
        .agg(p50=pl.col("rtt_p50_ns").mean(), p99=pl.col("rtt_p99_ns").max())
        .sort("time_ns")
    )
    x = [float(t) for t in each["time_ns"].to_list()]
    return Series(
        title="Probe RTT of this node around the burst", x_title="time", y_title="µs",
        x_is_time_ns=True,
        lines=[
            Line(name="median", x=x, y=[None if v is None else v / 1e3 for v in each["p50"]]),
            Line(name="99th percentile", x=x,
                 y=[None if v is None else v / 1e3 for v in each["p99"]]),
        ],
    )  # fmt: skip


BURST = Page(
    path="/bursts/{burst}",
    title="Burst",
    build=_burst,
    parameters=(
        Parameter(
            name="burst", meaning="node~port~direction~start_ns", in_path=True,
            pattern=r"[A-Za-z0-9_.:+~\-]{1,600}",
        ),
    ),
    operators_only=True,
)  # fmt: skip
