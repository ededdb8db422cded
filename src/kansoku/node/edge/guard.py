"""Run the node guard's checks in children under one deadline.

A call into a wedged driver or a dead file server never returns and cannot be killed, so each group
of checks runs in a child of its own that writes what it finds into a pipe. At the deadline the
parent goes with what it has; what hangs stays behind, outside the job.
"""

import csv
import ctypes
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kansoku.errors import ConfigurationError, KansokuError
from kansoku.node.edge.kmsg import Kmsg
from kansoku.node.edge.machine import Machine
from kansoku.node.guard import CHECKS, Check, GuardPolicy
from kansoku.node.host import Host

__all__ = ["Readings", "policy_in_time", "process_age_s", "run_checks"]

_RECOVERY_ACTION = 230
_STA_UNSYNC = 0x40
_MOST_LOG_ROUNDS = 200


def process_age_s() -> float:
    """Return how long ago this process was started, the interpreter's start included."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        ticks = int(file.read().rpartition(")")[2].split()[19])
    started_s = ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 40),
    )


class Readings:
    """NVML, the kernel's clock and its log, of this machine."""

    def __init__(self, *, kmsg: str = "/dev/kmsg") -> None:
        self._kmsg = kmsg

    def gpus(self) -> list[Mapping[str, float | None]] | None:
        """Ask NVML; None where there is no library or driver."""
        from kansoku.node.edge.nvml import GpuLostError, NvmlLibrary

        try:
            library = NvmlLibrary()
        except KansokuError:
            return None
        found: list[Mapping[str, float | None]] = []
        for index, handle in enumerate(library.handles()):
            if handle is None:
                found.append({"lost": 1.0})
                continue
            try:
                rows = library.ask(index, "nvmlDeviceGetRemappedRows", handle)
                fields = library.fields(index, handle, [_RECOVERY_ACTION])
                found.append(
                    {
                        "lost": 0.0,
                        # Since boot: what was before was looked at when the node came back.
                        "ecc_uncorrected": library.ask(
                            index, "nvmlDeviceGetTotalEccErrors", handle, 1, 0
                        ),
                        "remap_pending": rows[2] if rows else None,
                        "remap_failed": rows[3] if rows else None,
                        "pcie_width": library.ask(index, "nvmlDeviceGetCurrPcieLinkWidth", handle),
                        "pcie_width_max": library.ask(
                            index, "nvmlDeviceGetMaxPcieLinkWidth", handle
                        ),
                        "recovery_action": fields.get(_RECOVERY_ACTION),
                    }
                )
            except GpuLostError:
                found.append({"lost": 1.0})
        return found

    def clock(self) -> tuple[bool, float] | None:
        """Ask the kernel's clock discipline (adjtimex), without changing it."""
        state = _Timex()
        try:
            if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
                return None
        except (OSError, AttributeError):
            return None
        return not state.status & _STA_UNSYNC, state.maxerror / 1e6

    def hardware_codes(self) -> frozenset[tuple[str, int | None]]:
        """Read the catalogue's table by hand: its package costs a tenth of the time there is."""
        table = Path(__file__).parents[2] / "catalog" / "data" / "xid.csv"
        with table.open(encoding="utf-8", newline="") as file:
            return frozenset(
                (row["kind"], int(row["code"], 0))
                for row in csv.DictReader(file)
                if row["responsibility"].startswith(("hardware", "fabric-nv", "thermal"))
                and row["fatal_to_job"].startswith(("yes", "always"))
            )

    def kernel_log(self) -> list[str]:
        """Return what the kernel still holds; empty without the right to read it."""
        try:
            log = Kmsg(path=self._kmsg, from_boot=True)
        except OSError:
            return []
        try:
            records: list[str] = []
            for _ in range(_MOST_LOG_ROUNDS):
                more, _lost = log.read()
                if not more:
                    break
                records += more
            return records
        finally:
            log.close()


def _child(pipe: int, group: int, host: Host, policy: GuardPolicy, readings: Readings) -> None:
    for function in CHECKS[group][1]:
        try:
            for check in function(host, policy, readings):
                os.write(pipe, json.dumps(asdict(check)).encode() + b"\n")
        except Exception as error:  # noqa: BLE001 - a broken check must not block a job
            name = function.__name__.strip("_")
            broken = Check(name=name, status="broken", sentence=f"{type(error).__name__}: {error}")
            os.write(pipe, json.dumps(asdict(broken)).encode() + b"\n")


def _fork(work: Callable[[int], None]) -> tuple[int, int]:
    """Run work in a child that may hang; return its pid and the end of its pipe to read."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            os.close(read_end)
            # Whoever waits for our output must not wait for a child that hangs in the kernel.
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            work(write_end)
        except BaseException:  # noqa: BLE001 - the parent sees a closed pipe
            code = 1
        os._exit(code)
    os.close(write_end)
    return pid, read_end


def policy_in_time(read: Callable[[], GuardPolicy], *, budget_s: float) -> GuardPolicy:
    """Return the policy; raise ConfigurationError where it cannot be read within the budget.

    Its file may lie on a file system that hangs, and no signal ends such a read.
    """

    def work(pipe: int) -> None:
        try:
            answer: dict[str, Any] = {"policy": asdict(read())}
        except ConfigurationError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - told to the parent, which fails open
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(pipe, json.dumps(answer).encode())

    pid, pipe = _fork(work)
    end, text = time.monotonic() + budget_s, b""
    selector = selectors.DefaultSelector()
    selector.register(pipe, selectors.EVENT_READ)
    while (left := end - time.monotonic()) > 0 and selector.select(left):
        data = os.read(pipe, 65536)
        if not data:
            break
        text += data
    os.close(pipe)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, os.WNOHANG)
    try:
        answer = json.loads(text)
    except ValueError:
        raise ConfigurationError("the policy did not answer in time") from None
    if "error" in answer:
        raise ConfigurationError(answer["error"])
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in answer["policy"].items()
    }
    return GuardPolicy(**values)


def _parse(data: bytes) -> Iterable[Check]:
    for line in data.splitlines():
        try:
            yield Check(**json.loads(line))
        except (ValueError, TypeError):
            continue  # cut off at the deadline


def run_checks(
    policy: GuardPolicy,
    *,
    budget_s: float,
    host: Host | None = None,
    readings: Readings | None = None,
) -> list[Check]:
    """Return what every check said within the budget; those without an answer are ``late``."""
    host, readings = host or Machine(), readings or Readings()
    end = time.monotonic() + budget_s
    selector = selectors.DefaultSelector()
    pids: dict[int, int] = {}
    texts: dict[int, bytes] = {}
    for group in range(len(CHECKS)):
        pid, pipe = _fork(partial(_child, group=group, host=host, policy=policy, readings=readings))
        pids[group], texts[group] = pid, b""
        selector.register(pipe, selectors.EVENT_READ, group)
    while selector.get_map() and (left := end - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            data = os.read(key.fd, 65536)
            if data:
                texts[key.data] += data
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                os.waitpid(pids.pop(key.data), 0)
    for key in list(selector.get_map().values()):
        os.close(key.fd)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)  # one that hangs in the kernel is init's to collect
    found = []
    for group, (_, _, names) in enumerate(CHECKS):
        said = list(_parse(texts[group]))
        found += said
        if group in pids:
            answered = {check.name for check in said}
            found += [
                Check(name=name, status="late", sentence="no answer in time")
                for name in names
                if name not in answered
            ]
    return found
