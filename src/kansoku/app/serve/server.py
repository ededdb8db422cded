"""One process: OTLP over HTTP and gRPC in, the store, the API and the pages out."""

import asyncio
import contextlib
import importlib.util
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import BaseRoute
from uvicorn.protocols.http.h11_impl import H11Protocol

from kansoku.app.serve.access import Access, is_loopback
from kansoku.app.serve.api import Api, api_routes
from kansoku.app.serve.fabric import fabric_counts, fabric_service, has_fabric
from kansoku.app.serve.session import CookieSession, StrictAnswers
from kansoku.app.watch import LiveWatch, WatchSettings
from kansoku.catalog import Cluster
from kansoku.errors import ConfigurationError, DependencyError, PlatformError
from kansoku.store import LocalStore, StoreLimits
from kansoku.telemetry import GrpcReceiver, GrpcTls, Intake, IntakeLimits, otlp_routes

__all__ = ["ServeSettings", "Server", "web_routes"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How to serve; port 0 takes a free one."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 8080
    otlp_port: int | None = 4318
    """None: OTLP over HTTP comes in on ``port`` only."""
    grpc_port: int | None = 4317
    """None: no gRPC."""
    principals: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    client_authority: Path | None = None
    """Certificates that clients must have: mTLS."""
    store: StoreLimits = field(default_factory=StoreLimits)
    intake: IntakeLimits = field(default_factory=IntakeLimits)
    maintain_s: float = 30.0
    cluster: Cluster | None = None
    """What the pages know of the machine; with a fabric in it, the server is its controller."""
    fabric: Path | None = None
    """Settings of the fabric's controller and names of switches (TOML)."""
    watch: WatchSettings | None = None
    """Live diagnosis of what arrives; None: none."""

    def check(self, access: Access) -> None:
        """Raise ConfigurationError for settings that would expose the data or tell nobody."""
        if self.watch is not None:
            self.watch.check()
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("a certificate needs its key, and a key its certificate")
        if self.client_authority is not None and self.certificate is None:
            raise ConfigurationError("client certificates need a server certificate: --certificate")
        if self.fabric is not None and not has_fabric(self.cluster):
            raise ConfigurationError(
                "settings of a fabric without a cluster file that has one",
                where=str(self.fabric), remedy="give --cluster FILE with [fabric] and its leaves",
            )  # fmt: skip
        if not is_loopback(self.host) and access.open:
            raise ConfigurationError(
                f"{self.host} is reachable from other machines and nobody says who they are",
                remedy="give --principals FILE with tokens or certificates, or serve 127.0.0.1",
            )


class _PeerProtocol(H11Protocol):
    """HTTP that tells the application the name in the client's certificate."""

    def connection_made(self, transport: Any) -> None:
        """Remember the certificate's common name for every request of this connection."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        certificate = tls.getpeercert() if tls is not None else None
        if not certificate:
            return
        names = [v for part in certificate.get("subject", ()) for k, v in part if k == "commonName"]
        inner = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["kansoku.certificate"] = names[0] if names else None
            await inner(scope, receive, send)

        self.app = app


def web_routes(store: LocalStore, access: Access, **more: Any) -> list[BaseRoute]:
    """Return the routes of the web pages, where that package is installed.

    Found by name at run time: the pages draw what this layer answers, never the other way round.
    """
    if importlib.util.find_spec("kansoku.web") is None:
        return []
    web = importlib.import_module("kansoku.web")
    routes: list[BaseRoute] = list(web.routes(store=store, access=access, **more))
    return routes


class Server:
    """The whole server; :meth:`start` returns when it listens, :meth:`stop` when it is done."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        routes: Sequence[BaseRoute] = (),
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open the store; raise ConfigurationError before anything listens."""
        self.settings = settings
        self.access = Access.load(settings.principals)
        settings.check(self.access)
        self.store = LocalStore(settings.folder, limits=settings.store, clock_ns=clock_ns)
        self.intake = Intake(self.store, clock_ns=clock_ns, limits=settings.intake)
        self._started_ns = clock_ns()
        self._clock_ns = clock_ns
        api = Api(
            store=self.store, access=self.access, statistics=self.statistics, clock_ns=clock_ns
        )
        incoming = otlp_routes(self.intake, self._authorize)
        more = {
            "statistics": self.statistics,
            "cluster": settings.cluster,
            "clock_ns": clock_ns,
        }
        self.fabric = (
            fabric_service(
                settings.cluster, settings.fabric, store=self.store, access=self.access,
                clock_ns=clock_ns,
            )
            if settings.cluster is not None and has_fabric(settings.cluster)
            else None
        )  # fmt: skip
        incoming_fabric = self.fabric.routes if self.fabric is not None else []
        # Pages come last: they answer every address that is nobody else's.
        pages = [*routes, *web_routes(self.store, self.access, **more)]
        every = [*api_routes(api), *incoming, *incoming_fabric, *pages]
        self.app = StrictAnswers(CookieSession(Starlette(routes=every)))
        self._otlp_app = Starlette(routes=incoming)
        self.watch = LiveWatch(self.store, settings.watch) if settings.watch else None
        self._grpc: GrpcReceiver | None = None
        self._servers: list[uvicorn.Server] = []
        self._sockets: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._told = threading.Event()
        self.url = ""
        self.port = self.otlp_port = 0
        self.grpc_port: int | None = None
        self.notes: list[str] = []

    def _authorize(self, request: Request) -> str | None:
        return self._may_send(
            request.headers.get("authorization"), request.scope.get("kansoku.certificate")
        )

    def _may_send(self, authorization: str | None, certificate: str | None) -> str | None:
        principal = self.access.identify(authorization, certificate)
        if principal is None:
            return "a bearer token or client certificate is needed"
        return None if principal.may_send else f"role {principal.role} may not send"

    def statistics(self) -> dict[str, Any]:
        """Return counts of every stage and the process's own cost."""
        process = psutil.Process()
        cpu = process.cpu_times()
        return {
            "intake": asdict(self.intake.counts),
            "store": self.store.statistics(),
            "diagnosis": dict(self.watch.counts) if self.watch is not None else None,
            "fabric": fabric_counts(self.fabric) if self.fabric is not None else None,
            "process": {
                "cpu_s": cpu.user + cpu.system,
                "memory_bytes": process.memory_info().rss,
                "uptime_s": (self._clock_ns() - self._started_ns) / 1e9,
            },
        }

    # Listening

    def _bind(self, port: int) -> socket.socket:
        host = self.settings.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        handle = socket.socket(family, socket.SOCK_STREAM)
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            handle.bind((host, port))
        except OSError as error:
            handle.close()
            raise PlatformError(
                f"cannot listen: {error}", where=f"{host}:{port}", remedy="choose another port"
            ) from None
        self._sockets.append(handle)
        return handle

    def _uvicorn(self, app: Any) -> uvicorn.Server:
        settings = self.settings
        config = uvicorn.Config(
            app,
            http=_PeerProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
            ssl_certfile=str(settings.certificate) if settings.certificate else None,
            ssl_keyfile=str(settings.key) if settings.key else None,
            ssl_ca_certs=str(settings.client_authority) if settings.client_authority else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if settings.client_authority else ssl.CERT_NONE,
        )
        try:
            config.load()
        except OSError as error:
            raise ConfigurationError(
                f"the certificate, its key or the authority cannot be used: {error}",
                where=f"{settings.certificate}, {settings.key}",
                remedy="PEM files that this user can read",
            ) from None
        server = uvicorn.Server(config)
        # Signals belong to the command, which calls stop().
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        return server

    def start(self) -> None:
        """Listen on every port; returns when all of them accept."""
        settings = self.settings
        try:
            pairs = [(self._uvicorn(self.app), self._bind(settings.port))]
            if settings.otlp_port is not None:
                pairs.append((self._uvicorn(self._otlp_app), self._bind(settings.otlp_port)))
            self._start_grpc()
        except BaseException:
            self.stop()
            raise
        self._servers = [server for server, _ in pairs]
        self.port = pairs[0][1].getsockname()[1]
        self.otlp_port = pairs[-1][1].getsockname()[1]
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(pairs, started), name="serve-http", daemon=True
        )
        self._thread.start()
        if not started.wait(20) or self._done.is_set():
            self.stop()
            raise PlatformError("the HTTP server did not start", where=settings.host)
        if self.watch is not None:
            self.watch.start()
        self._write_address()
        if self.fabric is not None:
            self.fabric.start()
            count = len(self.fabric.controller.topology.rnics)
            self.notes.append(
                f"controller of a fabric of {count} RNICs, for kansoku fabric agent "
                f"--controller {self.url}"
            )

    def _start_grpc(self) -> None:
        settings = self.settings
        if settings.grpc_port is None:
            return
        tls = None
        if settings.certificate is not None and settings.key is not None:
            tls = GrpcTls(settings.certificate, settings.key, settings.client_authority)
        try:
            self._grpc = GrpcReceiver(
                self.intake,
                host=settings.host,
                port=settings.grpc_port,
                authorize=lambda texts, name: self._may_send(texts.get("authorization"), name),
                tls=tls,
            )
        except DependencyError as error:
            self.notes.append(f"no OTLP over gRPC: {error}")
            return
        self.grpc_port = self._grpc.port

    def _serve(
        self, pairs: Sequence[tuple[uvicorn.Server, socket.socket]], started: threading.Event
    ) -> None:
        async def run() -> None:
            tasks = [
                asyncio.create_task(server.serve(sockets=[handle])) for server, handle in pairs
            ]
            while not all(server.started for server, _ in pairs):
                if any(task.done() for task in tasks):
                    return
                await asyncio.sleep(0.005)
            started.set()
            maintenance = asyncio.create_task(self._maintain())
            await asyncio.gather(*tasks)
            maintenance.cancel()

        try:
            asyncio.run(run())
        finally:
            self._done.set()
            started.set()

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(self.settings.maintain_s)
            try:
                await asyncio.to_thread(self.store.keeper.maintain)
            except Exception:  # noqa: BLE001 - a server outlives a failed sealing; the next tries again
                _log.exception("maintenance of the store")

    def _write_address(self) -> None:
        scheme = "https" if self.settings.certificate else "http"
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        self.url = f"{scheme}://{host}:{self.port}"
        (self.settings.folder / "address").write_text(self.url + "\n", encoding="utf-8")

    def wait(self) -> None:
        """Return when the server was told to stop; signals are heard meanwhile."""
        while not self._told.wait(1.0) and not self._done.is_set():
            pass

    def interrupt(self) -> None:
        """Make :meth:`wait` return, from a signal handler."""
        self._told.set()

    def stop(self) -> None:
        """Finish requests in progress, commit what is queued, close the store."""
        if self.watch is not None:
            self.watch.stop()
        if self.fabric is not None:
            self.fabric.stop()
        self.store.end_subscriptions()
        for server in self._servers:
            server.should_exit = True
        if self._grpc is not None:
            self._grpc.close()
        if self._thread is not None:
            self._thread.join()
        for handle in self._sockets:
            handle.close()
        (self.settings.folder / "address").unlink(missing_ok=True)
        self.store.close()
        self._done.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
