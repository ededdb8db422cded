"""What `kansoku top` costs inside a job of 1,024 ranks: CPU of the real command on a real terminal.

A server in this process gets a step of every rank each second; the command runs in a pseudo
terminal of 120 × 40, goes into the job and is left alone. Its CPU time is that of the kernel's
account (``/proc/PID/stat``), user and system, over the seconds that follow.
"""

import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from fcntl import ioctl
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.table import Row, print_table

RANKS = 1024
SECONDS = 20.0
_WARM_S = 12.0
_PHASES = {"data_wait": 20, "forward": 280, "backward": 480, "optimizer": 60, "collective": 150,
           "checkpoint": 0, "other": 10}  # fmt: skip


def _steps(run: str, ranks: int, step: int, start_ns: int) -> pl.DataFrame:
    """Return one step of each rank: about a second, a little different on each."""
    from kansoku.model import PHASES, table_schema

    random = np.random.default_rng(step)
    took = (random.normal(990.0, 5.0, ranks) * 1e6).astype(np.int64)
    took[min(77, ranks - 1)] += 60_000_000
    rows = {
        "run": [run] * ranks,
        "rank": np.arange(ranks, dtype=np.int32),
        "step": np.full(ranks, step, np.int32),
        "start_ns": np.full(ranks, start_ns),
        "duration_ns": took,
        "complete": [True] * ranks,
        "tokens": np.full(ranks, 4096.0),
    }
    rows |= {f"{p.value}_ns": took * _PHASES[p.value] // 1000 for p in PHASES}
    schema = table_schema("steps")
    return pl.DataFrame(rows).with_columns(
        [pl.lit(None).alias(name) for name in schema if name not in rows]
    ).select([pl.col(name).cast(kind) for name, kind in schema.items()])  # fmt: skip


def _feed(store: object, stop: threading.Event) -> None:
    step, now = 0, time.time_ns()
    for past in range(60, 0, -1):
        _append(store, step := step + 1, now - past * 10**9)
    while not stop.wait(max(0.0, (now - time.time_ns()) / 1e9)):
        now += 10**9
        _append(store, step := step + 1, now - 10**9)


def _append(store: object, step: int, start_ns: int) -> None:
    for run, ranks in (("a-big", RANKS), ("b-small", 2)):
        store.append("steps", _steps(run, ranks, step, start_ns))  # type: ignore[attr-defined]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Terminal:
    """The command in a pseudo terminal; what it draws is read and forgotten but for the last."""

    def __init__(self, url: str) -> None:
        main, child = pty.openpty()
        ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kansoku", "top", url], stdin=child, stdout=child, stderr=child,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
        )  # fmt: skip
        os.close(child)
        self._main = main
        self.drawn = b""

    def watch(self, seconds: float) -> int:
        """Read what is drawn for a while; return how many bytes."""
        end, size = time.monotonic() + seconds, 0
        while (left := end - time.monotonic()) > 0:
            if select.select([self._main], [], [], left)[0]:
                data = os.read(self._main, 1 << 16)
                size += len(data)
                self.drawn = (self.drawn + data)[-(1 << 18) :]
        return size

    def press(self, keys: bytes) -> None:
        os.write(self._main, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


def _measured(url: str) -> tuple[float, float]:
    """Return the command's CPU share inside the job, and the bytes it draws a second."""
    terminal = _Terminal(url)
    try:
        terminal.watch(6.0)
        terminal.press(b"\r")
        terminal.watch(_WARM_S)
        if f"ranks {RANKS}".encode() not in terminal.drawn:
            raise RuntimeError("the command is not inside the job")
        before, began = _cpu_s(terminal.process.pid), time.monotonic()
        size = terminal.watch(SECONDS)
        took = time.monotonic() - began
        return (_cpu_s(terminal.process.pid) - before) / took, size / took
    finally:
        terminal.close()


def main() -> None:
    """Print the table."""
    from kansoku.app.serve import Server, ServeSettings

    with tempfile.TemporaryDirectory() as folder:
        settings = ServeSettings(folder=Path(folder), port=0, otlp_port=0, grpc_port=None)
        server = Server(settings)
        server.start()
        stop = threading.Event()
        feeder = threading.Thread(target=_feed, args=(server.store, stop))
        feeder.start()
        try:
            share, drawn = _measured(server.url)
        finally:
            stop.set()
            feeder.join()
            server.stop()
    print_table(
        "kansoku top inside a job",
        [
            Row(
                what=f"CPU, {RANKS:,} ranks, one picture a second",
                measured=100 * share, unit="% of a core", target="< 5", met=share < 0.05,
            ),
            Row(what="drawn on the terminal", measured=drawn / 1e3, unit="kB/s", target=""),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
