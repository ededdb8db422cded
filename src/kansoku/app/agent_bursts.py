"""Microbursts as a collector of the node agent: sampled all the time, handed over each round."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kansoku.errors import KansokuError

if TYPE_CHECKING:
    import polars as pl

    from kansoku.burst.edge.sampler import Sampler

__all__ = ["BurstCollector"]

_log = logging.getLogger(__name__)
_AGAIN_S = 30.0  # how often a port that went away is looked for
_POLL_S = 1.0  # the reader's ring holds several seconds


class BurstCollector:
    """Bursts and window sums of this node's ports.

    Sampling starts with the first :meth:`take`. A machine without ports, or a reader that ends,
    costs the bursts and says so once; the agent goes on. A port that goes away (a driver loaded
    anew gives it another index) is said once, and looked for again.
    """

    def __init__(
        self,
        node: str,
        interval_s: float,
        *,
        ports: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval_s`` is the time between readings."""
        self._clock = clock
        self._again_s = 0.0
        self._missing: set[str] = set()
        self._node = node
        self._interval_s = interval_s
        self._ports = ports
        self._sampler: Sampler | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bursts", daemon=True)
        self._begun = False
        self.error: str | None = None

    def _begin(self) -> None:
        self._begun = True
        try:
            self._sampler = self._start()
        except (KansokuError, OSError) as error:
            self._fail(error)
            return
        self._thread.start()

    def _start(self) -> "Sampler":
        from kansoku.app.burst import make_sampler

        sampler = make_sampler(self._node, ports=self._ports, interval_s=self._interval_s)
        sampler.start()
        return sampler

    def _look_again(self, sampler: "Sampler") -> "dict[str, pl.DataFrame]":
        """Say which ports went away, and begin anew with those that are there now.

        Returns the rows of the sampler that ends.
        """
        if missing := sorted(set(sampler.gone) - self._missing):
            _log.warning("no microbursts of %s: it went away", ", ".join(missing))
        self._missing = set(sampler.gone)
        now = self._clock()
        if not sampler.gone or now < self._again_s:
            return {}
        self._again_s = now + _AGAIN_S
        try:
            self._sampler = self._start()
        except (KansokuError, OSError):
            return {}  # none of the ports is there: the sampler that is stays
        rows = sampler.tables(sampler.windows(final=True))
        sampler.close()
        return rows

    def _fail(self, error: Exception) -> None:
        self.error = str(error)
        _log.warning("no microbursts from this node: %s", error)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                with self._lock:
                    if self._sampler is not None:
                        self._sampler.poll()
            except KansokuError as error:
                self._fail(error)
                return

    def take(self) -> "dict[str, pl.DataFrame]":
        """Return rows of ``bursts`` and ``metrics`` of the windows that are over."""
        import polars as pl

        if not self._begun:
            self._begin()
        with self._lock:
            if self._sampler is None:
                return {}
            sampler = self._sampler
            tables = [sampler.tables(sampler.windows()), self._look_again(sampler)]
        return {
            name: pl.concat([part[name] for part in tables if name in part])
            for name in {name for part in tables for name in part}
        }

    def close(self) -> None:
        """End sampling."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        with self._lock:
            if self._sampler is not None:
                self._sampler.close()
                self._sampler = None
