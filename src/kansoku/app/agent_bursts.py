"""Microbursts as a collector of the node agent: sampled all the time, handed over each round."""

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kansoku.errors import KansokuError

if TYPE_CHECKING:
    import polars as pl

    from kansoku.burst.edge.sampler import Sampler

__all__ = ["BurstCollector"]

_log = logging.getLogger(__name__)
_POLL_S = 1.0  # the reader's ring holds several seconds


class BurstCollector:
    """Bursts and window sums of this node's ports.

    Sampling starts with the first :meth:`take`. A machine without ports, or a reader that ends,
    costs the bursts and says so once; the agent goes on.
    """

    def __init__(self, node: str, interval_s: float, *, ports: Sequence[str] = ()) -> None:
        """``interval_s`` is the time between readings."""
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
        from kansoku.app.burst import make_sampler

        self._begun = True
        try:
            sampler = make_sampler(self._node, ports=self._ports, interval_s=self._interval_s)
            sampler.start()
        except (KansokuError, OSError) as error:
            self._fail(error)
            return
        self._sampler = sampler
        self._thread.start()

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
        if not self._begun:
            self._begin()
        with self._lock:
            if self._sampler is None:
                return {}
            return self._sampler.tables(self._sampler.windows())

    def close(self) -> None:
        """End sampling."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        with self._lock:
            if self._sampler is not None:
                self._sampler.close()
                self._sampler = None
