"""Range queries to a PromQL endpoint: Prometheus, VictoriaMetrics and their like."""

from collections.abc import Iterator, Mapping

import httpx
import numpy as np

from kansoku.errors import InputError, PlatformError
from kansoku.jobs.heatmap import Sample

__all__ = ["DEVICE_LABELS", "NODE_LABELS", "device_of", "node_of", "query_range"]

NODE_LABELS = (
    "host.name", "host_name", "Hostname", "hostname", "node", "host", "exported_instance",
    "instance",
)  # fmt: skip
DEVICE_LABELS = (
    "hw.name", "hw_name", "gpu", "gpu_index", "index", "minor_number", "device", "hw.id", "hw_id",
    "UUID",
)  # fmt: skip
_MOST_POINTS = 10_000  # Prometheus refuses more than 11,000 a series
_NS = 1_000_000_000


def node_of(labels: Mapping[str, str]) -> str | None:
    """Return the node that a series belongs to, without port and domain; None if it says none."""
    for name in NODE_LABELS:
        if labels.get(name):
            host = labels[name].rsplit(":", 1)[0] if name == "instance" else labels[name]
            return host if host.replace(".", "").isdigit() else host.split(".")[0]
    return None


def device_of(labels: Mapping[str, str]) -> str:
    """Return the GPU or NIC of a series, such as ``3`` or ``mlx5_0``."""
    for name in DEVICE_LABELS:
        if labels.get(name):
            text = labels[name]
            return text.removeprefix("gpu") if text.removeprefix("gpu").isdigit() else text
    return "0"


def query_range(
    url: str,
    query: str,
    *,
    since_ns: int,
    until_ns: int,
    step_ns: int,
    transport: httpx.BaseTransport | None = None,
) -> Iterator[Sample]:
    """Yield every series of the answer, asked for in parts that the server accepts."""
    step_s = max(step_ns // _NS, 1)
    query = query.replace("$step", f"{max(step_s, 60)}s")
    base = url.rstrip("/")
    with httpx.Client(timeout=60, transport=transport) as client:
        at = since_ns // _NS
        end = (until_ns - 1) // _NS
        while at <= end:
            last = min(at + _MOST_POINTS * step_s, end)
            form = {"query": query, "start": str(at), "end": str(last), "step": f"{step_s}s"}
            try:
                answer = client.post(f"{base}/api/v1/query_range", data=form)
                content = answer.json()
            except (httpx.HTTPError, ValueError) as error:
                raise PlatformError(
                    f"no answer to a range query: {error}", where=url,
                    remedy="give the address that has /api/v1/query_range",
                ) from None  # fmt: skip
            if content.get("status") != "success":
                raise InputError(str(content.get("error", answer.status_code)), where=url)
            for series in content["data"]["result"]:
                labels = series["metric"]
                node = node_of(labels)
                if node is None:
                    continue
                points = np.array(series["values"], dtype=object)
                times = (points[:, 0].astype(np.float64) * 1000).astype(np.int64) * 1_000_000
                yield node, device_of(labels), times, points[:, 1].astype(np.float64)
            at = last + step_s
