"""Two nodes, a login node and a leaf switch, observed by the real agent, sent by the real exporter.

Run as a program: ``python fleet_feed.py FOLDER URL PLAN``, with the fake NVML on LD_LIBRARY_PATH.
PLAN is JSON: a list of windows, each with its end and where the fault is. The clock is virtual, so
five minutes of a node take a second. Every number is chosen here, so that tests expect it.

A window's fault, on one GPU, one NIC, one Lustre target and one switch port of one node:
the GPU draws 90 W instead of 500 and is held down by heat for a third of the time; its NIC is
paused by PFC for a fifth of the time and loses packets; the target is not connected; the I/O
stalls the node for half of the time; the leaf's port drops packets.
"""

import json
import struct
import sys
from pathlib import Path

import polars as pl

from kansoku.app.agent import Agent, AgentSettings
from kansoku.catalog.metrics import metrics
from kansoku.model import ring
from kansoku.node import CommandResult
from kansoku.node.edge.machine import Machine
from kansoku.node.switch import SwitchTarget
from kansoku.telemetry import Exporter, MetricInfo

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.labs.node_tree import MLX5_COUNTERS, import_text, make_node, write  # noqa: E402

SECOND = 10**9
STEP_S = 30
ROUNDS = 11  # 5 minutes from the first to the last
NICS = 5
JOBS = {"c001": ("417", "alice", "llm", "0-7"), "c002": ("418", "bob", "vision", "0-3")}
RUN = "slurm-417-0-0"


def scontrol_job(node):
    number, user, account, gpus = JOBS[node]
    return (
        f"JobId={number} JobName=train\n   UserId={user}(1001) GroupId=users(100)\n"
        f"   Priority=1 Nice=0 Account={account} QOS=normal\n   JobState=RUNNING Reason=None\n"
        f"   Partition=train AllocNode:Sid=login:99\n   NodeList={node}\n"
        f"     Nodes={node} CPU_IDs=0-1 Mem=8000 GRES=gpu:h100:8(IDX:{gpus})\n"
    )


class Leaf:
    """A switch client: one port that drops when the fault is here."""

    def __init__(self):
        self.seconds = 0.0
        self.discards = {}

    def gnmi(self, target):
        ports, queues, marks, groups = {}, {}, {}, {}
        for number in range(2):
            port = f"Ethernet{number * 8}"
            ports[port] = {
                "SAI_PORT_STAT_IF_IN_OCTETS": str(int(self.seconds * 1e9)),
                "SAI_PORT_STAT_IF_OUT_OCTETS": str(int(self.seconds * 2e9)),
                "SAI_PORT_STAT_IF_IN_DISCARDS": str(self.discards.get((target.name, number), 0)),
                "SAI_PORT_STAT_IF_IN_ERRORS": "0",
                "SAI_PORT_STAT_PFC_3_RX_PKTS": str(int(self.seconds * 10)),
            }
            queues[f"{port}:3"] = {
                "SAI_QUEUE_STAT_WRED_ECN_MARKED_PACKETS": str(int(self.seconds * 7)),
                "SAI_QUEUE_STAT_DROPPED_PACKETS": "0",
            }
            marks[f"{port}:3"] = {"SAI_QUEUE_STAT_SHARED_WATERMARK_BYTES": "4000000"}
            groups[f"{port}:3"] = {
                "SAI_INGRESS_PRIORITY_GROUP_STAT_SHARED_WATERMARK_BYTES": "60000"
            }
        return {
            "ports": ports, "queues": queues, "watermarks": marks, "group_watermarks": groups,
        }  # fmt: skip

    def snmp(self, target):
        raise OSError("not asked here")


class Steps:
    """The ring of one rank, a step of 100 ms each 10 s."""

    def __init__(self, folder, start_ns):
        self.path = folder / RUN / "c001-4194313.ring"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.buffer = bytearray(1 << 18)
        ring.format_ring(
            self.buffer, pid=2**22 + 9, process_start=9, anchor=(SECOND, start_ns), lane_shares=(1,)
        )
        self.writer = ring.RingWriter(self.buffer)
        self.writer.set_ranks(0, 0, 1)
        self.writer.set_facts({"node": "c001", "run": RUN, "groups": []})
        self.step = 0

    def run(self):
        for _ in range(3):
            self.step += 1
            start = SECOND + self.step * 10 * SECOND
            end = start + SECOND // 10
            codes = ring.KIND_CODES
            outer = self.writer.open(ring.pack_template(codes["step"]), start, self.step, 0)
            inner = self.writer.open(ring.pack_template(codes["forward"]), start, self.step, outer)
            self.writer.close(inner, start, start + SECOND // 20, -1)
            self.writer.close(outer, start, end, -1)
        for kind in ("step", "forward"):
            self.writer.set_count(ring.KIND_CODES[kind], self.step, 0)
        self.path.write_bytes(self.buffer)


class Node:
    """One compute node's tree, moved on by hand."""

    def __init__(self, folder, name, clock):
        self.name, self.clock = name, clock
        self.tree = make_node(folder / name, nics=NICS)
        write(self.tree, "/proc/self/statm", "30000 16384 100 1 0 1 0\n")
        self.pause_us, self.lost, self.stall_us, self.bytes, self.throttled_ns = {}, {}, 0, 0, 0
        self.drained = False

    def programs(self, command, _timeout):
        if command[0] == "squeue":
            return CommandResult(code=0, stdout=f"{JOBS[self.name][0]}\n", stderr="")
        if "node" in command:
            state = "MIXED+DRAIN" if self.drained else "MIXED"
            text = f"NodeName={self.name} Arch=x86_64\n   State={state} ThreadsPerCore=2\n   Reason=x\n"
            return CommandResult(code=0, stdout=text, stderr="")
        return CommandResult(code=0, stdout=scontrol_job(self.name), stderr="")

    def statistics(self, interface):
        number = int(interface.removeprefix("ens").removesuffix("f0"))
        paused = self.pause_us.get(number, 0)
        return MLX5_COUNTERS | {
            "rx_prio3_pause": paused // 100, "rx_prio3_pause_duration": paused,
            "rx_prio3_bytes": self.bytes, "rx_out_of_buffer": self.lost.get(number, 0),
        }  # fmt: skip

    def move(self, fault, rounds):
        """Let STEP_S pass: healthy growth, and the fault's own."""
        here = fault if fault["node"] == self.name else None
        self.drained = here is not None
        self.bytes += STEP_S * 10**9
        for number in range(NICS):
            port = f"/sys/class/infiniband/mlx5_{number}/ports/1"
            words = rounds * STEP_S * 10**10 // 4
            write(self.tree, f"{port}/counters/port_xmit_data", f"{words}\n")
            write(self.tree, f"{port}/counters/port_rcv_data", f"{words}\n")
        write(
            self.tree, "/proc/stat",
            f"cpu  {1000 + rounds * 40 * STEP_S} 0 {rounds * 20 * STEP_S} {rounds * 140 * STEP_S} 0 0 0 0 0 0\ncpu0 1\n"
            "btime 1795960000\nprocesses 4321\nprocs_running 3\nprocs_blocked 1\n",
        )  # fmt: skip
        scaled = rounds * STEP_S
        write(
            self.tree, "/proc/fs/lustre/llite/scratch-ffff9f3a1c2d4800/stats",
            "snapshot_time             1795960000.123456789 secs.nsecs\n"
            f"read_bytes                {scaled} samples [bytes] 4096 1048576 {scaled * 2 * 10**9} 1\n"
            f"write_bytes               {scaled} samples [bytes] 100 400 {scaled * 10**9} 1\n"
            f"open                      {scaled * 10} samples [usecs] 10 90 {scaled * 10 * 2000} 1\n",
        )  # fmt: skip
        write(
            self.tree, "/proc/diskstats",
            f" 259       0 nvme0n1 {scaled * 10} 0 {scaled * 80} {scaled * 5} {scaled * 10} 0 "
            f"{scaled * 80} {scaled * 5} 0 {scaled * 100} {scaled * 10} 0 0 0 0 0 0\n",
        )  # fmt: skip
        if here:
            self.pause_us[here["nic"]] = self.pause_us.get(here["nic"], 0) + STEP_S * 200_000
            self.lost[here["nic"]] = self.lost.get(here["nic"], 0) + STEP_S * 40
            self.stall_us += STEP_S * 500_000
            self.throttled_ns += STEP_S * SECOND // 3
            folder = f"/sys/class/infiniband/mlx5_{here['nic']}/ports/1/hw_counters"
            write(self.tree, f"{folder}/out_of_sequence", f"{self.lost[here['nic']]}\n")
        for number in range(4):
            target = f"scratch-OST{number:04x}"
            state = "DISCONN" if here and here["ost"] == number else "FULL"
            folder = f"/proc/fs/lustre/osc/{target}-osc-ffff9f3a1c2d4800"
            write(self.tree, f"{folder}/import", import_text(target, state))
        write(
            self.tree, "/proc/pressure/io",
            f"some avg10=0.00 avg60=0.00 avg300=0.00 total={self.stall_us}\n"
            f"full avg10=0.00 avg60=0.00 avg300=0.00 total={self.stall_us}\n",
        )  # fmt: skip

    def gpu_lines(self, fault, rounds):
        """What the fake NVML answers on this node now."""
        here = fault if fault["node"] == self.name else None
        joules = 10**8 + rounds * STEP_S * 500  # since the driver was loaded
        lines = ["power_mw -1 500000", "utilisation -1 98", "process -1 1234",
                 f"energy_mj -1 {joules * 1000}", f"field_138 -1 {rounds * STEP_S * 1000}"]  # fmt: skip
        if here:
            gpu = here["gpu"]
            lines += [f"power_mw {gpu} 90000", f"utilisation {gpu} 3", f"clock_reasons {gpu} 64",
                      f"violation_1_ns {gpu} {self.throttled_ns}",
                      f"ecc_uncorrected {gpu} {rounds}"]  # fmt: skip
        return "".join(f"{line}\n" for line in lines)


def logs(fault, end_ns, name):
    """Rows that others of our parts make: bursts, probes, findings, incidents, fabric metrics."""
    rows = {
        "bursts": [
            {"node": fault["node"], "port": f"ens{fault['nic']}f0", "direction": "receive",
             "start_ns": end_ns - i * SECOND, "duration_ns": 2_000_000 + i, "peak_ratio": 0.9,
             "mean_ratio": 0.7, "bytes": 10_000_000, "samples": 2, "sampling_ns": 1_000_000}
            for i in range(1, 6)
        ],
        "probes": [
            {"time_ns": end_ns - 20 * SECOND, "window_ns": 20 * SECOND, "source": "c001/mlx5_0",
             "target": f"{fault['node']}/mlx5_{fault['nic']}", "kind": "inter_tor", "probes": 200,
             "lost": 14, "rtt_p50_ns": 20_000, "rtt_p99_ns": 900_000},
            {"time_ns": end_ns - 20 * SECOND, "window_ns": 20 * SECOND, "source": "c001/mlx5_3",
             "target": "c002/mlx5_3", "kind": "tor_mesh", "probes": 200, "lost": 0,
             "rtt_p50_ns": 20_000, "rtt_p99_ns": 90_000},
        ],
        "findings": [
            {"id": f"f-{name}", "subject": f"gpu:{fault['node']}/{fault['gpu']}",
             "domain": "gpu_hardware", "onset_ns": end_ns - 100 * SECOND, "time_ns": end_ns - SECOND,
             "verdict": "found", "severity": "warning", "confidence": 0.9, "evidence": "[]",
             "sentence": f"GPU {fault['gpu']} of {fault['node']} is slow", "source": "diagnose"},
        ],
        "incidents": [
            {"id": f"i-{name}", "onset_ns": end_ns - 100 * SECOND, "time_ns": end_ns - SECOND,
             "kind": "slow", "subject": f"node:{fault['node']}", "domain": "gpu_hardware",
             "verdict": "found", "confidence": 0.9, "hypotheses": "[]", "evidence": "[]",
             "actions": "drain", "state": "open"},
        ],
    }  # fmt: skip
    samples = [
        {"metric": metric, "labels": json.dumps(dict(pairs)), "time_ns": end_ns - back * SECOND,
         "value": value}
        for back in range(0, 300, 20)
        for metric, pairs, value in (
            ("kansoku.fabric.probes", {"kansoku.scope": "cluster"}, 400.0),
            ("kansoku.fabric.drop", {"kansoku.scope": "cluster"}, fault["drop"]),
            ("kansoku.fabric.rtt", {"kansoku.scope": "cluster", "kansoku.quantile": "p99"}, 9e-4),
            ("kansoku.fabric.responder.delay", {"kansoku.scope": "cluster", "kansoku.quantile": "p99"}, 1e-5),
            ("kansoku.fabric.prober.delay", {"kansoku.scope": "cluster", "kansoku.quantile": "p99"}, 1e-5),
            ("kansoku.fabric.anomalies", {"kansoku.kind": "link"}, 1.0),
        )
    ]  # fmt: skip
    tables = {table: pl.DataFrame(found) for table, found in rows.items()}
    return tables | {"metrics": pl.DataFrame(samples)}


def describe(name):
    entry = metrics()[name]
    return MetricInfo(unit=entry.unit, kind=entry.kind.value, description=entry.meaning)


def exporter(url, folder, name):
    return Exporter(
        url, protocol="http", spool=folder / f"spool-{name}", sync=False, describe=describe,
        resource={"host.name": name, "service.name": "kansoku-agent"},
    )  # fmt: skip


def login_tree(folder):
    tree = make_node(folder / "login1", nics=0)
    record = struct.pack(
        "<hxxi32s4s32s256shhiii4i20x", 7, 11, b"pts/0", b"", b"alice", b"10.0.0.9", 0, 0, 0,
        1795960000, 500, 0, 0, 0, 0,
    )  # fmt: skip
    (tree / "run").mkdir()
    (tree / "run/utmp").write_bytes(record)
    write(tree, "/proc/11/stat", "11 (bash) S")
    return tree


def feed(folder, url, values, plan):
    """Observe every window and send it; ``values`` is the fake NVML's file."""
    clock = [0]
    nodes = {name: Node(folder, name, clock) for name in JOBS}
    leaf = Leaf()
    targets = [SwitchTarget(name=f"leaf{i}", protocol="gnmi", host="h", port=8080) for i in (0, 1)]
    agents, sinks = {}, {}
    for name, node in nodes.items():
        more = {"switches": targets, "switch_client": leaf} if name == "c001" else {}
        settings = AgentSettings(
            node=name, ring_folder=folder / "rings" if name == "c001" else None, sample_every=2,
            collector_settings={"ethtool_statistics": node.statistics, **more},
        )  # fmt: skip
        host = Machine(root=node.tree, name=name, now_ns=lambda: clock[0], programs=node.programs)
        agents[name] = Agent(settings, host=host, monotonic_ns=lambda: clock[0])
    host = Machine(root=login_tree(folder), name="login1", now_ns=lambda: clock[0])
    agents["login1"] = Agent(
        AgentSettings(node="login1", only=("cpu", "memory", "logins"), ring_folder=None),
        host=host, monotonic_ns=lambda: clock[0],
    )  # fmt: skip
    sinks = {name: exporter(url, folder, name) for name in agents}
    done = 0
    steps = None
    for window in plan:
        for count in range(ROUNDS):
            clock[0] = window["end_ns"] - (ROUNDS - 1 - count) * STEP_S * SECOND
            done += 1
            leaf.seconds = done * STEP_S
            leaf.discards = {(window["leaf"], window["port"]): done * STEP_S * 3}
            if steps is None:
                steps = Steps(folder / "rings", clock[0])
            steps.run()
            for name, agent in agents.items():
                if name in nodes:
                    nodes[name].move(window, done)
                    part = values.with_suffix(".part")
                    part.write_text(nodes[name].gpu_lines(window, done))
                    part.replace(values)
                result, tables = agent.round()
                sinks[name].put_tables(tables)
                agent._handed_on += len(result.samples)
        for table, rows in logs(window, window["end_ns"], window["name"]).items():
            sinks["c001"].put(table, rows)
    for sink in sinks.values():
        sink.flush(60)
        assert sink.counts.rows_delivered == sink.counts.rows_in, sink.counts
        sink.close()


if __name__ == "__main__":
    where, address, values_file, plan_text = sys.argv[1:]
    feed(Path(where), address, Path(values_file), json.loads(plan_text))
