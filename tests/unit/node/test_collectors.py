"""Collectors on a recorded node; the expected values stand in tests/labs/node_tree.py."""

import struct

import pytest
from tests.labs.node_tree import MLX5_COUNTERS, import_text, make_node, write

from kansoku.catalog.metrics import metrics
from kansoku.errors import InputError
from kansoku.node import CommandResult, Event, Sample, load_collectors
from kansoku.node.collector import BUILT_IN
from kansoku.node.collectors.dcgm import Dcgm
from kansoku.node.collectors.ethtool import Ethtool
from kansoku.node.collectors.kernel_log import KernelLog
from kansoku.node.collectors.logins import Logins
from kansoku.node.collectors.slurm import Slurm
from kansoku.node.collectors.switches import Switches
from kansoku.node.edge.machine import Machine
from kansoku.node.switch import SwitchTarget

NOW = 1_795_961_000_000_000_000


@pytest.fixture
def tree(tmp_path):
    return make_node(tmp_path)


@pytest.fixture
def host(tree):
    return Machine(root=tree, name="c001", now_ns=lambda: NOW)


def collect(name, host, **settings):
    (collector,) = load_collectors([name], settings=settings)
    assert collector.absent(host) is None
    return list(collector.collect(host))


def value(items, metric, **wanted):
    """The one value of a series; underscores in names of labels stand for dots."""
    wanted = {k.replace("__", "."): v for k, v in wanted.items()}
    found = [
        s.value
        for s in items
        if isinstance(s, Sample) and s.metric == metric and wanted.items() <= dict(s.labels).items()
    ]
    assert len(found) == 1, (metric, wanted, found)
    return found[0]


def test_cpu_modes_sum_to_the_time_of_all_cores(host):
    items = collect("cpu", host)
    modes = [s.value for s in items if s.metric == "system.cpu.time"]
    assert sum(modes) == pytest.approx((10000 + 200 + 3000 + 50000 + 400 + 50 + 60 + 7) / 100)
    assert value(items, "system.cpu.time", cpu__mode="iowait") == 4.0
    assert value(items, "system.cpu.logical.count") == 2
    assert value(items, "system.cpu.load_average.1m") == 1.5
    assert value(items, "system.uptime") == 1000.25


def test_memory_states_sum_to_the_total(host):
    items = collect("memory", host)
    states = [s.value for s in items if s.metric == "system.memory.usage"]
    assert sum(states) == value(items, "system.memory.limit") == 1000 * 1024
    assert value(items, "system.memory.usage", system__memory__state="used") == 400 * 1024
    assert value(items, "system.paging.faults", system__paging__fault__type="minor") == 480
    assert value(items, "kansoku.memory.oom_kills") == 2


def test_pressure_is_in_seconds(host):
    items = collect("pressure", host)
    assert value(items, "kansoku.io.pressure.time", kansoku__pressure="full") == 0.25
    assert value(items, "kansoku.cpu.pressure.time", kansoku__pressure="some") == 1.5


def test_numa(host):
    items = collect("numa", host)
    found = value(
        items, "kansoku.numa.allocations", kansoku__numa__node="1", kansoku__numa__outcome="miss"
    )
    assert found == 5


def test_disks_leave_out_partitions_and_loops(host):
    items = collect("disk", host)
    assert {dict(s.labels)["system.device"] for s in items} == {"nvme0n1"}
    assert value(items, "system.disk.io", disk__io__direction="write") == 4000 * 512
    assert value(items, "system.disk.io_time") == 0.09


def test_network(host):
    items = collect("network", host)
    assert value(items, "system.network.packet.dropped", network__io__direction="transmit") == 4
    assert {dict(s.labels).get("network.interface.name") for s in items} == {"eth0"}


def test_filesystems_never_ask_a_network_server(host):
    items = collect("filesystem", host)
    kinds = {dict(s.labels)["system.filesystem.type"] for s in items}
    assert kinds == {"ext4", "lustre"}
    used = value(
        items,
        "system.filesystem.usage",
        system__filesystem__type="lustre",
        system__filesystem__state="used",
    )
    assert used == 1000 * 1024


def test_cpu_energy_unwraps_at_its_own_range(tree, host):
    (collector,) = load_collectors(["energy"])
    first = value(list(collector.collect(host)), "hw.energy")
    write(tree, "/sys/class/powercap/intel-rapl:0/energy_uj", "1000000\n")
    second = value(list(collector.collect(host)), "hw.energy")
    assert second - first == pytest.approx((262143328850 - 262000000000 + 1000000) / 1e6)


def test_rdma_words_become_bytes_and_wraps_become_growth(tree, host):
    (collector,) = load_collectors(["rdma"])
    items = list(collector.collect(host))
    series = {"hw__name": "mlx5_3", "network__io__direction": "transmit"}
    assert value(items, "hw.network.io", **series) == 4000
    assert value(items, "hw.network.bandwidth.limit", hw__name="mlx5_3") == 50e9
    counters = tree / "sys/class/infiniband/mlx5_3/ports/1/hw_counters"
    before = 2**32 - 10
    (counters / "out_of_sequence").write_text(f"{before}\n")
    who = {
        "kansoku__rdma__device": "mlx5_3",
        "kansoku__rdma__counter": "out_of_sequence",
        "kansoku__rdma__side": "responder",
    }
    assert value(list(collector.collect(host)), "kansoku.rdma.events", **who) == before
    (counters / "out_of_sequence").write_text("15\n")
    assert value(list(collector.collect(host)), "kansoku.rdma.events", **who) == before + 25


def test_rdma_settings_and_unreadable_counters_are_no_samples(tree, host):
    port = tree / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "counters" / "symbol_error").write_text("N/A (no PMA)\n")
    items = collect("rdma", host)
    assert not [s for s in items if ("kansoku.rdma.counter", "lifespan") in s.labels]
    errors = [s for s in items if s.metric == "hw.errors" and ("hw.name", "mlx5_0") in s.labels]
    assert not [s for s in errors if ("error.type", "symbol") in s.labels]


def test_ethtool_by_priority(host):
    counters = MLX5_COUNTERS | {
        "rx_prio3_pause": 7, "rx_prio3_pause_duration": 2_000_000, "rx_prio1_discards": 4,
        "rx_prio3_discards": 5,
    }  # fmt: skip
    items = collect("ethtool", host, ethtool_statistics=lambda _: counters)
    who = {"network__interface__name": "ens3f0", "network__io__direction": "receive"}
    assert value(items, "kansoku.nic.pause.frames", kansoku__priority="3", **who) == 7
    assert value(items, "kansoku.nic.pause.time", kansoku__priority="3", **who) == 2.0
    assert value(items, "kansoku.nic.discards", kansoku__cause="priority_buffer", **who) == 9
    assert value(items, "kansoku.nic.link.downs", network__interface__name="ens0f0") == 1
    assert not [s for s in items if "packets" in s.metric]


def test_ethtool_survives_a_driver_reload(host):
    answers = [{"link_down_events_phy": 5}, {"link_down_events_phy": 1}]
    collector = Ethtool(ethtool_statistics=lambda name: answers[0] if name == "ens0f0" else None)
    assert value(list(collector.collect(host)), "kansoku.nic.link.downs") == 5
    answers.pop(0)
    assert value(list(collector.collect(host)), "kansoku.nic.link.downs") == 6


def test_lustre(tree, host):
    (collector,) = load_collectors(["lustre"])
    items = list(collector.collect(host))
    assert value(items, "kansoku.lustre.io", disk__io__direction="read") == 5242880
    assert value(
        items, "kansoku.lustre.operation_time", kansoku__operation="open"
    ) == pytest.approx(350e-6)
    assert value(items, "kansoku.lustre.target.up", kansoku__target="scratch-OST0002") == 1
    assert not [e for e in items if isinstance(e, Event)]
    folder = "/proc/fs/lustre/osc/scratch-OST0002-osc-ffff9f3a1c2d4800"
    write(tree, f"{folder}/import", import_text("scratch-OST0002", "DISCONN"))
    items = list(collector.collect(host))
    assert value(items, "kansoku.lustre.target.up", kansoku__target="scratch-OST0002") == 0
    (event,) = [e for e in items if isinstance(e, Event)]
    assert (event.subject, event.severity) == ("storage:scratch", "error")
    assert not [e for e in collector.collect(host) if isinstance(e, Event)], "said once"


def test_nfs(host):
    items = collect("nfs", host)
    assert value(items, "kansoku.nfs.io", disk__io__direction="write") == 8192
    assert value(items, "nfs.client.rpc.count") == 30
    assert value(items, "nfs.client.rpc.retransmits") == 2
    assert value(items, "kansoku.nfs.operation_time", kansoku__operation="write") == 0.7


def test_kernel_log_names_the_gpu_and_the_meaning(tree, host):
    for bus in ("1b", "2b", "3b"):
        (tree / f"proc/driver/nvidia/gpus/0000:{bus}:00.0").mkdir(parents=True)
    line = "4,77,500000000,-;NVRM: Xid (PCI:0000:2b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
    batches = [([line, "6,78,500000100,-;random: crng init done"], 0), ([], 3)]
    collector = KernelLog(kmsg=lambda: batches.pop(0))
    (event,) = collector.collect(host)
    assert event.subject == "gpu:c001/1"
    assert event.severity == "error"
    assert event.attributes["code"] == "79"
    assert event.attributes["meaning"] == "GPU unreachable over PCIe"
    assert event.attributes["domain"] == "gpu_hardware"
    # booted 1000.25 s before NOW; the line came 500 s after boot
    assert event.time_ns == NOW - round(1000.25e9) + 500_000_000_000
    (overrun,) = collector.collect(host)
    assert overrun.kind == "kernel_log_overrun"


def test_an_unknown_xid_is_not_guessed(host):
    line = "4,1,1,-;NVRM: Xid (PCI:0000:2b:00): 9999, something new"
    (event,) = KernelLog(kmsg=lambda: ([line], 0)).collect(host)
    assert event.attributes["meaning"].startswith("unknown")


def utmp_record(kind, pid, line, user):
    return struct.pack(
        "<hxxi32s4s32s256shhiii4i20x", kind, pid, line, b"", user, b"10.0.0.9", 0, 0, 0, 1795960000,
        500, 0, 0, 0, 0,
    )  # fmt: skip


def test_logins(tree, host):
    (tree / "run").mkdir()
    alice, dead = utmp_record(7, 11, b"pts/0", b"alice"), utmp_record(7, 12, b"pts/1", b"bob")
    (tree / "run/utmp").write_bytes(utmp_record(2, 0, b"~", b"reboot") + alice + dead + b"torn")
    write(tree, "/proc/11/stat", "11 (bash) S")
    collector = Logins()
    items = list(collector.collect(host))
    assert value(items, "kansoku.login.sessions", kansoku__user="alice") == 1
    assert len(items) == 1, "bob's process is gone; the first look is no login event"
    write(tree, "/proc/12/stat", "12 (bash) S")
    events = [e for e in collector.collect(host) if isinstance(e, Event)]
    assert [(e.kind, e.body) for e in events] == [("login", "bob on pts/1")]


JOB = """JobId=417 JobName=a name with JobState=FAILED inside
   UserId=alice(1001) GroupId=users(100) MCS_label=N/A
   Priority=1 Nice=0 Account=llm QOS=normal
   JobState=RUNNING Reason=None Dependency=(null)
   Partition=train AllocNode:Sid=login:99
   NodeList=c[001-002]
   JOB_GRES=gpu:h100:12
     Nodes=c001 CPU_IDs=0-1 Mem=8000 GRES=gpu:h100:4(IDX:0-2,5)
     Nodes=c002 CPU_IDs=0-1 Mem=8000 GRES=gpu:h100:8(IDX:0-7)
"""


def test_slurm_maps_job_node_and_gpu(tree):
    state = ["IDLE"]
    queue = ["417\n"]

    def programs(command, _timeout):
        if command[0] == "squeue":
            return CommandResult(code=0, stdout=queue[0], stderr="")
        if "node" in command:
            text = f"NodeName=c001 Arch=x86_64\n   State={state[0]} ThreadsPerCore=2\n   Reason=bad GPU\n"
            return CommandResult(code=0, stdout=text, stderr="")
        return CommandResult(code=0, stdout=JOB, stderr="")

    host = Machine(root=tree, name="c001", now_ns=lambda: NOW, programs=programs)
    collector = Slurm()
    assert collector.absent(host) is None
    items = list(collector.collect(host))
    held = [dict(s.labels)["hw.name"] for s in items if s.metric == "kansoku.slurm.job.gpu"]
    assert held == ["gpu0", "gpu1", "gpu2", "gpu5"]
    assert value(items, "kansoku.slurm.job.state", slurm__state="running", slurm__user="alice") == 1
    queue[0], state[0] = "", "IDLE+DRAIN"
    events = [e for e in collector.collect(host) if isinstance(e, Event)]
    assert [(e.kind, e.subject) for e in events] == [
        ("node_state", "node:c001"), ("job_left", "job:417"),
    ]  # fmt: skip


DCGM = """# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-aa",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="c001"} 97
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-aa"} 31
# TYPE DCGM_FI_PROF_NVLINK_TX_BYTES counter
DCGM_FI_PROF_NVLINK_TX_BYTES{gpu="0",UUID="GPU-aa"} 123456
"""


def test_dcgm_samples_and_xid_events(host):
    collector = Dcgm(dcgm_url="http://x/metrics", fetch=lambda _: DCGM)
    items = list(collector.collect(host))
    assert value(items, "hw.gpu.utilization", hw__name="gpu0", hw__id="GPU-aa") == 0.97
    (event,) = [e for e in items if isinstance(e, Event)]
    assert (event.kind, event.subject) == ("xid", "gpu:c001/0")
    assert [e for e in collector.collect(host) if isinstance(e, Event)] == []


@pytest.mark.parametrize(
    "text", ["", "<html>not here</html>", "node_load1 0.5\n", "\x00\ufffd" * 9]
)
def test_an_answer_that_is_no_dcgm_exporter_is_said(host, text):
    with pytest.raises(InputError, match="http://x: no DCGM metric in the answer"):
        list(Dcgm(dcgm_url="http://x", fetch=lambda _: text).collect(host))


def test_a_dcgm_exporter_with_only_sentinels_is_no_failure(host):
    text = 'DCGM_FI_DEV_FB_USED{gpu="0"} 9223372036854775794\n'
    assert list(Dcgm(dcgm_url="http://x", fetch=lambda _: text).collect(host)) == []


class Answers:
    def __init__(self, *columns):
        self.columns = list(columns)

    def snmp(self, target):
        answer = self.columns.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_switch_counters_of_32_bits_wrap_and_silence_is_said_once(host):
    names = {"7": "Ethernet0"}
    client = Answers(
        {"ifName": names, "ifInDiscards": {"7": 2**32 - 5}, "cpfcIfPriorityRequests": {"7.4": 9}},
        {"ifName": names, "ifInDiscards": {"7": 5}},
        OSError("no answer"),
        OSError("no answer"),
    )
    target = SwitchTarget(name="leaf0", protocol="snmp", host="h", port=161, community="c")
    collector = Switches(switches=[target], switch_client=client)
    first = list(collector.collect(host))
    pause = "kansoku.switch.port.pause.frames"
    assert value(first, pause, kansoku__priority="3", network__io__direction="receive") == 9
    who = {"network__interface__name": "Ethernet0"}
    assert value(list(collector.collect(host)), "kansoku.switch.port.discards", **who) == 2**32 + 5
    events = [[i.kind for i in collector.collect(host) if isinstance(i, Event)] for _ in range(2)]
    assert events == [["switch_unreachable"], []]


@pytest.mark.parametrize("name", BUILT_IN)
def test_samples_are_declared(name, host, tmp_path):
    """Every metric a collector returns, and every attribute, stands in the catalogue."""
    (collector,) = load_collectors(
        [name],
        settings={
            "ethtool_statistics": lambda _: MLX5_COUNTERS,
            "dcgm_url": "http://x",
            "fetch": lambda _: DCGM,
            "kmsg": lambda: ([], 0),
        },
    )
    if collector.absent(host) is not None:
        return
    for item in collector.collect(host):
        if isinstance(item, Sample):
            assert item.metric in collector.metrics
            declared = set(metrics()[item.metric].attributes)
            assert {key for key, _ in item.labels} <= declared, item
            assert list(item.labels) == sorted(item.labels)
