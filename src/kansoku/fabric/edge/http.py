"""The controller's HTTP routes, for ``kansoku fabric controller`` and for ``kansoku serve``."""

import logging
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kansoku.errors import InputError
from kansoku.fabric.controller import Controller, Outcome
from kansoku.fabric.messages import Register, ServiceTuple
from kansoku.fabric.summary import Report

__all__ = ["FabricService", "Refuse"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LONGEST_LEASE_S = 86_400
_MOST = 64 << 20  # bytes of reports in one request: 64 of a large fabric
_MOST_TUPLES = 16 << 20  # bytes of a job's tuples
_MOST_NAMES = 1 << 20  # bytes of what an agent says of its own RNICs
_TYPE = "application/msgpack"
_Handler = Callable[[Request], Awaitable[Response]]
Refuse = Callable[[Request, Literal["send", "read"]], tuple[int, str] | None]
"""Return status and reason where who asks may not do that, else None."""


class FabricService:
    """A controller behind HTTP with a thread that closes windows.

    ``clock`` returns Unix nanoseconds; ``on_outcome`` is called with every window's verdict.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        clock: Callable[[], int],
        status: Callable[[Controller], dict[str, object]],
        matrix: Callable[[Controller, dict[str, str]], dict[str, object]],
        on_outcome: Callable[[Outcome], None] | None = None,
        refuse: Refuse = lambda _request, _does: None,
    ) -> None:
        """Serve ``controller``; ``status`` and ``matrix`` build the JSON answers."""
        self.controller = controller
        self._clock = clock
        self._status = status
        self._matrix = matrix
        self._on_outcome = on_outcome
        self._refuse = refuse
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures = 0
        self.refused = 0
        self.analysis_s = 0.0
        self.routes = [
            self._route("/fabric/register", self._register, "POST"),
            self._route("/fabric/leave", self._leave, "POST"),
            self._route("/fabric/pinglist", self._pinglist, "GET"),
            self._route("/fabric/report", self._report, "POST"),
            self._route("/fabric/status", self._get_status, "GET", does="read"),
            self._route("/fabric/matrix", self._get_matrix, "GET", does="read"),
            self._route("/fabric/rnics", self._rnics, "GET"),
            self._route("/fabric/service/{job}", self._service, "PUT", "DELETE"),
        ]

    def start(self) -> None:
        """Start closing windows."""
        self._thread = threading.Thread(target=self._run, name="fabric analyser", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop closing windows."""
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.wait(min(self.controller.settings.window_s / 20, 0.5)):
            try:
                before = self._clock()
                with self._lock:
                    outcomes = self.controller.step(before)
                if outcomes:
                    self.analysis_s = (self._clock() - before) / 1e9 / len(outcomes)
                for outcome in outcomes:
                    if self._on_outcome:
                        self._on_outcome(outcome)
            except Exception:  # noqa: BLE001 - an agent loop, counted and logged
                # The watch must go on after a window that could not be judged.
                self.failures += 1
                _log.exception("fabric analyser")

    def _route(
        self, path: str, handler: _Handler, *methods: str, does: Literal["send", "read"] = "send"
    ) -> Route:
        """Return a route that asks first who is there, and turns what is refused into a status."""

        async def handle(request: Request) -> Response:
            try:
                refusal = self._refuse(request, does)
                if refusal is not None:
                    raise _Refused(*refusal)
                return await handler(request)
            except (_Refused, InputError) as error:
                return _refusal(error)

        return Route(path, handle, methods=list(methods))

    async def _held(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns while nothing else touches the controller.

        In a thread: a window being judged holds the lock, and the pages of a server that has
        other routes beside these must not wait for it.
        """

        def hold() -> _T:
            with self._lock:
                return work()

        return await run_in_threadpool(hold)

    async def _register(self, request: Request) -> Response:
        message = await _body(request, Register, most=_MOST_NAMES)
        await self._held(lambda: self.controller.register(message, self._clock()))
        return _packed({"registered": len(message.rnics)})

    async def _leave(self, request: Request) -> Response:
        names = await _body(request, list[str], most=_MOST_NAMES)
        await self._held(lambda: self.controller.leave(names))
        return _packed({})

    async def _pinglist(self, request: Request) -> Response:
        rnic, qpn = request.query_params.get("rnic", ""), request.query_params.get("qpn", "")
        known = request.query_params.get("version")
        now = self._clock()

        def pinglist() -> Response:
            if not self.controller.knows(rnic, qpn):
                raise _Refused(409, f"{rnic} is not registered with QPN {qpn}")
            if known == self.controller.version(now):
                return Response(status_code=304)
            return _packed(self.controller.pinglist(rnic, now))

        return await self._held(pinglist)

    async def _report(self, request: Request) -> Response:
        reports = await _body(request, list[Report], most=_MOST)
        now = self._clock()

        def take() -> None:
            for report in reports:
                try:
                    self.controller.report(report, now)
                except InputError as error:
                    # Taken as delivered: a torn report would come again and again otherwise.
                    self.refused += 1
                    _log.warning("fabric report of %s: %s", report.rnic, error)

        await self._held(take)
        return _packed({"taken": len(reports)})

    async def _service(self, request: Request) -> Response:
        job = request.path_params["job"]
        if request.method == "DELETE":
            await self._held(lambda: self.controller.end_service(job))
            return _packed({})
        tuples = await _body(request, list[ServiceTuple], most=_MOST_TUPLES)
        lease_s = _lease(request.query_params.get("lease_s"))
        until = None if lease_s is None else self._clock() + int(lease_s * 1e9)
        known = await self._held(lambda: self.controller.set_service(job, tuples, until_ns=until))
        return _packed({"tuples": known})

    async def _rnics(self, _: Request) -> Response:
        """Answer address to RNIC name: what a learner of queue pairs needs to name their peers."""
        members = await self._held(self.controller.members)
        return _packed({str(one["address"]): name for name, one in members.items()})

    async def _get_status(self, _: Request) -> Response:
        return JSONResponse(await self._held(lambda: self._status(self.controller)))

    async def _get_matrix(self, request: Request) -> Response:
        params = dict(request.query_params)
        return JSONResponse(await self._held(lambda: self._matrix(self.controller, params)))


async def _body(request: Request, kind: type[_T], *, most: int) -> _T:
    media = request.headers.get("content-type", "").partition(";")[0].strip()
    if media not in {_TYPE, "application/json"}:
        # A page of another site can make a browser send plain text here, but neither of these.
        raise _Refused(415, f"expected {_TYPE} or application/json")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise _Refused(413, f"more than {most} bytes")
    try:
        if media == "application/json":
            return msgspec.json.decode(data, type=kind)
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _Refused(400, str(error)) from None


class _Refused(Exception):  # noqa: N818 - it becomes an HTTP status
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _lease(text: str | None) -> float | None:
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if seconds is not None and not 0 < seconds <= _LONGEST_LEASE_S:
        raise _Refused(400, f"lease_s {text!r} is not within 0 and {_LONGEST_LEASE_S} seconds")
    return seconds


def _packed(answer: object) -> Response:
    return Response(msgspec.msgpack.encode(answer), media_type=_TYPE)


def _refusal(error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=getattr(error, "status", 400))
