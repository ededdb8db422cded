"""Service tracing by what the kernel sees: queue pairs of running jobs become service tuples."""

import logging
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kansoku.errors import InputError
from kansoku.fabric.edge.uplink import ControllerAway

if TYPE_CHECKING:
    from kansoku.fabric.edge.uplink import Line
    from kansoku.fabric.service import Learner, QueuePair

__all__ = ["ServiceLearning", "job_of_process"]

_log = logging.getLogger(__name__)
_EVERY_S = 1.0
_LEASE_S = 30.0  # a job ends at the controller when nothing is heard of it for this long
_RENEW_S = 10.0


def job_of_process(pid: int, *, root: Path = Path("/proc")) -> str:
    """Return the Slurm job of a process, or ``pid-N`` for one outside Slurm."""
    try:
        words = (root / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        words = []
    for word in words:
        name, _, value = word.partition(b"=")
        if name == b"SLURM_JOB_ID" and value.isdigit():
            return value.decode()
    return f"pid-{pid}"


class ServiceLearning:
    """Tells the controller the tuples of the queue pairs that live on this node.

    Each job is known there as ``JOB.NODE``, so that nodes do not overwrite each other.
    """

    def __init__(
        self,
        node: str,
        devices: Iterable[str],
        learner: "Learner",
        line: "Line",
        *,
        job_of: Callable[[int], str] = job_of_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``devices`` are the agent's RNICs; queue pairs of others are passed over."""
        self._node = node
        self._devices = set(devices)
        self._learner = learner
        self._line = line
        self._job_of = job_of
        self._alive: dict[tuple[str, int], tuple[str, QueuePair]] = {}
        self._told: dict[str, frozenset[tuple[str, str, int]]] = {}
        self._told_s: dict[str, float] = {}
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="service learning", daemon=True)

    def start(self) -> None:
        """Follow in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the services told."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._alive.clear()
        self._tell()
        self._line.close()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                self.step()
            except Exception:  # noqa: BLE001 - an agent loop; logged
                _log.exception("service learning")

    def step(self) -> None:
        """Take what was connected or destroyed; tell the controller what changed."""
        for pair in self._learner.poll():
            key = (pair.device, pair.qpn)
            if pair.gone:
                self._alive.pop(key, None)
            elif pair.device in self._devices:
                self._alive[key] = (self._job_of(pair.pid), pair)
        self._tell()

    def _tell(self) -> None:
        from kansoku.fabric.messages import ServiceTuple
        from kansoku.fabric.service import tuple_of_queue_pair

        if not self._alive and not self._told:
            return
        try:
            names: dict[str, str] = {}
            if self._alive:
                names = self._line.request("GET", "/fabric/rnics", None, dict[str, str]) or {}
            by_gid = {_gid(address): name for address, name in names.items()}
            wanted: dict[str, set[tuple[str, str, int]]] = {}
            for job, pair in self._alive.values():
                made = tuple_of_queue_pair(pair, by_gid)
                if made is not None:
                    wanted.setdefault(job, set()).add((made.source, made.target, made.port))
            for job in sorted(set(self._told) - set(wanted)):
                self._line.request("DELETE", self._path(job), None, dict)
                del self._told[job]
            for job, tuples in wanted.items():
                # Told again in time, also for a controller that was started anew and knows nothing.
                old = self._clock() - self._told_s.get(job, -_RENEW_S) >= _RENEW_S
                if old or self._told.get(job) != frozenset(tuples):
                    body = [ServiceTuple(source=a, target=b, port=c) for a, b, c in sorted(tuples)]
                    path = f"{self._path(job)}?lease_s={_LEASE_S}"
                    self._line.request("PUT", path, body, dict[str, int])
                    self._told[job] = frozenset(tuples)
                    self._told_s[job] = self._clock()
        except (ControllerAway, InputError) as error:
            _log.warning("service learning: %s", error)  # told again with the next step

    def _path(self, job: str) -> str:
        return f"/fabric/service/{urllib.parse.quote(f'{job}.{self._node}', safe='')}"


def _gid(address: str) -> str:
    return address if ":" in address else f"::ffff:{address}"
