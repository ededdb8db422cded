"""VictoriaMetrics and Prometheus from Debian, on free ports, with data in a temporary folder."""

import contextlib
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MetricServer", "free_port", "prometheus", "victoria_metrics"]


@dataclass(frozen=True, kw_only=True)
class MetricServer:
    """A running server."""

    url: str
    folder: Path
    process: subprocess.Popen


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as handle:
        handle.bind(("127.0.0.1", 0))
        return handle.getsockname()[1]


def _await(url: str, process: subprocess.Popen, log: Path, timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args[0]} ended: {log.read_text()[-2000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            if answer.status == 200:
                return
        time.sleep(0.02)
    raise RuntimeError(f"{process.args[0]} does not answer: {log.read_text()[-2000:]}")


@contextlib.contextmanager
def _serving(command, url, health, folder):
    log = folder / "log"
    with log.open("w") as handle:
        process = subprocess.Popen(command, stdout=handle, stderr=handle)
    try:
        _await(url + health, process, log)
        yield MetricServer(url=url, folder=folder, process=process)
    finally:
        process.terminate()
        process.wait(20)


def victoria_metrics(folder: Path, *, retention: str = "100y"):
    """Start VictoriaMetrics; a context manager giving a MetricServer."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "victoria-metrics", f"-httpListenAddr=127.0.0.1:{port}", f"-storageDataPath={folder}/data",
        f"-retentionPeriod={retention}", "-search.latencyOffset=0s", "-memory.allowedBytes=1GB",
        "-search.maxPointsPerTimeseries=100000",
    ]  # fmt: skip
    return _serving(command, f"http://127.0.0.1:{port}", "/health", folder)


def prometheus(folder: Path):
    """Start Prometheus with its remote write receiver; a context manager giving a MetricServer."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(
        "storage:\n  tsdb:\n    out_of_order_time_window: 30d\n", encoding="utf-8"
    )
    command = [
        "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver",
        "--log.level=warn",
    ]  # fmt: skip
    return _serving(command, f"http://127.0.0.1:{port}", "/-/ready", folder)


def flush(server: MetricServer) -> None:
    """Make VictoriaMetrics show what it has just taken."""
    with urllib.request.urlopen(server.url + "/internal/force_flush", timeout=10) as answer:
        answer.read()
