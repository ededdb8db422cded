"""A real Slurm with accounting on one machine: slurmctld, slurmdbd on MariaDB, slurmd per node.

``slurm_lab()`` starts all of it from nothing in its own folder and ports (about ten seconds) and
ends exactly what it started. Jobs run as existing system accounts (``games``, ``news``, ``mail``),
so the machine's user list stays as it is. Fake GPUs are character devices of an unused major
number. Node names carry a prefix of their own, so that several labs never share cgroups.

Use it as a context manager, or take the session fixture::

    from tests.labs.slurm import slurm  # a pytest fixture

    def test_something(slurm):
        job = slurm.sbatch("srun true", "-N2", "--gres=gpu:8", user="games")
        slurm.wait(job, "COMPLETED")
        slurm.sacct("--json")
"""

import contextlib
import functools
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

PROGRAMS = (
    "slurmctld", "slurmdbd", "slurmd", "munged", "mariadbd", "mariadb-install-db", "sacct",
)  # fmt: skip
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
ACCOUNTS = {"games": "llm", "news": "llm", "mail": "vision"}
GPU_MAJOR = 240  # for experimental use: no driver answers, and nothing opens the files
TERMINAL = frozenset(
    (
        "COMPLETED",
        "FAILED",
        "TIMEOUT",
        "CANCELLED",
        "NODE_FAIL",
        "PREEMPTED",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
        "REVOKED",
    )
)


def missing() -> str | None:
    """Return the reason why no Slurm can be started here, or None."""
    if os.geteuid() != 0:
        return "the Slurm lab needs root (mknod, jobs of several users)"
    path = f"{os.environ['PATH']}:{SBIN}"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return (
            f"not installed: {', '.join(absent)} (Debian: slurm-wlm slurmdbd munge mariadb-server)"
        )
    return None


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
        return ports


@functools.cache
def cgroup_v1() -> bool:
    """Whether the memory and freezer controllers are mounted the old way, as Slurm 22.05 needs."""
    mounts = Path("/proc/mounts").read_text(encoding="utf-8")
    return all(f" /sys/fs/cgroup/{name} cgroup " in mounts for name in ("memory", "freezer"))


def poll(what, *, timeout: float, message: str | Callable[[], str], every: float = 0.1):
    """Return the first true answer of ``what()``; fail with the message after the timeout."""
    end = time.monotonic() + timeout
    while True:
        answer = what()
        if answer:
            return answer
        if time.monotonic() > end:
            raise TimeoutError(message() if callable(message) else message)
        time.sleep(every)


@dataclass
class SlurmLab:
    """A running Slurm. ``nodes`` are its node names; ``env`` reaches it."""

    folder: Path
    cluster: str
    nodes: list[str]
    gpus: int
    gpu_kind: str
    env: dict[str, str]
    _processes: dict[str, subprocess.Popen] = field(default_factory=dict)

    # -- start and stop -----------------------------------------------------------------------

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> None:
        """Start a daemon of the lab in the foreground of its own session."""
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder,
                env={**self.env, **(env or {})}, start_new_session=True,
            )  # fmt: skip

    def start_node(self, node: str) -> None:
        """Start (again) the slurmd of a node."""
        self.start(f"slurmd.{node}", "slurmd", "-D", "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """Kill a node's slurmd alone, the hard way; its steps go on."""
        process = self._processes.pop(f"slurmd.{node}")
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd and its steps the hard way, as a power cut would."""
        self.kill_slurmd(node)
        for pid in self._children(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _children(self, node: str | None = None) -> list[int]:
        """Return the step daemons of this lab: they name its folder or a node in their command."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                if not words.startswith("slurmstepd"):
                    continue
                environ = (entry / "environ").read_bytes().decode(errors="replace")
                cwd = os.readlink(entry / "cwd")
                mine = str(self.folder) in environ or cwd.startswith(str(self.folder))
                if mine and (node is None or node in environ or cwd.endswith(node)):
                    found.append(int(entry.name))
        return found

    def stop(self) -> None:
        """End every daemon this lab started, and their steps."""
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            self.run("scancel", "--state=RUNNING", check=False, timeout=5)
        order = sorted(self._processes, key=lambda n: ("munged" in n, "maria" in n, "dbd" in n))
        for name in order:
            process = self._processes[name]
            process.send_signal(signal.SIGKILL if name == "mariadbd" else signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
        for pid in self._children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- commands -----------------------------------------------------------------------------

    def run(
        self, *command: str, check: bool = True, timeout: float = 30, env=None, text: bool = True
    ) -> subprocess.CompletedProcess:
        """Run a Slurm command against this lab; a failure shows what it said."""
        answer = subprocess.run(
            command, capture_output=True, timeout=timeout, env={**self.env, **(env or {})},
            cwd=self.folder, check=False, text=text,
        )  # fmt: skip
        if check and answer.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {answer.stdout!r} {answer.stderr!r}")
        return answer

    def sbatch(self, script: str, *options: str, user: str | None = None) -> int:
        """Submit a shell script (two lines and more allowed); return the job's id."""
        path = self.folder / f"job-{secrets.token_hex(4)}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        account = ["--uid", user, "-A", ACCOUNTS[user]] if user else []
        answer = self.run(
            "sbatch", "--parsable", "-o", "/dev/null", "-D", "/tmp", *account, *options, str(path)
        )
        return int(answer.stdout.strip().split(";")[0])

    def scontrol(self, *words: str, check: bool = True) -> str:
        """Run scontrol and return what it printed."""
        return self.run("scontrol", *words, check=check).stdout

    def state(self, job: int | str) -> str:
        """Return the job's state as the controller knows it now."""
        answer = self.run("squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T", check=False)
        lines = answer.stdout.split()
        return lines[0] if lines else ""

    def wait(self, job: int | str, *states: str, timeout: float = 60) -> str:
        """Wait until the job is in one of the states (default: any final one); return it."""
        wanted = set(states) or TERMINAL

        def reached() -> str | None:
            now = self.state(job)
            return now if now in wanted else None

        return poll(
            reached, timeout=timeout, message=f"job {job} is {self.state(job)}, not {wanted}"
        )

    def wait_accounted(self, jobs: Sequence[int], *, timeout: float = 30) -> None:
        """Wait until slurmdbd knows the end of every job."""

        # For some seconds a finished job may stand there half written: named "allocation" and
        # without a partition, because its end and steps arrive before its start record.
        def ended() -> bool:
            words = ("-X", "-n", "-P", "-o", "JobIDRaw,Partition,End,State")
            text = self.sacct(*words, "-j", ",".join(map(str, jobs)))
            rows = [line.split("|") for line in text.splitlines()]
            return bool(rows) and all(
                len(r) == 4 and r[1] and r[2] != "Unknown" and r[3].split()[0] in TERMINAL
                for r in rows
            )

        poll(ended, timeout=timeout, message=f"slurmdbd does not know the end of {jobs}", every=0.3)

    def sacct(self, *options: str, env=None) -> str:
        """Run sacct over all users and return what it printed; broken UTF-8 is replaced."""
        answer = self.run("sacct", "-a", "-S", "now-1days", *options, env=env, text=False)
        return answer.stdout.decode("utf-8", "replace")


def _configuration(lab: SlurmLab, ports: list[int], *, cgroup: bool) -> None:
    """Write slurm.conf, slurmdbd.conf, gres.conf and cgroup.conf."""
    folder = lab.folder
    socket_path = folder / "munge.sock"
    node_ports = ",".join(str(port) for port in ports[3:])
    names = ",".join(lab.nodes)
    kind = "cgroup" if cgroup else None
    (folder / "slurm.conf").write_text(
        f"""ClusterName={lab.cluster}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket_path}
CredType=cred/munge
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/{kind or "linuxproc"}
TaskPlugin=task/{kind or "none"}
JobAcctGatherType=jobacct_gather/{kind or "linux"}
JobAcctGatherFrequency=task=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=4000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=100000
SlurmdTimeout=10
SlurmctldTimeout=30
KillWait=1
MinJobAge=900
InactiveLimit=0
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports[1]}
AccountingStoragePass={socket_path}
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu,gres/gpu:{lab.gpu_kind}
AccountingStoreFlags=job_comment,job_script,job_env
GresTypes=gpu
NodeName={names} NodeHostname=localhost NodeAddr=127.0.0.1 Port={node_ports} CPUs=112 Sockets=2 \
CoresPerSocket=28 ThreadsPerCore=2 RealMemory=2000000 Gres=gpu:{lab.gpu_kind}:{lab.gpus} \
State=UNKNOWN
PartitionName=train Nodes=ALL Default=YES MaxTime=UNLIMITED DefaultTime=60 PriorityTier=10
PartitionName=low Nodes=ALL MaxTime=UNLIMITED PriorityTier=1 PreemptMode=REQUEUE
PartitionName=debug Nodes={",".join(lab.nodes[-2:])} MaxTime=30
""",
        encoding="utf-8",
    )
    dbd = folder / "slurmdbd.conf"
    dbd.write_text(
        f"""AuthType=auth/munge
AuthInfo=socket={socket_path}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={ports[1]}
SlurmUser=root
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={ports[2]}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
""",
        encoding="utf-8",
    )
    dbd.chmod(0o600)
    devices = folder / "dev"
    devices.mkdir()
    for index in range(lab.gpus):
        os.mknod(devices / f"gpu{index}", 0o20666, os.makedev(GPU_MAJOR, index))
    (folder / "gres.conf").write_text(
        f"NodeName={names} Name=gpu Type={lab.gpu_kind} File={devices}/gpu[0-{lab.gpus - 1}]\n",
        encoding="utf-8",
    )
    (folder / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainRAMSpace=yes\nConstrainSwapSpace=no\n"
        "AllowedRAMSpace=100\n",
        encoding="utf-8",
    )


def _start_munge(lab: SlurmLab) -> None:
    key = lab.folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    run = lab.folder / "run"
    lab.start(
        "munged", "munged", "--force", "--foreground", f"--key-file={key}",
        f"--socket={lab.folder}/munge.sock", f"--pid-file={run}/munged.pid",
        f"--log-file={lab.folder}/log/munged.log", f"--seed-file={run}/munged.seed",
    )  # fmt: skip
    poll((lab.folder / "munge.sock").exists, timeout=10, message="munged did not start", every=0.02)


def _start_mariadb(lab: SlurmLab, port: int) -> None:
    data = lab.folder / "mysql"
    lab.run(
        "mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root",
        "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve",
        "--innodb-flush-log-at-trx-commit=0", "--innodb-log-file-size=8M", timeout=60,
    )  # fmt: skip
    first = lab.folder / "first.sql"
    first.write_text(
        "CREATE DATABASE slurm_acct;\nCREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'slurm';\n"
        "GRANT ALL ON slurm_acct.* TO slurm@'127.0.0.1';\n",
        encoding="utf-8",
    )
    lab.start(
        "mariadbd", "mariadbd", "--no-defaults", f"--datadir={data}", f"--port={port}",
        "--bind-address=127.0.0.1", f"--socket={lab.folder}/mysql.sock", "--user=root",
        f"--pid-file={lab.folder}/run/mysql.pid", "--skip-name-resolve",
        "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M",
        "--innodb-lock-wait-timeout=900", "--innodb-log-file-size=8M", f"--init-file={first}",
    )  # fmt: skip
    poll(lambda: _open(port), timeout=30, message="MariaDB did not start", every=0.05)


def _open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _register(lab: SlurmLab) -> None:
    """Create the cluster, accounts and users before the controller starts."""

    def add(*words: str) -> None:
        lab.run("sacctmgr", "-i", "add", *words)

    add("cluster", lab.cluster)
    for account in sorted(set(ACCOUNTS.values())):
        add("account", account, f"cluster={lab.cluster}")
    for user, account in ACCOUNTS.items():
        add("user", user, f"account={account}", f"cluster={lab.cluster}")


@contextlib.contextmanager
def slurm_lab(
    *, nodes: int = 8, gpus: int = 8, gpu_kind: str = "h100", cluster: str | None = None
) -> Iterator[SlurmLab]:
    """Start Slurm with accounting and give it; end it and remove its folder afterwards."""
    reason = missing()
    if reason:
        raise RuntimeError(reason)
    folder = Path(tempfile.mkdtemp(prefix="kslurm-"))
    folder.chmod(0o755)
    for name in ("run", "log", "state", "spool"):
        (folder / name).mkdir()
    mark = secrets.token_hex(2)
    env = {
        "PATH": f"{os.environ['PATH']}:{SBIN}",
        "SLURM_CONF": str(folder / "slurm.conf"),
        "HOME": str(folder),
        "LANG": "C.UTF-8",
    }
    if "TZ" in os.environ:
        env["TZ"] = os.environ["TZ"]
    lab = SlurmLab(
        folder=folder,
        cluster=cluster or f"lab{mark}",
        nodes=[f"k{mark}n{index + 1:02d}" for index in range(nodes)],
        gpus=gpus,
        gpu_kind=gpu_kind,
        env=env,
    )
    ports = free_ports(3 + nodes)
    try:
        _configuration(lab, ports, cgroup=cgroup_v1())
        _start_munge(lab)
        _start_mariadb(lab, ports[2])
        lab.start("slurmdbd", "slurmdbd", "-D")
        poll(lambda: _open(ports[1]), timeout=30, message=_logs(lab, "slurmdbd"))
        _register(lab)
        lab.start("slurmctld", "slurmctld", "-D", "-i")
        for node in lab.nodes:
            lab.start_node(node)

        def all_idle() -> bool:
            answer = lab.run("sinfo", "-h", "-N", "-p", "train", "-o", "%T", check=False)
            return answer.stdout.split() == ["idle"] * nodes

        poll(all_idle, timeout=40, message=_logs(lab, "slurmctld"), every=0.2)

        def registered() -> bool:
            # Before this the first jobs reach slurmdbd without their names.
            words = ("-n", "-P", "show", "cluster", lab.cluster, "format=ControlPort,TRES")
            port, _, _ = lab.run("sacctmgr", *words, check=False).stdout.strip().partition("|")
            return port not in {"", "0"}

        poll(registered, timeout=30, message=_logs(lab, "slurmctld"), every=0.2)
        yield lab
    finally:
        lab.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _logs(lab: SlurmLab, name: str) -> Callable[[], str]:
    """Return a function that reads the end of a daemon's log when a wait fails."""
    path = lab.folder / "log" / f"{name}.log"
    return lambda: (
        f"{name} is not ready: {path.read_text(errors='replace')[-3000:] if path.exists() else ''}"
    )


def lab_fixture(scope: Literal["session", "function"], **options: Any) -> Any:
    """Return a fixture of a Slurm of its own; it skips where the parts of one are missing."""

    @pytest.fixture(scope=scope)
    def lab() -> Iterator[SlurmLab]:
        reason = missing()
        if reason:
            pytest.skip(reason)
        with slurm_lab(**options) as made:
            yield made

    return lab


slurm = lab_fixture("session")
"""One Slurm for the whole session; tests must leave its nodes idle."""
