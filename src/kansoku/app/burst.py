"""Microbursts: watch the ports of this node, report what was found anywhere."""

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.burst.align import (
    CollectiveShare,
    ProbesBeside,
    blame,
    probes_beside,
    shares,
)
from kansoku.burst.detect import Burst
from kansoku.burst.edge.ports import Port, find_ports
from kansoku.burst.edge.sampler import Sampler
from kansoku.burst.policy import BurstPolicy
from kansoku.burst.rows import WINDOW_METRIC
from kansoku.burst.summary import PortSummary, summarise
from kansoku.catalog import Cluster
from kansoku.catalog.nic_counters import match_ethtool
from kansoku.errors import ConfigurationError, InputError
from kansoku.model import table_schema
from kansoku.view import Block, Column, Sentence, Series, Table, Tone, View
from kansoku.view.blocks import Line

__all__ = [
    "BurstReport",
    "line_rates",
    "make_sampler",
    "report",
    "report_frames",
    "report_json",
    "report_view",
    "watch",
]

SCHEMA = "kansoku.burst.report/1"
_KEPT = 200_000  # bursts a watch holds for its own report; the store takes all
_POLL_S = 0.25
_CONGESTION = {
    "kansoku.nic.pause.frames", "kansoku.nic.discards", "kansoku.nic.ecn.marked",
    "kansoku.nic.pause.storms",
}  # fmt: skip
OnBursts = Callable[[str, str, Sequence[Burst]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstReport:
    """Ports, what caused their bursts, and what probes saw."""

    since_ns: int
    until_ns: int
    ports: Sequence[PortSummary]
    bursts: pl.DataFrame
    """Rows of the table, with the columns of :func:`kansoku.burst.align.blame` where spans were
    at hand."""
    collectives: Sequence[CollectiveShare] | None
    """None: no spans of training in the time."""
    probes: Sequence[ProbesBeside] | None
    """None: no probes in the time."""
    policy: BurstPolicy
    notes: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """``found``, ``none``, or ``unknown`` where nobody watched."""
        if len(self.bursts):
            return "found"
        return "none" if any(port.observed_ns for port in self.ports) else "unknown"


# -- watching -----------------------------------------------------------------------------------


def line_rates(
    given: Sequence[str] = (), cluster: Cluster | None = None, node: str | None = None
) -> dict[str, float]:
    """Return bits/s by port: those of ``NAME=GBPS`` texts, then the cluster file's."""
    rates: dict[str, float] = {}
    if cluster is not None and node is not None:
        try:
            nics = cluster.node(node).kind.nics
        except ConfigurationError:
            nics = ()
        for nic in nics:
            for name in (nic.device, nic.interface):
                if name is not None and nic.line_rate_bits_per_s is not None:
                    rates[name] = nic.line_rate_bits_per_s
    for text in given:
        match = re.fullmatch(r"([^=]+)=([0-9]+(?:\.[0-9]+)?|\.[0-9]+)", text)
        if match is None or float(match[2]) <= 0:
            raise InputError(
                f"{text!r} is not a line rate", where="--line-rate", remedy="give NAME=GBPS"
            )
        rates[match[1]] = float(match[2]) * 1e9
    return rates


def make_sampler(
    node: str,
    *,
    ports: Sequence[str] = (),
    rates_bits_per_s: Mapping[str, float] | None = None,
    interval_s: float = 0.001,
    policy: BurstPolicy | None = None,
) -> Sampler:
    """Return a sampler of this node's ports, not yet started; what the node agent uses."""
    if not math.isfinite(interval_s):
        raise InputError(
            f"{interval_s:g} is no time between readings", remedy="give 0.05 to 1000 ms"
        )
    found: list[Port] = find_ports(ports, line_rates_bits_per_s=rates_bits_per_s)
    return Sampler(
        found,
        node=node,
        interval_ns=round(interval_s * 1e9),
        policy=policy,
        slow_counters=_driver_counters,
    )


@cache
def _statistics() -> Callable[[str], Mapping[str, int] | None]:
    from kansoku.node.edge.ethtool import EthtoolSocket

    return EthtoolSocket().statistics


def _driver_counters(port: str, *, root: Path = Path("/sys/class")) -> dict[str, int]:
    """Return pause frames, discards and congestion marks that the NIC's driver counts.

    Only those the catalogue explains; an RDMA port's are its interface's.
    """
    names = [path.name for path in (root / "infiniband" / port / "device" / "net").glob("*")]
    found: dict[str, int] = {}
    for name in names or [port]:
        try:
            driver = (root / "net" / name / "device" / "driver").readlink().name
        except OSError:
            continue  # a virtual interface: it has no driver that counts such things
        for counter, value in (_statistics()(name) or {}).items():
            match = match_ethtool(driver, counter)
            if match is not None and match.metric in _CONGESTION:
                found[counter] = value
    return found


def watch(
    sampler: Sampler,
    *,
    seconds: float | None = None,
    stop: threading.Event | None = None,
    store: str | Path | None = None,
    on_start: Callable[[], None] = lambda: None,
    on_bursts: OnBursts = lambda *_: None,
    clock: Callable[[], int] = time.time_ns,
) -> BurstReport:
    """Sample until ``seconds`` are over or ``stop`` is set; return the report of that time.

    It ends too when every port has gone away. ``on_start`` is called once readings come,
    ``on_bursts`` with port, direction and bursts as they end. ``store`` gets the rows of every
    window.
    """
    stop = stop or threading.Event()
    frames: dict[str, list[pl.DataFrame]] = {"bursts": [], "metrics": []}
    kept = dropped = 0
    target = None
    if store is not None:
        from kansoku.app.store import open_store

        target = open_store(store)
    try:
        with sampler:
            sampler.wait_reading()
            begun = clock()
            on_start()
            deadline = None if seconds is None else time.monotonic() + seconds
            over = False
            while not over:
                left = math.inf if deadline is None else deadline - time.monotonic()
                over = stop.wait(max(min(left, _POLL_S), 0)) or left <= _POLL_S
                for (port, side), bursts in sampler.poll().items():
                    on_bursts(port, side, bursts)
                over = over or len(sampler.gone) == len(sampler.ports)  # nothing left to watch
                tables = sampler.tables(sampler.windows(final=over))
                if target is not None and tables:
                    target.commit(tables)
                for name, rows in tables.items():
                    frames[name].append(rows)
                kept += len(tables.get("bursts", ()))
                while kept > _KEPT and len(frames["bursts"]) > 1:
                    lost = len(frames["bursts"].pop(0))
                    kept, dropped = kept - lost, dropped + lost
    finally:
        if target is not None:
            target.close()
    notes = [f"{sampler.overrun} readings were lost: this process came too late"] * bool(
        sampler.overrun
    )
    for port, gone_ns in sorted(sampler.gone.items()):
        when = datetime.fromtimestamp(gone_ns / 1e9, tz=UTC).astimezone()
        notes.append(f"{port} went away at {when:%H:%M:%S}: from then on nothing was read of it")
    if dropped:
        notes.append(f"the first {dropped} bursts are not in this report; --store keeps all")
    result = report_frames(
        _joined(frames["bursts"], "bursts"),
        _joined(frames["metrics"], "metrics"),
        since_ns=begun,
        until_ns=clock(),
        policy=sampler.policy,
    )
    return replace(result, notes=notes)


def _joined(frames: Sequence[pl.DataFrame], table: str) -> pl.DataFrame:
    return pl.concat(frames) if frames else pl.DataFrame(schema=table_schema(table))


# -- reporting ----------------------------------------------------------------------------------


def report(
    run: str | Path | None = None,
    *,
    store: str | Path | None = None,
    since: str | None = None,
    until: str | None = None,
    node: str | None = None,
    port: str | None = None,
    policy: BurstPolicy | None = None,
    now: Callable[[], int] = time.time_ns,
) -> BurstReport:
    """Return the report of a store's bursts, by default of the last hour.

    ``run`` is a run folder: its time is the window and its spans say which collective caused a
    burst. Without it the store's own spans do.
    """
    from kansoku.app.store import open_store

    spans: pl.DataFrame | None = None
    nodes: dict[int, str] = {}
    if run is not None:
        from kansoku.formats.run_directory import read_run

        data = read_run(run)
        spans = data.spans
        nodes = {facts.rank: facts.node for facts in data.facts.ranks if facts.rank is not None}
        since_ns = data.facts.start_ns
        until_ns = data.facts.end_ns or now()
    else:
        from kansoku.app.jobs._context import resolve_window

        window = resolve_window(since or "1h", until, None, now=now)
        since_ns, until_ns = window.since_ns, window.until_ns
    filters = {name: value for name, value in (("node", node), ("port", port)) if value}
    opened = open_store(store)
    try:
        bursts = opened.table("bursts", since_ns, until_ns, filters or None)
        metrics = _window_metrics(opened.table("metrics", since_ns, until_ns), node, port)
        probes = opened.table("probes", since_ns, until_ns)
        if spans is None:
            spans = opened.table("spans", since_ns, until_ns)
    finally:
        opened.close()
    return report_frames(
        bursts,
        metrics,
        spans=spans,
        node_of_rank=nodes,
        probes=probes,
        since_ns=since_ns,
        until_ns=until_ns,
        policy=policy,
    )


def _window_metrics(metrics: pl.DataFrame, node: str | None, port: str | None) -> pl.DataFrame:
    rows = metrics.filter(pl.col("metric").str.starts_with(WINDOW_METRIC))
    for key, value in (("host.name", node), ("network.interface.name", port)):
        if value is not None:
            wanted = pl.col("labels").str.contains(f'"{key}":"{value}"', literal=True)
            rows = rows.filter(wanted)
    return rows


def report_frames(
    bursts: pl.DataFrame,
    metrics: pl.DataFrame,
    *,
    spans: pl.DataFrame | None = None,
    node_of_rank: Mapping[int, str] | None = None,
    probes: pl.DataFrame | None = None,
    since_ns: int,
    until_ns: int,
    policy: BurstPolicy | None = None,
) -> BurstReport:
    """Return the report of rows at hand: tables ``bursts``, ``metrics``, ``spans``, ``probes``."""
    policy = policy or BurstPolicy()
    collectives = None
    if spans is not None and len(spans):
        bursts = _blamed(bursts, spans, node_of_rank or {})
        collectives = shares(bursts) if len(bursts) else []
    return BurstReport(
        since_ns=since_ns,
        until_ns=until_ns,
        ports=summarise(bursts, metrics, policy),
        bursts=bursts,
        collectives=collectives,
        probes=probes_beside(bursts, probes) if probes is not None and len(probes) else None,
        policy=policy,
    )


def _blamed(
    bursts: pl.DataFrame, spans: pl.DataFrame, node_of_rank: Mapping[int, str]
) -> pl.DataFrame:
    """Blame each node's bursts on that node's ranks; on all where the node is not known."""
    parts = []
    known = set(node_of_rank.values())
    for (node,), own in bursts.group_by(["node"]):
        ranks = [rank for rank, where in node_of_rank.items() if where == node]
        near = spans.filter(pl.col("rank").is_in(ranks)) if node in known else spans
        parts.append(blame(own, near))
    return pl.concat(parts) if parts else blame(bursts, spans)


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else round(value_ns / 1e6, 4)


def _ratio(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def report_json(result: BurstReport, *, with_bursts: bool = False) -> dict[str, Any]:
    """Return the report as the versioned JSON object; ``with_bursts`` lists each burst."""
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "window": {"since_ns": result.since_ns, "until_ns": result.until_ns},
        "verdict": result.verdict,
        "reason": _headline(result),
        "ports": [_port_json(port) for port in result.ports],
        "collectives": None
        if result.collectives is None
        else [asdict(share) for share in result.collectives],
        "probes": None
        if result.probes is None
        else [_probes_json(beside) for beside in result.probes],
        "policy": asdict(result.policy),
        "notes": list(result.notes),
    }
    if with_bursts:
        answer["bursts"] = result.bursts.to_dicts()
    return answer


def _port_json(port: PortSummary) -> dict[str, Any]:
    def times(value: Any) -> dict[str, float | None]:
        return {name: _ms(getattr(value, name, None)) for name in ("p50", "p90", "max")}

    rate = port.line_rate_bytes_per_s
    return {
        "node": port.node,
        "port": port.port,
        "direction": port.direction,
        "bursts": port.bursts,
        "duration_ms": times(port.duration),
        "peak_ratio": _ratio(port.peak_ratio),
        "mean_ratio": _ratio(port.mean_ratio),
        "bytes_in_bursts_ratio": _ratio(port.bytes_in_bursts_ratio),
        "missed_ratio": _ratio(port.missed_ratio),
        "gap_ms": times(port.gap),
        "single_sample_ratio": _ratio(port.single_sample_ratio),
        "samples": port.samples,
        "observed_s": None if port.observed_ns is None else round(port.observed_ns / 1e9, 3),
        "line_rate_gbps": None if rate is None else rate * 8 / 1e9,
        "sampling_ms": _ms(port.sampling_ns),
        "refresh_ms": _ms(port.refresh_ns),
        "refresh_certain": port.refresh_certain,
        "beside": dict(port.beside),
        "notes": list(port.notes),
    }


def _probes_json(beside: ProbesBeside) -> dict[str, Any]:
    def pair(value: tuple[int, int] | None) -> dict[str, float] | None:
        return None if value is None else {"p50": value[0] / 1e6, "p99": value[1] / 1e6}

    return {
        "node": beside.node,
        "port": beside.port,
        "during_bursts": {
            "probes": beside.inside,
            "lost": beside.lost_inside,
            "rtt_ms": pair(beside.rtt_inside_ns),
        },
        "otherwise": {
            "probes": beside.outside,
            "lost": beside.lost_outside,
            "rtt_ms": pair(beside.rtt_outside_ns),
        },
        "rank_correlation": beside.rank_correlation,
    }


# -- drawing ------------------------------------------------------------------------------------


def _headline(result: BurstReport) -> str:
    seconds = (result.until_ns - result.since_ns) / 1e9
    if result.verdict == "unknown":
        return "No port was watched in this time"
    if result.verdict == "none":
        return f"No burst above {result.policy.start_ratio:.0%} of line rate in {seconds:.0f} s"
    worst = max(result.ports, key=lambda port: port.bursts)
    return (
        f"{len(result.bursts)} bursts above {result.policy.start_ratio:.0%} of line rate in "
        f"{seconds:.0f} s, most on {worst.node}/{worst.port} {worst.direction} ({worst.bursts})"
    )


def _text(value: float | None, form: str, factor: float = 1.0) -> str | None:
    return None if value is None else form.format(value * factor)


def report_view(result: BurstReport) -> View:
    """Return the report as a View."""
    blocks: list[Block] = [
        Sentence(
            text=_headline(result),
            tone={"found": Tone.NOTICE, "none": Tone.GOOD}.get(result.verdict, Tone.MUTED),
        )
    ]
    if result.ports:
        blocks.append(_port_table(result.ports))
    seen: set[str] = set()
    for port in result.ports:
        for note in port.notes:
            text = f"{port.node}/{port.port} {port.direction}: {note}"
            blocks += [] if text in seen else [Sentence(text=text, tone=Tone.NOTICE)]
            seen.add(text)
        grown = ", ".join(f"{name} +{count}" for name, count in port.beside.items() if count)
        if grown and grown not in seen:
            blocks.append(Sentence(text=f"{port.node}/{port.port}: {grown}", tone=Tone.BAD))
            seen.add(grown)
    if result.collectives:
        blocks.append(_collective_table(result.collectives))
    if result.probes:
        blocks.append(_probe_table(result.probes))
    largest = _largest(result.bursts)
    if largest is not None:
        blocks.append(largest)
    blocks += [Sentence(text=note, tone=Tone.NOTICE) for note in result.notes]
    return View(title="Microbursts", blocks=blocks)


def _port_table(ports: Sequence[PortSummary]) -> Table:
    rows = []
    for port in ports:
        length = port.duration
        rows.append(
            (
                port.node,
                port.port,
                port.direction,
                port.bursts,
                _text(None if length is None else length.p50, "{:.2f}", 1e-6),
                _text(None if length is None else length.p90, "{:.2f}", 1e-6),
                _text(None if length is None else length.max, "{:.2f}", 1e-6),
                _text(None if port.gap is None else port.gap.p50, "{:.1f}", 1e-6),
                _text(port.peak_ratio, "{:.0f}%", 100),
                _text(port.mean_ratio, "{:.1f}%", 100),
                _text(port.bytes_in_bursts_ratio, "{:.0f}%", 100),
                _text(port.missed_ratio, "{:.2f}%", 100),
            )
        )
    names = ("bursts", "p50 ms", "p90 ms", "max ms", "gap ms", "peak", "mean", "in bursts",
             "missed")  # fmt: skip
    return Table(
        title="Ports",
        columns=[Column(title=name) for name in ("node", "port", "direction")]
        + [Column(title=name, numeric=True) for name in names],
        rows=rows,
        note="peak and mean are of line rate; in bursts: share of all bytes",
    )


def _collective_table(found: Sequence[CollectiveShare]) -> Table:
    return Table(
        title="What caused them",
        columns=[
            Column(title="collective"),
            Column(title="group"),
            Column(title="phase"),
            Column(title="bursts", numeric=True),
            Column(title="bytes", numeric=True),
        ],
        rows=[
            (
                share.collective or "none ran",
                share.group,
                share.phase,
                share.bursts,
                f"{share.bytes_ratio:.0%}",
            )
            for share in found[:20]
        ],
    )


def _probe_table(found: Sequence[ProbesBeside]) -> Table:
    def pair(value: tuple[int, int] | None) -> str | None:
        return None if value is None else f"{value[0] / 1e6:.3f} / {value[1] / 1e6:.3f}"

    return Table(
        title="Probes on the same path",
        columns=[
            Column(title="port"),
            Column(title="during bursts", numeric=True),
            Column(title="RTT P50/P99 ms", numeric=True),
            Column(title="otherwise", numeric=True),
            Column(title="RTT P50/P99 ms", numeric=True),
            Column(title="rank correlation", numeric=True),
        ],
        rows=[
            (
                f"{one.node}/{one.port}",
                one.inside,
                pair(one.rtt_inside_ns),
                one.outside,
                pair(one.rtt_outside_ns),
                _text(one.rank_correlation, "{:.2f}"),
            )
            for one in found
        ],
    )


def _largest(bursts: pl.DataFrame) -> Series | None:
    """Return the raw samples around the burst of most bytes."""
    import json

    if len(bursts) == 0:
        return None
    row = bursts.sort("bytes", descending=True).row(0, named=True)
    raw = json.loads(row["attributes"] or "{}")
    if not raw.get("raw_us"):
        return None
    name = f"{row['node']}/{row['port']} {row['direction']}"
    return Series(
        title=f"The largest burst, {name}: {row['bytes'] / 1e6:.3g} MB in "
        f"{row['duration_ns'] / 1e6:.2f} ms",
        x_title="ms from its start",
        y_title="% of line rate",
        lines=[
            Line(
                name=name,
                x=[at / 1000 for at in raw["raw_us"]],
                y=[ratio * 100 for ratio in raw["raw_ratio"]],
            )
        ],
    )
