"""What runs inside the RoCE guest: a fabric of soft-RoCE devices, and what is measured on it.

Writes ``/results/answer.json`` part by part; the tests on the host judge it. Soft-RoCE works in
the initial namespace only: hosts' interfaces and devices stay there, switches are namespaces.
"""

import contextlib
import json
import os
import select
import subprocess
import time
import traceback
import urllib.parse
from dataclasses import replace
from pathlib import Path

from kansoku.app.fabric._answers import status_json
from kansoku.app.fabric._learning import ServiceLearning
from kansoku.catalog import load_cluster
from kansoku.errors import PlatformError
from kansoku.fabric.controller import Controller
from kansoku.fabric.edge.transport import Peer, Received
from kansoku.fabric.edge.verbs import VerbsTransport, rxe_source_port
from kansoku.fabric.edge.verbs_learner import KprobeLearner
from kansoku.fabric.edge.worker import Worker
from kansoku.fabric.messages import Register, RnicAddress
from kansoku.fabric.probe import Kind, Result, encode
from kansoku.fabric.settings import Settings
from kansoku.fabric.topology import topology_of

OUT = Path("/results")
TORS, SPINES = ("tora", "torb"), ("spine0", "spine1")
HOSTS = [(f"h{n}", f"rxe{n}", TORS[n // 2], f"10.{n // 2 + 1}.{n % 2 + 1}") for n in range(4)]
SETTINGS = Settings(
    window_s=1.0, timeout_s=0.25, hold_s=0.2, grace_s=0.2, silent_s=3.0, refresh_s=0.5,
    link_per_s=50.0, slow_rtt_ns=8_000_000, traces_per_s=25.0, clear_after=1, cpu_ratio=10.0,
)  # fmt: skip
answer: dict = {}


def sh(*words: str, text: str | None = None) -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def save(**parts: object) -> None:
    answer.update(parts)
    (OUT / "answer.json").write_text(json.dumps(answer, indent=1, default=str))


def build() -> dict[str, str]:
    """Make the fabric; return the switch of each hop address."""
    for key, value in {
        "all/accept_local": 1, "default/accept_local": 1, "all/rp_filter": 0,
        "default/rp_filter": 0, "all/arp_ignore": 1, "default/arp_ignore": 1,
        "all/arp_announce": 2, "default/arp_announce": 2,
    }.items():  # fmt: skip
        Path(f"/proc/sys/net/ipv4/conf/{key}").write_text(str(value))
    switches: dict[str, str] = {}
    sh("ip", "-batch", "-", text="".join(f"netns add {name}\n" for name in TORS + SPINES))
    for name in TORS + SPINES:
        settings = (
            "ip_forward=1 fib_multipath_hash_policy=1 icmp_ratelimit=0 icmp_msgs_per_sec=100000 "
            "icmp_msgs_burst=100000 icmp_errors_use_inbound_ifaddr=1"
        )
        line = "; ".join(
            f"echo {part.split('=')[1]} > /proc/sys/net/ipv4/{part.split('=')[0]}"
            for part in settings.split()
        )
        sh("ip", "netns", "exec", name, "sh", "-c", line + "; true")
    root, inside = [], {name: ["link set lo up"] for name in TORS + SPINES}
    for number, (host, _, tor, net) in enumerate(HOSTS):
        down = f"d{number}"
        root += [
            f"link add {host} type veth peer name {down} netns {tor}",
            f"addr add {net}.2/24 dev {host}",
            f"link set {host} up",
            f"route add default via {net}.1 dev {host} metric {100 + number}",
        ]
        inside[tor] += [f"addr add {net}.1/24 dev {down}", f"link set {down} up"]
        switches[f"{net}.1"] = tor
    for t, tor in enumerate(TORS, 1):
        other = 3 - t
        hops = ""
        for s, spine in enumerate(SPINES):
            link = f"10.200.{t * 16 + s}"
            root.append(f"link add up{s} netns {tor} type veth peer name leg{t} netns {spine}")
            inside[tor] += [f"addr add {link}.1/30 dev up{s}", f"link set up{s} up"]
            inside[spine] += [
                f"addr add {link}.2/30 dev leg{t}",
                f"link set leg{t} up",
                f"route add 10.{t}.0.0/16 via {link}.1 dev leg{t}",
            ]
            switches |= {f"{link}.1": tor, f"{link}.2": spine}
            hops += f" nexthop via {link}.2 dev up{s}"
        inside[tor].append(f"route add 10.{other}.0.0/16{hops}")
    # Links that end in namespaces first, the default routes last: their gateways must be there.
    sh("ip", "-batch", "-", text="\n".join(line for line in root if "route" not in line) + "\n")
    for name, lines in inside.items():
        sh("ip", "-n", name, "-batch", "-", text="\n".join(lines) + "\n")
    sh("ip", "-batch", "-", text="\n".join(line for line in root if "route" in line) + "\n")
    for host, device, _, net in HOSTS:
        sh("rdma", "link", "add", device, "type", "rxe", "netdev", host)
        sh("ping", "-c", "1", "-W", "1", "-I", host, f"{net}.1")
    return switches


def cluster_file() -> Path:
    lines = ['name = "roce"', 'source = "RoCE lab"']
    for host, device, _, _ in HOSTS:
        lines += [f"[node_kind.{host}]", f"[[node_kind.{host}.nic]]"]
        lines += [f'device = "{device}"', 'role = "fabric"']
    for host, _, tor, _ in HOSTS:
        lines += ["[[nodes]]", f'names = "{host}"', f'kind = "{host}"', f'pod = "{tor}"']
    lines += ["[fabric]", 'protocol = "rocev2"', "rail_optimised = false"]
    for tor in TORS:
        lines += ["[[fabric.switch]]", f'names = "{tor}"', 'tier = "leaf"', f'pod = "{tor}"']
    for spine in SPINES:
        lines += ["[[fabric.switch]]", f'names = "{spine}"', 'tier = "spine"']
    path = Path("/tmp/cluster.toml")
    path.write_text("\n".join(lines) + "\n")
    return path


class Seen:
    """The learner of one host: all of them share this machine's kernel."""

    source = "kprobes"

    def __init__(self, node: str, device: str) -> None:
        self.node, self.device = node, device
        self.pairs: list = []

    def poll(self) -> list:
        pairs, self.pairs = self.pairs, []
        return pairs


class DirectLine:
    """The line to the controller by function calls: a web server takes long to start in here."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    def request(self, method: str, path: str, body: object, kind: object) -> object:
        parts = urllib.parse.urlsplit(path)
        if parts.path == "/fabric/rnics":
            return {str(m["address"]): name for name, m in self.controller.members().items()}
        job = urllib.parse.unquote(parts.path.removeprefix("/fabric/service/"))
        if method == "DELETE":
            self.controller.end_service(job)
            return {}
        lease_s = float(urllib.parse.parse_qs(parts.query)["lease_s"][0])
        until = time.time_ns() + int(lease_s * 1e9)
        return {"tuples": self.controller.set_service(job, body, until_ns=until)}

    def close(self) -> None:
        pass


class Recording(Worker):
    """Keeps single results beside the windows."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.results: list[Result] = []

    def _count(self, result: Result) -> None:
        self.results.append(result)
        super()._count(result)


class Fabric:
    """Controller, analyser and four workers in one process, joined by function calls."""

    def __init__(self, switches: dict[str, str]) -> None:
        topology = topology_of(load_cluster(cluster_file()))
        self.controller = Controller(
            topology, SETTINGS, now_ns=time.time_ns(), switch_of_address=switches
        )
        self.workers: list[Recording] = []
        for number, (host, device, _, net) in enumerate(HOSTS):
            transport = VerbsTransport(device, f"{net}.2", pool=12, toward=f"{net}.1")
            name = f"{host}/{device}"
            self.workers.append(Recording(name, transport, SETTINGS, seed=number))
        self.epoll = select.epoll()
        for worker in self.workers:
            self.epoll.register(worker.transport.fileno(), select.EPOLLIN)
        for worker in self.workers:
            t = worker.transport
            self.controller.register(
                Register(worker.name.split("/")[0], 1,
                         [RnicAddress(worker.name, t.address, t.qpn)]),
                time.time_ns(),
            )  # fmt: skip
        self.version = ""
        self.learner: KprobeLearner | None = None
        self.learned: list = []
        self.followers: list[tuple[Seen, ServiceLearning]] = []

    def learn(self, learner: KprobeLearner) -> None:
        """Give every host what was seen of its devices, as its own learner would have."""
        new = learner.poll()
        self.learned += new
        for seen, learning in self.followers:
            seen.pairs += [replace(p, node=seen.node) for p in new if p.device == seen.device]
            learning.step()

    def run(self, *, windows: int, until=None) -> dict:
        """Run until a window's status satisfies ``until``, ``windows`` of them at most."""
        begin, seen = time.time_ns(), 0
        while True:
            now = time.time_ns()
            version = self.controller.version(now)
            if version != self.version:
                self.version = version
                for worker in self.workers:
                    worker.take(self.controller.pinglist(worker.name, now), time.monotonic_ns())
            due = min(worker.fire(time.monotonic_ns()) for worker in self.workers)
            wait = (due - time.monotonic_ns()) / 1e9
            self.epoll.poll(min(max(wait, 0), 0.01))
            for worker in self.workers:
                worker.handle()
            if self.learner is not None:
                self.learn(self.learner)
            for worker in self.workers:
                for report in worker.reports(time.time_ns(), 1, {}):
                    self.controller.report(report, time.time_ns())
            for outcome in self.controller.step(time.time_ns()):
                if outcome.window.start_ns < begin:
                    continue
                seen += 1
                status = status_json(self.controller)
                status["seen"] = seen
                if (until is not None and until(status)) or seen >= windows:
                    return status


@contextlib.contextmanager
def netem(place: str, device: str, *what: str):
    """Impair what leaves an interface; added and deleted, never changed."""
    sh("tc", "-n", place, "qdisc", "add", "dev", device, "root", "netem", *what)
    try:
        yield
    finally:
        sh("tc", "-n", place, "qdisc", "del", "dev", device, "root")


def brief(status: dict) -> dict:
    keep = ("window", "verdict", "reason", "anomalies", "sla", "seen")
    return {key: status[key] for key in keep}


def clear(status: dict) -> bool:
    return status["verdict"] == "clear" and status["window"]["lost"] == 0


def ports_part(fabric: Fabric) -> None:
    found = []
    for worker in fabric.workers:
        t = worker.transport
        numbers = [int(pair.qp_num) for pair in t._pairs]
        found.append({
            "source": t.ports_source, "ports": t.ports, "stamps": str(t.stamps),
            "formula": [rxe_source_port(n) for n in numbers],
        })  # fmt: skip
    save(pool=found)


def healthy_part(fabric: Fabric) -> None:
    status = fabric.run(windows=6, until=lambda s: clear(s) and s["seen"] >= 2)
    rtts = sorted(r.rtt_ns for w in fabric.workers for r in w.results if r.rtt_ns is not None)
    stamps = {str(r.stamp_source) for w in fabric.workers for r in w.results if not r.lost}
    paths = {
        f"{w.name}>{target}:{port}": list(hops)
        for w in fabric.workers
        for (target, port), hops in w._known.items()
    }
    save(healthy=brief(status), rtt_p50_ns=rtts[len(rtts) // 2], probes=len(rtts),
         stamps=sorted(stamps), paths=paths)  # fmt: skip


def located(fabric: Fabric, place: str, device: str, *what: str) -> tuple[dict, dict]:
    """Impair a link and return its verdict's window, then the one after the end of the fault.

    A guest that its machine starves blames hosts as well, rightly: such a try is made again.
    """
    for _ in range(4):
        with netem(place, device, *what):
            status = fabric.run(windows=6, until=lambda s: s["verdict"] not in {"clear", "unknown"})
        after = fabric.run(windows=8, until=clear)
        if {entry["kind"] for entry in status["anomalies"]} == {"link"}:
            break
    return brief(status), brief(after)


def loss_part(fabric: Fabric) -> None:
    loss, after = located(fabric, "spine1", "leg2", "loss", "40%")
    save(loss=loss, after_loss=after)


def delay_part(fabric: Fabric) -> None:
    save(delay=located(fabric, "tora", "up0", "delay", "25ms")[0])


def counters(device: str) -> dict[str, int]:
    folder = Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters")
    return {f.name: int(f.read_text()) for f in folder.iterdir() if f.name != "lifespan"}


def service_part(fabric: Fabric) -> None:
    fabric.learner = KprobeLearner("lab")
    attached = fabric.learner.source
    before = {device: counters(device) for _, device, _, _ in HOSTS}
    begin = [str(w.transport._sgid_index) for w in fabric.workers]
    base = [
        "nice",
        "-n",
        "19",
        "ib_send_bw",
        "-F",
        "-e",
        "-q",
        "2",
        "-s",
        "1024",
        "-N",
        "-n",
        "200000",
    ]
    base += ["-p", "19999"]
    log = (OUT / "perftest.log").open("w")
    job = {**os.environ, "SLURM_JOB_ID": "4711"}
    for host, device, _, _ in HOSTS:
        seen = Seen(host, device)
        line = DirectLine(fabric.controller)
        fabric.followers.append((seen, ServiceLearning(host, [device], seen, line)))
    server = subprocess.Popen(
        [*base, "-d", "rxe2", "-x", begin[2]], stdout=log, stderr=log, env=job
    )
    time.sleep(0.3)
    client = subprocess.Popen(
        [*base, "-d", "rxe0", "-x", begin[0], "127.0.0.1"], stdout=log, stderr=log, env=job
    )
    pids = {server.pid: "rxe2", client.pid: "rxe0"}
    fabric.run(windows=1)
    pairs = [p for p in fabric.learned if not p.gone]
    jobs = fabric.controller.services()
    names = fabric.controller.topology.rnics
    tuples = [
        (names[a], names[b], port) for a, b, port in fabric.controller._service_table.tolist()
    ]
    with netem("tora", "up0", "loss", "10%"), netem("tora", "up1", "loss", "10%"):
        status = fabric.run(windows=2)
    after = {device: counters(device) for _, device, _, _ in HOSTS}
    for process in (client, server):
        process.kill()
        process.wait()
    fabric.learn(fabric.learner)
    gone = [p for p in fabric.learned if p.gone]
    jobs_after = fabric.controller.services()
    fabric.followers.clear()
    fabric.learner.close()
    fabric.learner = None
    left = Path("/sys/kernel/tracing/kprobe_events").read_text()
    save(service={
        "source": attached, "jobs": jobs, "jobs_after": jobs_after, "left_probes": left,
        "pids": {str(pid): device for pid, device in pids.items()},
        "pairs": [{name: getattr(p, name) for name in type(p).__dataclass_fields__} for p in pairs],
        "gone": [(p.device, p.qpn) for p in gone],
        "tuples": tuples,
        "status": brief(status),
        "counters": {
            device: {name: after[device][name] - value for name, value in values.items()}
            for device, values in before.items()
        },
    })  # fmt: skip


def extended_part() -> None:
    """The extended completion queue, without the stamps that soft-RoCE does not give."""
    with contextlib.closing(VerbsTransport("rxe0", "10.1.1.2", extended=True, pool=4)) as one, \
            contextlib.closing(VerbsTransport("rxe1", "10.1.2.2", extended=True, pool=4)) as two:  # fmt: skip
        sent = 0
        got = []
        deadline = time.monotonic() + 3
        while len(got) < 200 and time.monotonic() < deadline:
            if sent < 200:
                data = encode(Kind.PROBE, source_port=50000 + sent, target_qpn=two.qpn,
                              source_qpn=one.qpn, sequence=sent)  # fmt: skip
                one.send(data, Peer("10.1.2.2", two.qpn), 50000 + sent, token=sent)
                sent += 1
            one.poll()
            got += [e for e in two.poll() if isinstance(e, Received)]
        save(extended={
            "sent": sent, "received": len(got), "senders": sorted({e.address for e in got}),
            "sources": sorted({str(e.source) for e in got}), "stamps": str(one.stamps),
            "failed": one.failed_completions + two.failed_completions,
        })  # fmt: skip


def errors_part() -> None:
    found = {}
    for name, words in {"device": ("rxe9", "10.1.1.2"), "gid": ("rxe0", "10.9.9.9")}.items():
        try:
            VerbsTransport(*words)
        except PlatformError as error:
            found[name] = str(error)
    save(errors=found)


def main() -> int:
    begun = time.monotonic()
    switches = build()
    save(built_s=time.monotonic() - begun)
    fabric = Fabric(switches)
    status = 0
    parts = [
        lambda: ports_part(fabric), lambda: healthy_part(fabric), lambda: loss_part(fabric),
        lambda: delay_part(fabric), lambda: service_part(fabric), extended_part, errors_part,
    ]  # fmt: skip
    for part in parts:
        try:
            part()
        except Exception:
            traceback.print_exc()
            status = 1
        print(f"{time.monotonic() - begun:.1f} s", flush=True)
    save(total_s=time.monotonic() - begun)
    for worker in fabric.workers:
        worker.transport.close()
    return status


if __name__ == "__main__":
    os._exit(main())
