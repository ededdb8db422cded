"""The systemd units: what runs on nodes and on the hosts of the stores."""

from dataclasses import dataclass

from kansoku.deploy.settings import Settings

__all__ = ["Unit", "units"]

_INET = ("AF_INET", "AF_INET6", "AF_UNIX")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One service; the template adds what all of them share."""

    name: str
    description: str
    host: str
    """On which machines it runs."""
    command: tuple[str, ...]
    """Words of ExecStart, one a line."""
    user: str | None = None
    """A user made for the service while it runs; None for root with few capabilities."""
    environment_file: str | None = None
    state: str | None = None
    """Folder under /var/lib that is the service's own."""
    capabilities: tuple[str, ...] = ()
    families: tuple[str, ...] = _INET
    after: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


def units(settings: Settings) -> tuple[Unit, ...]:
    """Return every unit of a deployment."""
    return (*_node_units(settings), *_centre_units(settings), *_store_units(settings))


def _node_units(settings: Settings) -> tuple[Unit, ...]:
    kansoku = f"{settings.prefix}/bin/kansoku"
    return (
        Unit(
            name="kansoku-agent",
            description="kansoku node agent",
            host="every node",
            command=(
                f"{kansoku} agent",
                "--to ${KANSOKU_ENDPOINT}",
                "--protocol ${KANSOKU_PROTOCOL}",
                "--profile-to ${KANSOKU_PROFILES}",
                "--spool /var/lib/kansoku/agent-spool",
                "$KANSOKU_AGENT_FLAGS",
            ),
            environment_file="/etc/kansoku/agent.env",
            state="kansoku",
            # Kernel log, other users' rings and /proc, ethtool, RAPL, stacks by py-spy, perf.
            capabilities=(
                "CAP_SYSLOG",
                "CAP_DAC_READ_SEARCH",
                "CAP_NET_ADMIN",
                "CAP_SYS_PTRACE",
                "CAP_SYS_ADMIN",
            ),
            families=(*_INET, "AF_NETLINK"),
            limits=("CPUQuota=25%", "MemoryMax=512M", "Nice=10", "OOMScoreAdjust=500"),
            more=("ProtectHome=read-only", "ReadWritePaths=-/dev/shm/kansoku"),
        ),
        Unit(
            name="kansoku-fabric-agent",
            description="kansoku fabric prober and responder",
            host="every node",
            command=(
                f"{kansoku} fabric agent",
                "--controller ${KANSOKU_FABRIC_CONTROLLER}",
                "$KANSOKU_FABRIC_FLAGS",
            ),
            environment_file="/etc/kansoku/fabric-agent.env",
            capabilities=("CAP_NET_RAW", "CAP_NET_ADMIN", "CAP_SYS_NICE"),
            families=(*_INET, "AF_NETLINK"),
            limits=("CPUQuota=50%", "MemoryMax=512M", "OOMScoreAdjust=500"),
        ),
    )


def _credentials(settings: Settings) -> tuple[str, ...]:
    """Files that only root may read, handed to a user that exists while the service runs."""
    files = {"KANSOKU_TOKEN_FILE": "senders.tokens"}
    if settings.tls:
        files |= {"KANSOKU_CERTIFICATE": "gateway.crt", "KANSOKU_KEY": "gateway.key"}
    lines = [f"LoadCredential={file}:/etc/kansoku/{file}" for file in files.values()]
    lines += [f"Environment={variable}=%d/{file}" for variable, file in files.items()]
    return tuple(lines)


def _centre_units(settings: Settings) -> tuple[Unit, ...]:
    kansoku = f"{settings.prefix}/bin/kansoku"
    cluster = f"/etc/kansoku/{settings.cluster.name}.toml"
    collector = "/usr/bin/otelcol-contrib"
    return (
        Unit(
            name="kansoku-gateway",
            description="kansoku OpenTelemetry gateway",
            host="gateway",
            command=(collector, "--config=/etc/kansoku/gateway.yaml"),
            user="kansoku-gateway",
            environment_file="/etc/kansoku/gateway.env",
            state="kansoku-gateway/queue",
            limits=("MemoryMax=8G",),
            more=_credentials(settings),
        ),
        Unit(
            name="kansoku-controller-log",
            description="Slurm controller's log to the kansoku gateway",
            host="Slurm controller",
            command=(collector, "--config=/etc/kansoku/controller.yaml"),
            user="kansoku-controller-log",
            environment_file="/etc/kansoku/agent.env",
            state="kansoku-controller-log",
            limits=("MemoryMax=512M", "SupplementaryGroups=slurm"),
        ),
        Unit(
            name="kansoku-serve",
            description="kansoku pages, API and embedded store",
            host="kansoku server",
            command=(
                f"{kansoku} serve",
                f"--cluster {cluster}",
                "--store /var/lib/kansoku-serve",
                # The gateway has OTLP's own ports.
                "--otlp-port 14318",
                "--grpc-port 14317",
                "--retention 90d",
            ),
            user="kansoku-serve",
            state="kansoku-serve",
            limits=("MemoryMax=16G",),
        ),
        Unit(
            name="kansoku-fabric-controller",
            description="kansoku fabric controller and analyser",
            host="kansoku server",
            command=(
                f"{kansoku} fabric controller",
                f"--cluster {cluster}",
                "--listen ${KANSOKU_FABRIC_LISTEN}",
                f"--store otlp+{settings.address('otlp').url}",
                "$KANSOKU_FABRIC_FLAGS",
            ),
            user="kansoku-fabric",
            environment_file="/etc/kansoku/fabric-controller.env",
            limits=("MemoryMax=4G",),
        ),
    )


def _store_units(settings: Settings) -> tuple[Unit, ...]:
    keep = settings.retention
    return (
        Unit(
            name="victoria-metrics",
            description="VictoriaMetrics",
            host="metric store",
            command=(
                "/usr/bin/victoria-metrics",
                "-storageDataPath=/var/lib/victoria-metrics",
                "-httpListenAddr=127.0.0.1:8428",
                f"-retentionPeriod={keep['metrics']}",
                "-opentelemetry.usePrometheusNaming",
                "-maxLabelsPerTimeseries=40",
            ),
            user="victoria-metrics",
            state="victoria-metrics",
        ),
        Unit(
            name="victoria-logs",
            description="VictoriaLogs",
            host="log store",
            command=(
                "/usr/bin/victoria-logs",
                "-storageDataPath=/var/lib/victoria-logs",
                "-httpListenAddr=127.0.0.1:9428",
                f"-retentionPeriod={keep['logs']}",
            ),
            user="victoria-logs",
            state="victoria-logs",
        ),
        Unit(
            name="victoria-traces",
            description="VictoriaTraces",
            host="trace store",
            command=(
                "/usr/bin/victoria-traces",
                "-storageDataPath=/var/lib/victoria-traces",
                "-httpListenAddr=127.0.0.1:10428",
                f"-retentionPeriod={keep['traces']}",
            ),
            user="victoria-traces",
            state="victoria-traces",
        ),
        Unit(
            name="vmalert",
            description="kansoku alert rules",
            host="metric store",
            command=(
                "/usr/bin/vmalert",
                "-rule=/etc/kansoku/kansoku.rules.yaml",
                f"-datasource.url={settings.address('metrics').url}",
                f"-remoteWrite.url={settings.address('metrics').url}",
                f"-remoteRead.url={settings.address('metrics').url}",
                "-httpListenAddr=127.0.0.1:8880",
                "$VMALERT_NOTIFIER",
            ),
            user="vmalert",
            environment_file="/etc/kansoku/vmalert.env",
            after=("victoria-metrics.service",),
        ),
        Unit(
            name="pyroscope",
            description="Pyroscope",
            host="profile store",
            command=("/usr/bin/pyroscope", "-config.file=/etc/kansoku/pyroscope.yaml"),
            user="pyroscope",
            state="pyroscope",
            more=("WorkingDirectory=/var/lib/pyroscope",),
        ),
    )
