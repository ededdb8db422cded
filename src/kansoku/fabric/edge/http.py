"""The controller's HTTP routes, for ``kansoku fabric controller`` and for ``kansoku serve``."""

import logging
import math
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kansoku.errors import InputError
from kansoku.fabric.controller import Controller, Outcome
from kansoku.fabric.messages import Register, ServiceTuple
from kansoku.fabric.summary import Report

__all__ = ["FabricService"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LONGEST_LEASE_S = 86_400
_MOST = 64 << 20  # bytes of one request: 64 reports of a large fabric
_TYPE = "application/msgpack"


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
        token: str | None = None,
    ) -> None:
        """Serve ``controller``; ``status`` and ``matrix`` build the JSON answers."""
        self.controller = controller
        self._clock = clock
        self._status = status
        self._matrix = matrix
        self._on_outcome = on_outcome
        self._token = token
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures = 0
        self.refused = 0
        self.analysis_s = 0.0
        self.routes = [
            Route("/fabric/register", self._register, methods=["POST"]),
            Route("/fabric/leave", self._leave, methods=["POST"]),
            Route("/fabric/pinglist", self._pinglist, methods=["GET"]),
            Route("/fabric/report", self._report, methods=["POST"]),
            Route("/fabric/status", self._get_status, methods=["GET"]),
            Route("/fabric/matrix", self._get_matrix, methods=["GET"]),
            Route("/fabric/rnics", self._rnics, methods=["GET"]),
            Route("/fabric/service/{job}", self._service, methods=["PUT", "DELETE"]),
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

    def _allowed(self, request: Request) -> bool:
        return self._token is None or (
            request.headers.get("authorization") == f"Bearer {self._token}"
        )

    async def _body(self, request: Request, kind: type[_T]) -> _T:
        if not self._allowed(request):
            raise _Refused(401, "this controller needs its token")
        data = b""
        async for chunk in request.stream():
            data += chunk
            if len(data) > _MOST:
                raise _Refused(413, f"more than {_MOST} bytes")
        try:
            if request.headers.get("content-type") == "application/json":
                return msgspec.json.decode(data, type=kind)
            return msgspec.msgpack.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise _Refused(400, str(error)) from None

    async def _register(self, request: Request) -> Response:
        try:
            message = await self._body(request, Register)
            with self._lock:
                self.controller.register(message, self._clock())
        except (_Refused, InputError) as error:
            return _refusal(error)
        return _packed({"registered": len(message.rnics)})

    async def _leave(self, request: Request) -> Response:
        try:
            names = await self._body(request, list[str])
        except _Refused as error:
            return _refusal(error)
        with self._lock:
            self.controller.leave(names)
        return _packed({})

    async def _pinglist(self, request: Request) -> Response:
        if not self._allowed(request):
            return _refusal(_Refused(401, "this controller needs its token"))
        rnic, qpn = request.query_params.get("rnic", ""), request.query_params.get("qpn", "")
        now = self._clock()
        with self._lock:
            if not self.controller.knows(rnic, qpn):
                return _refusal(_Refused(409, f"{rnic} is not registered with QPN {qpn}"))
            if request.query_params.get("version") == self.controller.version(now):
                return Response(status_code=304)
            pinglist = self.controller.pinglist(rnic, now)
        return _packed(pinglist)

    async def _report(self, request: Request) -> Response:
        try:
            reports = await self._body(request, list[Report])
        except _Refused as error:
            return _refusal(error)
        now = self._clock()
        refused = 0
        with self._lock:
            for report in reports:
                try:
                    self.controller.report(report, now)
                except InputError as error:
                    # Taken as delivered: a torn report would come again and again otherwise.
                    refused += 1
                    _log.warning("fabric report of %s: %s", report.rnic, error)
        self.refused += refused
        return _packed({"taken": len(reports)})

    async def _service(self, request: Request) -> Response:
        job = request.path_params["job"]
        if request.method == "DELETE":
            if not self._allowed(request):
                return _refusal(_Refused(401, "this controller needs its token"))
            with self._lock:
                self.controller.end_service(job)
            return _packed({})
        try:
            tuples = await self._body(request, list[ServiceTuple])
            lease_s = _lease(request.query_params.get("lease_s"))
        except _Refused as error:
            return _refusal(error)
        until = None if lease_s is None else self._clock() + int(lease_s * 1e9)
        with self._lock:
            known = self.controller.set_service(job, tuples, until_ns=until)
        return _packed({"tuples": known})

    async def _rnics(self, request: Request) -> Response:
        """Answer address to RNIC name: what a learner of queue pairs needs to name their peers."""
        if not self._allowed(request):
            return _refusal(_Refused(401, "this controller needs its token"))
        with self._lock:
            members = self.controller.members()
        return _packed({str(one["address"]): name for name, one in members.items()})

    async def _get_status(self, request: Request) -> Response:
        if not self._allowed(request):
            return _refusal(_Refused(401, "this controller needs its token"))
        with self._lock:
            return JSONResponse(self._status(self.controller))

    async def _get_matrix(self, request: Request) -> Response:
        if not self._allowed(request):
            return _refusal(_Refused(401, "this controller needs its token"))
        try:
            with self._lock:
                return JSONResponse(self._matrix(self.controller, dict(request.query_params)))
        except InputError as error:
            return _refusal(error)


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
