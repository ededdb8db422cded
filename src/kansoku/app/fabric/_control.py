"""Start the fabric watch: settings, controller, agent, the tuples of running jobs."""

import contextlib
import errno
import hmac
import ipaddress
import os
import secrets
import socket
import stat
import time
import tomllib
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kansoku.errors import ConfigurationError, InputError, PlatformError

if TYPE_CHECKING:
    import ssl

    from starlette.applications import Starlette
    from starlette.requests import Request

    from kansoku.app.fabric._learning import ServiceLearning
    from kansoku.catalog import Cluster
    from kansoku.fabric.controller import Outcome
    from kansoku.fabric.edge.agent import Agent
    from kansoku.fabric.edge.http import FabricService, Refuse
    from kansoku.fabric.edge.uplink import Line
    from kansoku.fabric.settings import Settings
    from kansoku.model import RunFacts

__all__ = [
    "DEFAULT_CONTROLLER",
    "Address",
    "agent",
    "controller_app",
    "learn_services",
    "load_settings",
    "make_service",
    "serve_controller",
    "service_end",
    "service_start",
]

_MOST_PORT = 65535
_ROCE_PORT = 4791
DEFAULT_CONTROLLER = "http://127.0.0.1:8080"


def load_settings(path: str | Path | None = None) -> tuple["Settings", dict[str, str]]:
    """Return fabric settings and the switch names of hop addresses from a TOML file.

    Keys of ``[settings]`` are those of :class:`kansoku.fabric.settings.Settings`; ``[switches]``
    maps a switch to the list of its addresses.
    """
    from kansoku.fabric.settings import Settings

    if path is None:
        return Settings(), {}
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(str(error), where=str(path)) from None
    _only(data, {"settings", "switches"}, "section", path)
    given, named = data.get("settings", {}), data.get("switches", {})
    for name, table in (("settings", given), ("switches", named)):
        if not isinstance(table, dict):
            raise ConfigurationError(f"{name} is no table", where=str(path), remedy=f"[{name}]")
    _only(given, Settings.__dataclass_fields__, "setting", path)
    try:
        return Settings(**given), _switch_addresses(named)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, where=str(path), remedy=error.remedy) from None


def _only(given: Iterable[str], known: Collection[str], what: str, path: str | Path) -> None:
    if unknown := set(given) - set(known):
        raise ConfigurationError(
            f"unknown {what} {', '.join(sorted(unknown))}",
            where=str(path),
            remedy=f"known: {', '.join(known)}",
        )


def _switch_addresses(named: Mapping[str, object]) -> dict[str, str]:
    """Return the switch of each address."""
    found: dict[str, str] = {}
    for name, addresses in named.items():
        if not isinstance(addresses, list):
            raise ConfigurationError(
                f"switch {name}: {addresses!r} is no list", remedy=f'{name} = ["10.0.0.1"]'
            )
        for text in addresses:
            try:
                address = str(ipaddress.ip_address(str(text)))
            except ValueError:
                raise ConfigurationError(f"switch {name}: {text!r} is no address") from None
            if found.setdefault(address, name) != name:
                raise ConfigurationError(f"{address} is given to both {found[address]} and {name}")
    return found


def make_service(
    cluster: "str | Path | Cluster",
    *,
    settings: "Settings",
    switches: Mapping[str, str] | None = None,
    on_outcome: "Callable[[Outcome], None] | None" = None,
    token: str | None = None,
    refuse: "Refuse | None" = None,
    clock: Callable[[], int] = time.time_ns,
) -> "FabricService":
    """Return a controller with its HTTP routes (``.routes``); call ``start`` and ``stop``.

    Everybody shows ``token`` where there is one; ``kansoku serve`` adds the routes to its own
    application and says by ``refuse`` who may do what.
    """
    from kansoku.app.fabric._answers import matrix_json, status_json
    from kansoku.catalog import Cluster, load_cluster
    from kansoku.fabric.controller import Controller
    from kansoku.fabric.edge.http import FabricService
    from kansoku.fabric.topology import topology_of

    def shown(request: "Request", _does: str) -> tuple[int, str] | None:
        given = request.headers.get("authorization", "").encode()
        right = not token or hmac.compare_digest(given, f"Bearer {token}".encode())
        return None if right else (401, "this controller needs its token")

    known = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    controller = Controller(
        topology_of(known), settings, now_ns=clock(), switch_of_address=switches
    )
    return FabricService(
        controller, clock=clock, status=status_json, matrix=matrix_json,
        on_outcome=on_outcome, refuse=refuse or shown,
    )  # fmt: skip


def controller_app(service: "FabricService") -> "Starlette":
    """Return an ASGI application that serves a controller alone."""
    import contextlib
    from collections.abc import AsyncIterator

    from starlette.applications import Starlette

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    return Starlette(routes=list(service.routes), lifespan=lifespan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a controller listens: a TCP host and port, or a UNIX socket."""

    host: str | None = None
    port: int | None = None
    path: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read ``HOST:PORT`` or ``unix:/PATH``."""
        if text.startswith("unix:"):
            if text == "unix:":
                raise InputError("unix: lacks the path of its socket", remedy="unix:/PATH")
            return cls(path=text.removeprefix("unix:"))
        host, _, port = text.rpartition(":")
        if not port.isdecimal() or int(port) > _MOST_PORT:
            raise InputError(f"{text!r} is not HOST:PORT (at most {_MOST_PORT}) or unix:/PATH")
        return cls(host=host.strip("[]") or "127.0.0.1", port=int(port))


def serve_controller(
    service: "FabricService",
    listen: Address,
    *,
    token: str | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Serve a controller alone until SIGINT or SIGTERM; ``on_start`` is called once it listens.

    Raises PlatformError for an address that is taken, and for one beyond loopback without a
    token.
    """
    import uvicorn

    if listen.path is None and not token and listen.host not in {"127.0.0.1", "::1"}:
        raise PlatformError(
            f"refusing to listen on {listen.host} without a token",
            remedy="set KANSOKU_FABRIC_TOKEN, or listen on 127.0.0.1",
        )
    try:
        sock = _listener(listen)
    except OSError as error:
        where = listen.path or f"{listen.host}:{listen.port}"
        raise PlatformError(f"cannot listen on {where}: {error.strerror or error}") from None
    on_start()
    config = uvicorn.Config(controller_app(service), log_level="warning", access_log=False)
    try:
        uvicorn.Server(config).run(sockets=[sock])
    finally:
        sock.close()
        if listen.path:
            Path(listen.path).unlink(missing_ok=True)


def _listener(listen: Address) -> socket.socket:
    if listen.path is not None:
        _remove_left(Path(listen.path))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(listen.path)
        Path(listen.path).chmod(0o600)
    else:
        host = listen.host or "127.0.0.1"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, listen.port or 0), family=family)
    sock.listen(128)
    return sock


def _remove_left(path: Path) -> None:
    """Remove the socket that a killed controller left; OSError for anything else that is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "it is there already and no socket")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, "another process listens there")


def controller_token(token: str | None = None) -> str | None:
    """Return what a controller is shown: the one given, or from the environment.

    A controller that is part of ``kansoku serve`` takes the token that the node agent shows it.
    Raises ConfigurationError for one that no request could carry.
    """
    given = token or os.environ.get("KANSOKU_FABRIC_TOKEN") or os.environ.get("KANSOKU_TOKEN")
    if given and not (given.isascii() and given.isprintable()):
        raise ConfigurationError(
            "the token has characters that a request cannot carry",
            where="KANSOKU_FABRIC_TOKEN",
            remedy="use printable ASCII, without a line break",
        )
    return given or None


def controller_tls() -> "ssl.SSLContext | None":
    """Return whom https controllers are trusted by and who we are (mTLS), from the environment.

    ``KANSOKU_FABRIC_CA`` is the authority, ``KANSOKU_FABRIC_CERTIFICATE`` and
    ``KANSOKU_FABRIC_KEY`` are ours, all PEM files. None where none is set: the system's
    authorities, and no certificate. Raises ConfigurationError for files that cannot be read.
    """
    from kansoku.telemetry import Tls

    names = ("KANSOKU_FABRIC_CA", "KANSOKU_FABRIC_CERTIFICATE", "KANSOKU_FABRIC_KEY")
    given = [Path(text) if (text := os.environ.get(name)) else None for name in names]
    if not any(given):
        return None
    return Tls(authority=given[0], certificate=given[1], key=given[2]).context()


def _line(controller: str, token: str | None = None) -> "Line":
    from kansoku.fabric.edge.uplink import Line

    return Line(controller, token=controller_token(token), tls=controller_tls())


def agent(
    node: str,
    rnics: Sequence[tuple[str, str]],
    controller: str = DEFAULT_CONTROLLER,
    *,
    stamps: str = "kernel",
    port: int | None = None,
    token: str | None = None,
    bind_device: bool = False,
    transport: str = "udp",
) -> "Agent":
    """Return the fabric agent of a host; call ``run``, and ``stop`` from a signal handler.

    ``rnics`` are (device, address) pairs. ``stamps`` is ``hardware``, ``kernel`` or
    ``application``. Every start draws new queue pair numbers, as an RNIC would. ``transport`` is
    ``udp``, or ``verbs`` for UD queue pairs on the RDMA devices named.
    """
    from kansoku.fabric.edge.agent import Agent
    from kansoku.fabric.edge.transport import Transport
    from kansoku.fabric.edge.udp import UdpTransport
    from kansoku.fabric.edge.worker import Worker
    from kansoku.fabric.probe import StampSource
    from kansoku.fabric.settings import Settings

    if not rnics:
        raise InputError("no RNIC to probe from", remedy="give --rnic DEVICE=ADDRESS")
    _check_rnics(rnics, port)
    families = {":" in address for _, address in rnics}
    if len(families) > 1:
        raise InputError(
            "IPv4 and IPv6 addresses on one host",
            remedy="give all RNICs of the fabric addresses of one family: pairs must not mix them",
        )
    line = _line(controller, token)
    settings = Settings()
    incarnation = time.time_ns()
    workers = []
    made: Transport
    for device, address in rnics:
        if transport == "verbs":
            from kansoku.fabric.edge.verbs import VerbsTransport, gateway_toward

            made = VerbsTransport(
                device, address, toward=gateway_toward(device),
                hardware_stamps=stamps != "application",
            )  # fmt: skip
        else:
            qpn = secrets.randbelow((1 << 24) - 2) + 2
            made = UdpTransport(
                address, port or settings.port, qpn, stamps=StampSource(stamps),
                device=device if bind_device else None,
            )  # fmt: skip
        name = f"{node}/{device}"
        workers.append(Worker(name, made, settings, seed=incarnation ^ hash(name)))
    return Agent(node, workers, line, incarnation=incarnation)


def _check_rnics(rnics: Sequence[tuple[str, str]], port: int | None) -> None:
    """Raise InputError for what no socket could be opened with."""
    devices = [device for device, _ in rnics]
    if twice := {device for device in devices if devices.count(device) > 1}:
        raise InputError(f"--rnic: {', '.join(sorted(twice))} is given twice")
    for device, address in rnics:
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise InputError(
                f"{address!r} is not an IP address", where="--rnic", remedy=f"{device}=10.0.0.1"
            ) from None
    if port is not None and (not 1 <= port <= _MOST_PORT or port == _ROCE_PORT):
        raise InputError(
            f"{port} is no port for probes",
            where="--port",
            remedy=f"1 to {_MOST_PORT}, and not {_ROCE_PORT}, which a RoCE NIC consumes",
        )


def learn_services(
    node: str, devices: Sequence[str], controller: str, *, token: str | None = None
) -> "ServiceLearning":
    """Return what follows the queue pairs of this node's jobs; call ``start`` and ``stop``.

    Raises PlatformError without root, kprobes or RDMA.
    """
    from kansoku.app.fabric._learning import ServiceLearning
    from kansoku.fabric.edge.verbs_learner import KprobeLearner

    return ServiceLearning(node, devices, KprobeLearner(node), _line(controller, token))


def service_start(
    controller: str, run: "RunFacts", cluster: str | Path, *, lease_s: float | None = None
) -> int:
    """Tell a controller the paths of a running job; return how many tuples it took.

    With ``lease_s`` the job counts as ended after that time unless it is told again;
    :func:`follow` does all of it for a run.
    """
    from kansoku.catalog import load_cluster
    from kansoku.fabric.edge.uplink import ControllerAway
    from kansoku.fabric.service import tuples_of_run

    tuples = tuples_of_run(run, load_cluster(cluster))
    line = _line(controller)
    lease = "" if lease_s is None else f"?lease_s={lease_s}"
    try:
        answer = line.request("PUT", f"{_service_path(run)}{lease}", tuples, dict[str, int])
    except ControllerAway as away:
        raise PlatformError(f"controller {controller}: {away}") from None
    finally:
        line.close()
    return 0 if answer is None else answer["tuples"]


def _service_path(run: "RunFacts") -> str:
    return f"/fabric/service/{urllib.parse.quote(run.slurm_job or run.run, safe='')}"


def service_end(controller: str, job: str) -> None:
    """Tell a controller that a job has ended."""
    from kansoku.fabric.edge.uplink import ControllerAway

    line = _line(controller)
    try:
        line.request("DELETE", f"/fabric/service/{urllib.parse.quote(job, safe='')}", None, dict)
    except ControllerAway as away:
        raise PlatformError(f"controller {controller}: {away}") from None
    finally:
        line.close()
