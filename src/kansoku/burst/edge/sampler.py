"""Read every port each millisecond in a process of its own; find bursts in this one."""

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import polars as pl

from kansoku.burst.detect import Burst, Detector
from kansoku.burst.edge._reader_process import ANSWER, HEADER, TEXT
from kansoku.burst.edge.native import start_native
from kansoku.burst.edge.ports import Port
from kansoku.burst.policy import BurstPolicy
from kansoku.burst.rows import PortBursts, burst_rows, window_rows
from kansoku.errors import ConfigurationError, PlatformError

__all__ = ["Readings", "Sampler"]

Ints = npt.NDArray[np.int64]
_BUFFER_NS = 8_000_000_000  # what the ring holds
_BUFFER_BYTES = 64 << 20
_SLOW_READING = 0.5  # a reading that took longer than this share of the interval is torn
_LEAST_TORN_NS = 300_000
_ANSWER_TYPE, _NEWSTATS = 4, 92  # where an answer says that it holds counters
_NETLINK = {"receive": 48, "transmit": 56}  # rx_bytes, tx_bytes in the answer
_DROPPED = {"receive": ("rx_dropped", 80), "transmit": ("tx_dropped", 88)}
_SIDES = ("receive", "transmit")
_POWERS = 10 ** np.arange(20, dtype=np.uint64)


class Readings:
    """The ring that the reading process fills, and that process."""

    def __init__(
        self, ports: Sequence[Port], *, interval_ns: int, real_time: bool, native: bool = True
    ) -> None:
        """Start reading; raise PlatformError where the process cannot run."""
        self._ports = list(ports)
        self._interfaces = [port for port in ports if port.index is not None]
        self._files = [(port.name, side) for port in ports for side in _SIDES if port.files]
        self._slow = [(port.name, name) for port in ports for name in port.beside]
        paths = {(port.name, side): path for port in ports for side, path in port.files.items()}
        slow = {(port.name, name): path for port in ports for name, path in port.beside.items()}
        self._row = 16 + ANSWER * len(self._interfaces)
        self._row += TEXT * (len(self._files) + len(self._slow))
        self._rows = max(min(_BUFFER_NS // interval_ns, _BUFFER_BYTES // self._row), 16)
        size = HEADER + self._rows * self._row
        self._fd = os.memfd_create("kansoku-burst")
        os.ftruncate(self._fd, size)
        self._memory = mmap.mmap(self._fd, size)
        indices = [int(port.index or 0) for port in self._interfaces]
        fast = [str(paths[key]) for key in self._files]
        rest = [str(slow[key]) for key in self._slow]
        made = None
        if native:
            head = (self._fd, interval_ns, self._rows, int(real_time))
            numbers = (*head, len(indices), len(fast), len(rest), *indices)
            made = start_native([*map(str, numbers), *fast, *rest], self._fd)
        self.native = made is not None
        """Whether the compiled reader runs, not the one in Python."""
        self._process = made or self._start_python(
            {"fd": self._fd, "interval_ns": interval_ns, "rows": self._rows,
             "real_time": real_time, "interfaces": indices, "files": fast, "slow_files": rest}
        )  # fmt: skip
        self._taken = 0
        self.overrun = 0
        """Rows that were overwritten before they were taken."""

    def _start_python(self, words: Mapping[str, object]) -> "subprocess.Popen[bytes]":
        script = Path(__file__).with_name("_reader_process.py")
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), json.dumps(words)],
            pass_fds=[self._fd],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        """The reading process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def written(self) -> int:
        """Rows written so far."""
        return int.from_bytes(self._memory[:8], "little")

    def take(self) -> npt.NDArray[np.uint8]:
        """Return new rows as bytes, shape ``(rows, row size)``.

        Raises PlatformError when the process has died.
        """
        if self._process.poll() is not None and self.written == self._taken:
            text = b"" if self._process.stderr is None else self._process.stderr.read()
            last = text.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            raise PlatformError(f"the counter reader ended: {last[0]}")
        end = self.written
        begin = max(self._taken, end - self._rows)
        ring = np.frombuffer(self._memory, dtype=np.uint8, offset=HEADER)
        ring = ring[: self._rows * self._row].reshape(self._rows, self._row)
        rows = ring[np.arange(begin, end) % self._rows]
        # What was overwritten while it was copied is no reading.
        safe = max(begin, self.written - self._rows + 1)
        rows = rows[max(safe - begin, 0) :]
        self.overrun += max(safe, begin) - self._taken
        self._taken = end
        return rows

    def columns(
        self, rows: npt.NDArray[np.uint8]
    ) -> tuple[Ints, Ints, dict[tuple[str, str], Ints], dict[tuple[str, str], Ints]]:
        """Return the stamps before and after, bytes by (port, direction), counters beside."""
        before, after = self._number(rows, 0), self._number(rows, 8)
        counters: dict[tuple[str, str], Ints] = {}
        beside: dict[tuple[str, str], Ints] = {}
        for n, port in enumerate(self._interfaces):
            for side in _SIDES:
                counters[port.name, side] = self._number(rows, 16 + n * ANSWER + _NETLINK[side])
                name, offset = _DROPPED[side]
                beside[port.name, name] = self._number(rows, 16 + n * ANSWER + offset)
        at = 16 + ANSWER * len(self._interfaces)
        for key in self._files:
            counters[key] = _parse(rows[:, at : at + TEXT]) * 4  # words of 4 bytes
            at += TEXT
        for key in self._slow:
            beside[key] = _parse(rows[:, at : at + TEXT])
            at += TEXT
        return before, after, counters, beside

    def there(self, rows: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.bool_]]:
        """Return by port which readings found it there; what has gone keeps its last bytes.

        The kernel answers for an interface that has gone with an error. A file that has gone is
        looked for now, whatever the reading's time.
        """
        found = {
            port.name: self._short(rows, 16 + n * ANSWER + _ANSWER_TYPE) == _NEWSTATS
            for n, port in enumerate(self._interfaces)
        }
        for port in self._ports:
            if port.files:
                exists = all(path.exists() for path in port.files.values())
                found[port.name] = np.full(len(rows), exists)
        return found

    @staticmethod
    def _short(rows: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[np.uint16]:
        return np.ascontiguousarray(rows[:, offset : offset + 2]).view(np.uint16)[:, 0]

    @staticmethod
    def _number(rows: npt.NDArray[np.uint8], offset: int) -> Ints:
        return np.ascontiguousarray(rows[:, offset : offset + 8]).view(np.int64)[:, 0]

    def close(self) -> None:
        """End the process and give the memory back."""
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._memory.close()
        os.close(self._fd)


def _concerns(counter: str, side: str) -> bool:
    """Return whether a counter belongs to this direction: ``tx_…`` does not to receiving."""
    other = {"receive": "tx_", "transmit": "rx_"}[side]
    return not counter.startswith(other)


def _parse(text: npt.NDArray[np.uint8]) -> Ints:
    """Return decimal numbers that end with a newline, shape ``(rows,)``; garbage reads as 0."""
    ends = text == 10
    length = np.where(ends.any(axis=1), ends.argmax(axis=1), 0)
    digits = text.astype(np.int64) - 48
    position = length[:, None] - 1 - np.arange(text.shape[1])
    digits = np.where((position >= 0) & (digits >= 0) & (digits <= 9), digits, 0)
    powers = _POWERS[np.clip(position, 0, 19)].astype(np.int64)
    total: Ints = (digits * powers).sum(axis=1)
    return total


class Sampler:
    """Bursts of this node's ports, as rows of tables.

    Use as a context manager, or call :meth:`start` and :meth:`close`. :meth:`read` is cheap and
    may be called as seldom as every few seconds; it returns what is finished by then.
    """

    def __init__(
        self,
        ports: Sequence[Port],
        *,
        node: str,
        interval_ns: int = 1_000_000,
        policy: BurstPolicy | None = None,
        real_time: bool = True,
        native: bool = True,
        unix_ns: Callable[[], int] = time.time_ns,
        slow_counters: Callable[[str], Mapping[str, int]] | None = None,
    ) -> None:
        """``real_time`` runs the reader under SCHED_FIFO where that is allowed.

        ``native`` compiles it where there is a compiler. ``slow_counters`` gives a port's
        counters that take too long for every reading, such as a driver's pause frames; they are
        read once a window.
        """
        if not 50_000 <= interval_ns <= 1_000_000_000:
            raise ConfigurationError(
                f"burst sampling interval {interval_ns} ns is not within 50 µs and 1 s"
            )
        if not ports:
            raise ConfigurationError("burst sampling needs at least one port")
        self.ports = list(ports)
        self.node = node
        self.interval_ns = interval_ns
        self.policy = policy or BurstPolicy()
        self._real_time, self._native = real_time, native
        self._unix_ns = unix_ns
        self._readings: Readings | None = None
        self._detectors = {
            (port.name, side): Detector(
                line_rate_bytes_per_s=port.line_rate_bits_per_s / 8,
                interval_ns=interval_ns,
                policy=self.policy,
            )
            for port in self.ports
            for side in _SIDES
        }
        self._bursts: dict[tuple[str, str], list[Burst]] = {key: [] for key in self._detectors}
        self._due_ns = 0
        self._slow_counters = slow_counters
        self._slow: dict[str, Mapping[str, int]] = {}
        self.torn = 0
        """Readings thrown away: the reader was interrupted between its two stamps."""
        self.gone: dict[str, int] = {}
        """Ports that went away, and Unix nanoseconds of the first reading without them."""

    def start(self) -> None:
        """Begin reading."""
        self._readings = Readings(
            self.ports, interval_ns=self.interval_ns, real_time=self._real_time,
            native=self._native,
        )  # fmt: skip
        self._due_ns = self._unix_ns() + int(self.policy.window_s * 1e9)
        self._grown()

    def _grown(self) -> dict[str, dict[str, int]]:
        """Return how far each port's slow counters grew since the last call."""
        if self._slow_counters is None:
            return {}
        found = {}
        for port in self.ports:
            now, before = self._slow_counters(port.name), self._slow.get(port.name, {})
            self._slow[port.name] = now
            found[port.name] = {
                name: max(value - before[name], 0) for name, value in now.items() if name in before
            }
        return found

    def wait_reading(self, timeout_s: float = 10.0) -> None:
        """Return when the reader has written; raise PlatformError when it cannot."""
        deadline = time.monotonic() + timeout_s
        while self._readings is not None and self._readings.written == 0:
            if not self._readings.alive or time.monotonic() > deadline:
                self._readings.take()
                raise PlatformError(f"the counter reader gave nothing for {timeout_s:g} s")
            time.sleep(0.005)

    @property
    def reader_pid(self) -> int | None:
        """Process id of the reader, for its CPU time."""
        return None if self._readings is None else self._readings.pid

    @property
    def native(self) -> bool:
        """Whether the compiled reader runs."""
        return self._readings is not None and self._readings.native

    @property
    def overrun(self) -> int:
        """Readings lost because :meth:`read` came too seldom."""
        return 0 if self._readings is None else self._readings.overrun

    def poll(self) -> dict[tuple[str, str], list[Burst]]:
        """Take the readings so far; return the bursts finished by them, by (port, direction)."""
        if self._readings is None:
            return {}
        rows = self._readings.take()
        if len(rows) == 0:
            return {}
        before, after, counters, beside = self._readings.columns(rows)
        torn = after - before > max(int(self.interval_ns * _SLOW_READING), _LEAST_TORN_NS)
        self.torn += int(torn.sum())
        offset = self._unix_ns() - time.monotonic_ns()  # taken anew: NTP slews the Unix clock
        times = before + (after - before) // 2 + offset
        there = self._readings.there(rows)
        self._note_gone(times, there)
        found: dict[tuple[str, str], list[Burst]] = {}
        for key, detector in self._detectors.items():
            port, side = key
            keep = there[port] & ~torn
            own = {
                name: values[keep]
                for (owner, name), values in beside.items()
                if owner == port and _concerns(name, side)
            }
            bursts = detector.feed(times[keep], counters[key][keep], own)
            if bursts:
                found[key] = bursts
                self._bursts[key] += bursts
        return found

    def _note_gone(self, times: Ints, there: Mapping[str, npt.NDArray[np.bool_]]) -> None:
        for port, found in there.items():
            if found[-1]:
                self.gone.pop(port, None)
            elif port not in self.gone:
                last = np.flatnonzero(found)
                self.gone[port] = int(times[last[-1] + 1 if len(last) else 0])

    def windows(self, *, final: bool = False) -> list[PortBursts]:
        """Return every port's window when it is over (``final``: as it stands), else nothing."""
        now = self._unix_ns()
        if not final and now < self._due_ns:
            return []
        self._due_ns = now + int(self.policy.window_s * 1e9)
        found = []
        slow = self._grown()
        rates = {port.name: port.line_rate_bits_per_s / 8 for port in self.ports}
        for (port, side), detector in self._detectors.items():
            if final:
                self._bursts[port, side] += detector.flush()
            window = detector.window()
            bursts, self._bursts[port, side] = self._bursts[port, side], []
            if window is not None:
                for name, growth in slow.get(port, {}).items():
                    if _concerns(name, side):
                        window.beside[name] = growth
                found.append(
                    PortBursts(
                        node=self.node,
                        port=port,
                        direction=side,
                        line_rate_bytes_per_s=rates[port],
                        sampling_ns=self.interval_ns,
                        window=window,
                        bursts=bursts,
                    )
                )
        return found

    def read(self, *, final: bool = False) -> dict[str, pl.DataFrame]:
        """Return rows of ``bursts`` and ``metrics`` for windows that are over; often nothing."""
        self.poll()
        return self.tables(self.windows(final=final))

    @staticmethod
    def tables(found: Sequence[PortBursts]) -> dict[str, pl.DataFrame]:
        """Return windows as rows of tables."""
        if not found:
            return {}
        rows = {"metrics": window_rows(found)}
        bursts = burst_rows(found)
        return {**rows, "bursts": bursts} if len(bursts) else rows

    def close(self) -> None:
        """End the reading process."""
        readings, self._readings = self._readings, None
        if readings is not None:
            readings.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
