"""Watch this node's ports for microbursts, live."""

import signal
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from kansoku.cli._flags import ClusterFlag, HtmlFlag, JsonFlag, StoreFlag
from kansoku.cli._output import emit

_LINES = 20  # bursts drawn at once; a storm of them is counted, not scrolled


def command(
    port: Annotated[
        list[str] | None,
        typer.Option("--port", metavar="NAME", help="Port or pattern (mlx5_*); repeatable."),
    ] = None,
    line_rate: Annotated[
        list[str] | None,
        typer.Option("--line-rate", metavar="NAME=GBPS", help="Where the kernel does not know."),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="MS", help="Time between readings, from 0.05.")
    ] = 1.0,
    threshold: Annotated[
        float, typer.Option("--threshold", help="Share of line rate that begins a burst.")
    ] = 0.5,
    end_threshold: Annotated[
        float | None,
        typer.Option("--end-threshold", help="Share below which it ends; default 0.8 of it."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", min=0.01, help="Stop after.")
    ] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="NAME", help="Node name.")] = None,
    cluster: ClusterFlag = None,
    store: StoreFlag = None,
    bursts: Annotated[
        bool, typer.Option("--bursts", help="List each burst in the JSON as well.")
    ] = False,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Read every port's counters each millisecond; print bursts as they end, then a summary.

    With --store the rows are kept for `kansoku burst report`. Ctrl-C ends it.
    """
    from kansoku.app.burst import line_rates, make_sampler, report_json, report_view, watch
    from kansoku.burst.policy import BurstPolicy
    from kansoku.catalog import load_cluster
    from kansoku.errors import InputError

    name = node or socket.gethostname().split(".")[0]
    end = threshold * 0.8 if end_threshold is None else end_threshold
    sampler = make_sampler(
        name,
        ports=port or (),
        rates_bits_per_s=line_rates(
            line_rate or (), None if cluster is None else load_cluster(cluster), name
        ),
        interval_s=interval / 1000,
        policy=BurstPolicy(start_ratio=threshold, end_ratio=end),
    )
    watched = {port.name for port in sampler.ports}
    if strangers := sorted(set(line_rates(line_rate or ())) - watched):
        raise InputError(
            f"{', '.join(strangers)} is not among the ports to watch",
            where="--line-rate",
            remedy=f"they are {', '.join(sorted(watched))}",
        )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    names = ", ".join(f"{p.name} ({p.line_rate_bits_per_s / 1e9:g} Gb/s)" for p in sampler.ports)
    result = watch(
        sampler,
        seconds=seconds,
        stop=stop,
        store=store,
        on_start=lambda: print(f"watching {names} every {interval:g} ms", file=sys.stderr),
        on_bursts=_live,
    )
    emit(report_json(result, with_bursts=bursts), report_view(result), as_json=as_json, html=html)


def _live(port: str, direction: str, found: Sequence[Any]) -> None:
    for burst in found[-_LINES:]:
        when = datetime.fromtimestamp(burst.start_ns / 1e9, tz=UTC).astimezone()
        beside = "".join(f"  {name} +{growth}" for name, growth in burst.beside.items())
        print(
            f"{when:%H:%M:%S.%f}  {port} {direction:<8}  {burst.duration_ns / 1e6:8.2f} ms  "
            f"peak {burst.peak_ratio:4.0%}  {burst.bytes / 1e3:10,.0f} kB{beside}",
            file=sys.stderr,
        )
    if len(found) > _LINES:
        print(f"… and {len(found) - _LINES} more on {port} {direction}", file=sys.stderr)
