"""Open the store that a command was told: a folder, a running server, a fleet's back ends."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import polars as pl
import pyarrow as pa

from kansoku.catalog.metrics import metrics, prometheus_name
from kansoku.errors import StoreError
from kansoku.store import HttpStore, LocalStore, Store, StoreLimits

if TYPE_CHECKING:
    from kansoku.store.fleet import Naming
    from kansoku.telemetry import MetricInfo

__all__ = ["default_store", "describe_metric", "open_fleet", "open_store"]


def default_store() -> Path:
    """Return the folder of the store when none is named: the XDG state folder."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "kansoku" / "store"


def open_store(
    folder_or_url: str | Path | None = None,
    *,
    limits: StoreLimits | None = None,
    token: str | None = None,
) -> Store:
    """Return the store; close it when done.

    A URL is a running server, asked with ``token`` (default: environment KANSOKU_TOKEN);
    ``otlp+URL`` a gateway that only takes rows. A folder is opened in this process, or asked over
    HTTP where a server owns it. Raises StoreError naming the owner where it can be neither.
    """
    token = token or os.environ.get("KANSOKU_TOKEN")
    if str(folder_or_url or "").startswith(("otlp+http://", "otlp+https://")):
        headers = {"authorization": f"Bearer {token}"} if token else None
        return open_fleet({"otlp": str(folder_or_url).removeprefix("otlp+")}, headers=headers)
    if str(folder_or_url or "").startswith(("http://", "https://")):
        return HttpStore(str(folder_or_url), token=token)
    folder = Path(folder_or_url or default_store())
    try:
        return LocalStore(folder, limits=limits)
    except StoreError:
        address = folder / "address"
        if not address.exists():
            raise
        return HttpStore(address.read_text(encoding="utf-8").strip(), token=token)


def open_fleet(
    stores: Mapping[str, str],
    *,
    naming: str = "collector",
    headers: Mapping[str, str] | None = None,
    token: str | None = None,
) -> Store:
    """Return one store over the back ends of a cluster file (:attr:`Cluster.stores`).

    ``metrics`` is VictoriaMetrics or Prometheus, ``logs`` VictoriaLogs, ``traces`` VictoriaTraces
    (or ``jaeger+URL`` for a Jaeger API), ``kansoku`` a kansoku server for jobs, ``otlp`` where
    rows are written. ``naming`` says how metrics are called there: ``collector`` as OpenTelemetry
    translates for Prometheus (units and ``_total`` appended, what ``kansoku deploy render`` sets
    up), ``prometheus`` with underscores alone, ``verbatim`` with dots. ``headers``
    go to every back end but kansoku's, which takes ``token``.
    """
    from kansoku.store.fleet import (
        BackEnd,
        FleetStore,
        JaegerSpans,
        LogsqlEvents,
        LogsqlSpans,
        Naming,
        PromMetrics,
        RemoteWriter,
    )

    def reach(url: str) -> BackEnd:
        return BackEnd(url, headers=headers)

    metrics, logs, traces = (stores.get(name) for name in ("metrics", "logs", "traces"))
    jaeger = traces is not None and traces.startswith("jaeger+")
    spans: LogsqlSpans | JaegerSpans | None = None
    if traces is not None:
        spans = (
            JaegerSpans(reach(traces.removeprefix("jaeger+")), prefix="")
            if jaeger
            else LogsqlSpans(reach(traces))
        )
    own, otlp = stores.get("kansoku"), stores.get("otlp")
    names = _collector_naming() if naming == "collector" else Naming(style=naming)
    return FleetStore(
        metrics=PromMetrics(reach(metrics), naming=names) if metrics else None,
        remote_write=RemoteWriter(reach(metrics), naming=names) if metrics else None,
        logs=LogsqlEvents(reach(logs)) if logs else None,
        spans=spans,
        own=HttpStore(own, token=token or os.environ.get("KANSOKU_TOKEN")) if own else None,
        write=_otlp_writer(otlp, headers or {}) if otlp else None,
    )


def describe_metric(name: str) -> "MetricInfo | None":
    """Return what the catalogue says of a metric, None for one that it does not declare."""
    from kansoku.telemetry import MetricInfo

    entry = metrics().get(name)
    if entry is None:
        return None
    return MetricInfo(unit=entry.unit, kind=entry.kind.value, description=entry.meaning)


def _collector_naming() -> "Naming":
    """Return names as OpenTelemetry's translation for Prometheus makes them."""
    from kansoku.store.fleet import Naming
    from kansoku.store.fleet.names import KNOWN_LABELS

    declared = metrics()
    attributes = {name for entry in declared.values() for name in entry.attributes}
    return Naming(
        labels=(*KNOWN_LABELS, *sorted(attributes - set(KNOWN_LABELS))),
        suffixes={
            name: prometheus_name(name).removeprefix(name.replace(".", "_")) for name in declared
        },
    )


def _otlp_writer(url: str, headers: Mapping[str, str]) -> Callable[[Mapping[str, pa.Table]], None]:
    """Return a function that sends rows as OTLP over HTTP, once and without a spool."""
    from kansoku.telemetry import encode

    def write(tables: Mapping[str, pa.Table]) -> None:
        frames: dict[str, pl.DataFrame] = {}
        for name, rows in tables.items():
            frame = pl.from_arrow(rows)
            if isinstance(frame, pl.DataFrame):
                frames[name] = frame
        requests = encode(frames, resource={"service.name": "kansoku"}, describe=describe_metric)
        for signal, message in requests.items():
            try:
                httpx.post(
                    f"{url.rstrip('/')}/v1/{signal}",
                    content=message.SerializeToString(),
                    headers={**headers, "content-type": "application/x-protobuf"},
                    timeout=60,
                ).raise_for_status()
            except httpx.HTTPError as error:
                raise StoreError(f"writing {signal}: {error}", where=url) from None

    return write
