"""Fabrics in network namespaces: hosts, ToRs and spines with routed ECMP, and faults to inject.

Real controller and agents run in them as processes; they meet on a UNIX socket, which namespaces
do not separate. Everything carries a prefix of its own and goes away with :meth:`Lab.close`.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

WINDOW_S = 2.0
SETTINGS = {
    "window_s": WINDOW_S,
    "timeout_s": 0.5,
    "hold_s": 1.0,
    "silent_s": 2.0,
    "grace_s": 1.5,
    "slow_rtt_ns": 5_000_000,
    "refresh_s": 0.5,
    "link_per_s": 40.0,
    "traces_per_s": 25.0,
    "clear_after": 1,
}


class _Forked:
    """A child of the zygote, with the part of Popen's interface that the lab uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while Path(f"/proc/{self.pid}").exists():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("lab", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(self._path)


def run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


@dataclass
class Port:
    """One RNIC: host, device, address, its ToR and the ToR's interface to it."""

    host: str
    device: str
    address: str
    gateway: str
    tor: str
    tor_interface: str

    @property
    def name(self) -> str:
        return f"{self.host}/{self.device}"


@dataclass
class Lab:
    """One fabric. ``ports`` are (host, device, ToR) in the order of the cluster file."""

    prefix: str
    ports: list[tuple[str, str, str]]
    spines: int = 2
    rails: dict[str, int] | None = None
    """ToR to rail, for rail-optimised fabrics."""
    pods: dict[str, str] = field(default_factory=dict)
    """ToR to pod; default each its own."""
    settings: dict = field(default_factory=dict)

    def __post_init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix=f"kansoku-{self.prefix}-"))
        self.tors = sorted({tor for _, _, tor in self.ports})
        self.hosts = list(dict.fromkeys(host for host, _, _ in self.ports))
        self.spine_names = [f"spine{n}" for n in range(self.spines)]
        self.switches: dict[str, list[str]] = {n: [] for n in [*self.tors, *self.spine_names]}
        self.rnics: dict[str, Port] = {}
        self.processes: dict[str, subprocess.Popen] = {}
        self.socket = f"unix:{self.folder}/c.sock"
        self._zygote: subprocess.Popen | None = None

    # -- building ---------------------------------------------------------------------------

    def ns(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def build(self) -> "Lab":
        names = [*self.hosts, *self.tors, *self.spine_names]
        run("ip", "-batch", "-", text="".join(f"netns add {self.ns(n)}\n" for n in names))
        root, inside = [], {name: ["link set lo up"] for name in names}

        def veth(a: str, a_if: str, b: str, b_if: str) -> None:
            root.append(
                f"link add {a_if} netns {self.ns(a)} type veth peer name {b_if} netns {self.ns(b)}"
            )

        slot: dict[str, int] = {}
        index: dict[str, int] = {}
        for host, device, tor in self.ports:
            t = self.tors.index(tor) + 1
            s = slot[tor] = slot.get(tor, 0) + 1
            table = index[host] = index.get(host, 0) + 1
            down = f"d{s}"
            veth(host, device, tor, down)
            address, gateway = f"10.{t}.{s}.2", f"10.{t}.{s}.1"
            inside[tor] += [f"addr add {gateway}/24 dev {down}", f"link set {down} up"]
            inside[host] += [
                f"addr add {address}/24 dev {device}",
                f"link set {device} up",
                f"route add default via {gateway} dev {device} table {100 + table}",
                f"rule add from {address} lookup {100 + table}",
            ]
            if table == 1:
                inside[host].append(f"route add default via {gateway} dev {device}")
            self.switches[tor].append(gateway)
            self.rnics[f"{host}/{device}"] = Port(host, device, address, gateway, tor, down)
        for t, tor in enumerate(self.tors, 1):
            for s, spine in enumerate(self.spine_names):
                up, leg, net = f"up{s}", f"leg{t}", f"10.200.{t * 16 + s}"
                veth(tor, up, spine, leg)
                inside[tor] += [f"addr add {net}.1/30 dev {up}", f"link set {up} up"]
                inside[spine] += [
                    f"addr add {net}.2/30 dev {leg}",
                    f"link set {leg} up",
                    f"route add 10.{t}.0.0/16 via {net}.1 dev {leg}",
                ]
                self.switches[tor].append(f"{net}.1")
                self.switches[spine].append(f"{net}.2")
            for other in range(1, len(self.tors) + 1):
                if other != t and self.spines:
                    hops = " ".join(
                        f"nexthop via 10.200.{t * 16 + s}.2 dev up{s}" for s in range(self.spines)
                    )
                    inside[tor].append(f"route add 10.{other}.0.0/16 {hops}")
        run("ip", "-batch", "-", text="\n".join(root) + "\n")
        for name in names:
            self.sysctl(name)
            run("ip", "-n", self.ns(name), "-batch", "-", text="\n".join(inside[name]) + "\n")
        self._write_files()
        return self

    def sysctl(self, name: str) -> None:
        values = {
            "net/ipv4/ip_forward": 1,
            "net/ipv4/fib_multipath_hash_policy": 1,
            "net/ipv4/icmp_errors_use_inbound_ifaddr": 1,
            "net/ipv4/icmp_ratelimit": 0,
            "net/ipv4/icmp_msgs_per_sec": 100000,
            "net/ipv4/icmp_msgs_burst": 100000,
            "net/ipv4/conf/all/rp_filter": 0,
            "net/ipv4/conf/default/rp_filter": 0,
        }
        lines = "; ".join(
            f"[ -e /proc/sys/{key} ] && echo {value} > /proc/sys/{key}"
            for key, value in values.items()
        )
        run("ip", "netns", "exec", self.ns(name), "sh", "-c", f"{lines}; true")

    def _write_files(self) -> None:
        kinds: dict[tuple, str] = {}
        lines = [f'name = "{self.prefix}"', 'source = "lab in network namespaces"']
        nodes = []
        for host in self.hosts:
            mine = [(d, t) for h, d, t in self.ports if h == host]
            pod = self.pods.get(mine[0][1], mine[0][1])
            key = tuple((d, None if self.rails is None else self.rails[t]) for d, t in mine)
            kind = kinds.setdefault(key, f"kind{len(kinds)}")
            nodes.append(f'[[nodes]]\nnames = "{host}"\nkind = "{kind}"\npod = "{pod}"')
        for key, kind in kinds.items():
            lines.append(f"[node_kind.{kind}]")
            for device, rail in key:
                lines += [f"[[node_kind.{kind}.nic]]", f'device = "{device}"', 'role = "fabric"']
                lines += [] if rail is None else [f"rail = {rail}"]
        lines += nodes
        flag = "false" if self.rails is None else "true"
        lines += ["[fabric]", 'protocol = "rocev2"', f"rail_optimised = {flag}"]
        for tor in self.tors:
            lines += ["[[fabric.switch]]", f'names = "{tor}"', 'tier = "leaf"']
            lines.append(f'pod = "{self.pods.get(tor, tor)}"')
            lines += [] if self.rails is None else [f"rails = [{self.rails[tor]}]"]
        for spine in self.spine_names:
            lines += ["[[fabric.switch]]", f'names = "{spine}"', 'tier = "spine"']
        self.cluster = self.folder / "cluster.toml"
        self.cluster.write_text("\n".join(lines) + "\n")
        settings = ["[settings]"]
        settings += [f"{k} = {v}" for k, v in (SETTINGS | self.settings).items()]
        settings += ["[switches]"]
        settings += [f"{json.dumps(n)} = {json.dumps(a)}" for n, a in self.switches.items()]
        self.settings_file = self.folder / "fabric.toml"
        self.settings_file.write_text("\n".join(settings) + "\n")

    # -- processes --------------------------------------------------------------------------

    def _start(self, name: str, command: list[str]) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            ["nice", "-n", "-10", *command], stdout=log, stderr=log
        )
        log.close()

    def start_controller(self) -> None:
        command = [sys.executable, "-m", "kansoku", "fabric", "controller"]
        command += ["--cluster", str(self.cluster), "--settings", str(self.settings_file)]
        command += ["--store", str(self.folder / "store"), "--listen", self.socket]
        self._start("controller", command)

    def start_agent(self, host: str) -> None:
        """Start an agent by its command."""
        command = ["ip", "netns", "exec", self.ns(host), sys.executable, "-m", "kansoku"]
        command += ["fabric", "agent", "--node", host, "--controller", self.socket]
        for port in self.rnics.values():
            if port.host == host:
                command += ["--rnic", f"{port.device}={port.address}"]
        self._start(host, command)

    def start(self) -> "Lab":
        """Start the controller and, by forking, an agent on every host."""
        self.start_controller()
        zygote = Path(__file__).with_name("fabric_zygote.py")
        self._zygote = subprocess.Popen(
            [sys.executable, str(zygote)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for host in self.hosts:
            order = {
                "namespace": self.ns(host),
                "node": host,
                "log": str(self.folder / f"{host}.log"),
                "controller": self.socket,
                "rnics": [(p.device, p.address) for p in self.rnics.values() if p.host == host],
            }
            self._zygote.stdin.write(json.dumps(order) + "\n")
            self._zygote.stdin.flush()
            self.processes[host] = _Forked(int(self._zygote.stdout.readline()))
        return self

    def stop_process(self, name: str, number: int = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(timeout=20)

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def get(self, path: str = "/fabric/status") -> dict:
        with contextlib.closing(_UnixConnection(self.socket.removeprefix("unix:"))) as line:
            line.request("GET", path)
            answer = line.getresponse()
            body = answer.read()
        assert answer.status == 200, body
        return json.loads(body)

    def windows(self, count: int, timeout_s: float | None = None):
        """Yield the status after each of the next ``count`` windows that start from now on.

        By default a window may take five times as long as it should: the machine may be busy.
        """
        timeout_s = timeout_s or 60 + 5 * WINDOW_S * count
        begin = time.time_ns()
        seen = 0
        deadline = time.monotonic() + timeout_s
        last = None
        while seen < count:
            assert time.monotonic() < deadline, f"no window for {timeout_s} s; see {self.folder}"
            with contextlib.suppress(OSError):
                status = self.get()
                window = status["window"]
                if window and window["end_ns"] != last and window["end_ns"] > begin:
                    last = window["end_ns"]
                    if window["start_ns"] >= begin:
                        seen += 1
                    yield status
            time.sleep(0.1)

    def wait(self, check, windows: int = 20, timeout_s: float | None = None) -> dict:
        """Return the first status that satisfies ``check``; the current one counts."""
        status = None
        for status in self.windows(windows, timeout_s):
            if check(status):
                return status
        raise AssertionError(f"not within {windows} windows: {json.dumps(status, indent=1)}")

    def wait_clear(self, windows: int = 30) -> dict:
        def quiet(status):
            everyone = status["fabric"]["registered"] == len(self.rnics)
            return (
                status["verdict"] == "clear"
                and everyone
                and (status["fabric"]["coverage"].get("rnics") == len(self.rnics))
                and "network cleared" in status["reason"]
            )

        return self.wait(quiet, windows)

    # -- faults -----------------------------------------------------------------------------

    def ip(self, name: str, *arguments: str) -> None:
        run("ip", "-n", self.ns(name), *arguments)

    @contextlib.contextmanager
    def rules(self, name: str, *rules: str):
        """Drop by nftables in a namespace; each rule begins with its hook."""
        text = "table inet fault {\n"
        for number, rule in enumerate(rules):
            hook, body = rule.split(" ", 1)
            text += f" chain c{number} {{ type filter hook {hook} priority -300; {body} drop; }}\n"
        run("ip", "netns", "exec", self.ns(name), "nft", "-f", "-", text=text + "}\n")
        try:
            yield
        finally:
            run("ip", "netns", "exec", self.ns(name), "nft", "delete", "table", "inet", "fault")

    def leg(self, tor: str) -> str:
        """The spine's interface towards a ToR."""
        return f"leg{self.tors.index(tor) + 1}"

    def lossy_link(self, tor: str, spine: str, percent: int):
        """Loss from the ToR to the spine, this direction only."""
        test = f"iifname {self.leg(tor)} numgen random mod 100 < {percent}"
        return self.rules(spine, f"prerouting {test}")

    def lossy_flows(self, tor: str, spine: str):
        """Loss of some flows only: every packet of a quarter of the source ports."""
        ports = ", ".join(f"{p}-{p + 1023}" for p in range(49152, 65536, 4096))
        return self.rules(spine, f"prerouting iifname {self.leg(tor)} udp sport {{ {ports} }}")

    def dead_rnic(self, rnic: str):
        port = self.rnics[rnic]
        return self.rules(
            port.tor,
            f"prerouting iifname {port.tor_interface}",
            f"postrouting oifname {port.tor_interface}",
        )

    def dead_spine(self, spine: str):
        return self.rules(spine, "prerouting meta l4proto { udp, icmp }")

    @contextlib.contextmanager
    def dead_link(self, tor: str, spine: str):
        up = f"up{self.spine_names.index(spine)}"
        with self.rules(
            spine, f"prerouting iifname {self.leg(tor)}", f"postrouting oifname {self.leg(tor)}"
        ):
            yield up

    @contextlib.contextmanager
    def null_route(self, tor: str, spine: str):
        t = self.tors.index(tor) + 1
        net = f"10.200.{t * 16 + self.spine_names.index(spine)}"
        self.ip(spine, "route", "replace", "blackhole", f"10.{t}.0.0/16")
        try:
            yield
        finally:
            self.ip(spine, "route", "replace", f"10.{t}.0.0/16", "via", f"{net}.1")

    @contextlib.contextmanager
    def rate_limit(self, tor: str, spine: str, rate: str = "1mbit"):
        up = f"up{self.spine_names.index(spine)}"
        tc = ("ip", "netns", "exec", self.ns(tor), "tc", "qdisc")
        run(*tc, "replace", "dev", up, "root", "tbf", "rate", rate, "burst", "4kb", "limit", "6kb")
        try:
            yield
        finally:
            run(*tc, "del", "dev", up, "root")

    @contextlib.contextmanager
    def bursts(self, source: str, target: str, *, kbytes: int = 60, period_s: float = 0.1):
        """UDP bursts from many ports of one RNIC to another's discard port."""
        a, b = self.rnics[source], self.rnics[target]
        code = (
            "import socket,time\n"
            "s=[socket.socket(2,2) for _ in range(16)]\n"
            f"[x.bind(('{a.address}',0)) for x in s]\n"
            "print('ready', flush=True)\n"
            "while True:\n"
            f"  for n in range({kbytes}): s[n%16].sendto(b'x'*1000,('{b.address}',9))\n"
            f"  time.sleep({period_s})\n"
        )
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.ns(a.host), sys.executable, "-c", code],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()
            process.communicate()

    @contextlib.contextmanager
    def starved(self, host: str, share: float = 0.5):
        """Give a host's agent this share of the CPU time it has been using."""
        used = self.get()["fabric"]["self"][host]["cpu_ratio"]
        quota_ms = max(share * used * 1000, 2)
        with cpu_quota(self.processes[host].pid, quota_ms, f"{self.prefix}-{host}"):
            yield

    def close(self) -> None:
        for name, process in self.processes.items():
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM if name != "controller" else signal.SIGINT)
        for process in self.processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._zygote is not None:
            self._zygote.communicate()
        names = [*self.hosts, *self.tors, *self.spine_names]
        subprocess.run(
            ["ip", "-force", "-batch", "-"],
            input="".join(f"netns del {self.ns(n)}\n" for n in names),
            text=True,
            capture_output=True,
            check=False,
        )
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def cpu_quota(pid: int, quota_ms: float, name: str):
    """Limit a process by the CPU controller, v1 or v2; else by stopping it most of the time."""
    v1, v2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cgroup.subtree_control")
    if (v1 / "cpu.cfs_quota_us").exists() or v1.is_dir():
        group = v1 / f"kansoku-{name}"
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_period_us").write_text("1000000")
        (group / "cpu.cfs_quota_us").write_text(str(int(quota_ms * 1000)))
        home = v1
    elif v2.exists():
        with contextlib.suppress(OSError):
            v2.write_text("+cpu")
        group = Path("/sys/fs/cgroup") / f"kansoku-{name}"
        group.mkdir(exist_ok=True)
        (group / "cpu.max").write_text(f"{int(quota_ms * 1000)} 1000000")
        home = Path("/sys/fs/cgroup")
    else:
        raise RuntimeError("no CPU controller in /sys/fs/cgroup")
    (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for one in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (home / "cgroup.procs").write_text(one)
        with contextlib.suppress(OSError):
            group.rmdir()


def classic(prefix: str, tors: dict[str, int], **options) -> Lab:
    """Hosts with one RNIC each; ``tors`` gives the number of hosts under each."""
    ports, number = [], 0
    for tor, count in tors.items():
        for _ in range(count):
            ports.append((f"h{number}", "nic0", tor))
            number += 1
    return Lab(prefix=prefix, ports=ports, **options)


def rail_optimised(prefix: str, *, pods: int = 2, hosts: int = 4, rails: int = 2) -> Lab:
    """Pods of hosts whose NIC of rail r hangs on leaf (pod, r)."""
    ports = [
        (f"h{p * hosts + h}", f"nic{r}", f"leaf{p}{r}")
        for p in range(pods)
        for h in range(hosts)
        for r in range(rails)
    ]
    leaves = [(p, r) for p in range(pods) for r in range(rails)]
    return Lab(
        prefix=prefix,
        ports=ports,
        rails={f"leaf{p}{r}": r for p, r in leaves},
        pods={f"leaf{p}{r}": f"pod{p}" for p, r in leaves},
    )


def unique_prefix(kind: str) -> str:
    return f"kf{kind}{os.getpid() % 100000}"
