"""The agent's line to the controller: HTTP over TCP or a UNIX socket, in a thread of its own.

Probing never waits for it. While the controller is away, reports wait in a bounded queue and the
last pinglist stays in force.
"""

import http.client
import logging
import random
import socket
import ssl
import threading
import urllib.parse
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kansoku.errors import ConfigurationError
from kansoku.fabric.messages import Pinglist, Register, RnicAddress
from kansoku.fabric.summary import Report

__all__ = ["ControllerAway", "Line", "Uplink"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MOST = 64 << 20
_LONGEST_S = 86_400.0  # between two requests


class ControllerAway(Exception):  # noqa: N818 - a state, not a mistake
    """The controller does not answer, or does not know us (``status`` 409)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Line:
    """Requests to one controller: ``http://HOST:PORT``, ``https://…`` or ``unix:/PATH``."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        """Check the address; connect with the first request."""
        self.url = url
        self._tls = tls
        self._headers = {"Content-Type": "application/msgpack"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        parts = _address(url)
        self._parts = parts
        self._timeout = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            parts = self._parts
            if parts.scheme == "unix":
                self._connection = _UnixConnection(parts.path, self._timeout)
            elif parts.scheme == "https":
                self._connection = http.client.HTTPSConnection(
                    parts.netloc, timeout=self._timeout, context=self._tls
                )
            else:
                self._connection = http.client.HTTPConnection(parts.netloc, timeout=self._timeout)
        return self._connection

    def request(self, method: str, path: str, body: object | None, kind: type[_T]) -> _T | None:
        """Return the decoded answer, None for 204 and 304; raise ControllerAway otherwise."""
        data = None if body is None else msgspec.msgpack.encode(body)
        prefix = self._parts.path.rstrip("/") if self._parts.scheme != "unix" else ""
        try:
            connection = self._connect()
            connection.request(method, prefix + path, data, self._headers)
            response = connection.getresponse()
            answer = response.read(_MOST)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ControllerAway(str(error)) from None
        if response.status in {204, 304}:
            return None
        if response.status != 200:
            raise ControllerAway(_reason(answer), response.status)
        try:
            return msgspec.msgpack.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise ControllerAway(f"cannot read the answer: {error}") from None

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _address(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port  # it is read here only: one that is no port raises
    except ValueError:
        parts, port = urllib.parse.urlsplit(""), None
    web = parts.scheme in {"http", "https"} and parts.hostname and port != 0
    if not web and not (parts.scheme == "unix" and parts.path):
        raise ConfigurationError(
            f"controller address {url!r} is not http://HOST:PORT, https://… or unix:/PATH"
        )
    return parts


def _reason(answer: bytes) -> str:
    """Return why a controller refused: its own words where it is one."""
    try:
        return str(msgspec.json.decode(answer, type=dict[str, str])["error"])
    except (msgspec.MsgspecError, KeyError):
        return answer[:200].decode(errors="replace")


class Uplink:
    """Registers, fetches pinglists and sends reports from its own thread."""

    def __init__(
        self,
        line: Line,
        node: str,
        incarnation: int,
        rnics: Sequence[RnicAddress],
        *,
        on_pinglist: Callable[[str, Pinglist], None],
        queue: int = 512,
    ) -> None:
        """``on_pinglist`` is called from the thread with RNIC name and pinglist."""
        self._line = line
        self._register = Register(node=node, incarnation=incarnation, rnics=list(rnics))
        self._versions = {rnic.name: "" for rnic in rnics}
        self._on_pinglist = on_pinglist
        self._queue: deque[Report] = deque(maxlen=queue)
        self._wake = threading.Event()
        self._stopping = False
        self._registered = False
        self.refresh_s = 1.0
        self.dropped = 0
        self.failures = 0
        self.connected = False
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="fabric uplink", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, reports: Sequence[Report]) -> None:
        """Queue reports; the oldest give way when the controller stays away."""
        for report in reports:
            if len(self._queue) == self._queue.maxlen:
                self.dropped += 1
            self._queue.append(report)
        if reports:
            self._wake.set()

    def stop(self) -> None:
        """Send what is queued, say goodbye, end the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping:
            try:
                self._round()
                self.connected, self.failures, pause = True, 0, self.refresh_s
            except ControllerAway as away:
                if away.status in {409, 404}:
                    self._registered = False
                self._say(away)
                self._failed()
                # Agents that lost the same controller must not come back in step.
                pause = min(0.2 * 2 ** min(self.failures, 5), self.refresh_s)
            except Exception:  # noqa: BLE001 - an agent loop, counted and logged
                # Nothing that a controller says may end the line: the agent would fall silent.
                self._failed()
                _log.exception("fabric uplink")
                pause = self.refresh_s
            self._wake.wait(pause * (0.8 + 0.4 * random.random()))  # noqa: S311 - jitter
            self._wake.clear()
        try:
            self._flush()
            names = list(self._versions)
            self._line.request("POST", "/fabric/leave", names, dict)
        except ControllerAway:
            pass
        self._line.close()

    def _failed(self) -> None:
        self.connected = False
        self.failures += 1

    def _say(self, away: ControllerAway) -> None:
        """Log what is new: an agent tries again for as long as it runs."""
        if self.connected or str(away) != self._said:
            does = "is away" if away.status is None else f"refuses ({away.status})"
            _log.warning("controller %s %s: %s", self._line.url, does, away)
        self._said = str(away)

    def _round(self) -> None:
        if not self._registered:
            self._line.request("POST", "/fabric/register", self._register, dict)
            self._registered = True
            self._versions = dict.fromkeys(self._versions, "")
        self._flush()
        for rnic in self._register.rnics:
            query = urllib.parse.urlencode(
                {"rnic": rnic.name, "qpn": rnic.qpn, "version": self._versions[rnic.name]}
            )
            pinglist = self._line.request("GET", f"/fabric/pinglist?{query}", None, Pinglist)
            if pinglist is not None:
                self._versions[rnic.name] = pinglist.version
                refresh_s = pinglist.settings.get("refresh_s", self.refresh_s)
                self.refresh_s = min(max(refresh_s, 0.05), _LONGEST_S)
                self._on_pinglist(rnic.name, pinglist)

    def _flush(self) -> None:
        while self._queue:
            batch = list(self._queue)[:64]
            try:
                self._line.request("POST", "/fabric/report", batch, dict)
            except ControllerAway as away:
                if away.status not in {400, 413}:
                    raise
                self._say(away)  # it will never take these: what comes later must get through
                self.dropped += len(batch)
            for _ in batch:
                self._queue.popleft()
