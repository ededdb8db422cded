"""Incident bundles in other words: other file systems, switches, schedulers and tools.

Wordings follow public reports of GPFS, BeeGFS, Ceph, XFS, SONiC, OpenSM, libfabric, LSF, DCGM,
amdgpu, JAX and DeepSpeed users. The rules were first scored on these before any was changed for
them; decoys differ from those of the other bundles.
"""

from pathlib import Path

from tests.labs.bundle_scene import BUSES, NICS, Case, Scene

__all__ = ["write_bundles"]

HEALED = (
    "ixgbe 0000:03:00.0 eno1: NIC Link is Down",
    "ixgbe 0000:03:00.0 eno1: NIC Link is Up 10 Gbps, Flow Control: RX/TX",
)
QUIET = (
    "EXT4-fs (sda2): re-mounted. Opts: errors=remount-ro. Quota mode: none.",
    "{1}[Hardware Error]: It has been corrected by h/w and requires no further action",
    "ACPI Error: AE_NOT_FOUND, Evaluating _PPC (20210730/psargs-330)",
    "ipmi_si IPI0001:00: The BMC does not support clearing the recv irq bit",
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  550.90.07",
    "usb 1-14.1: device descriptor read/64, error -110",
    "systemd[1]: logrotate.service: Main process exited, code=exited, status=1/FAILURE",
    "snmpd[911]: error on subcontainer 'ia_addr' insert (-1)",
)
CHATTER = (
    "UserWarning: The epoch parameter in `scheduler.step()` was not necessary",
    "Tokenizer: 3 sequences longer than 8192 were truncated, errors=ignore",
    "tensorboard: failed to flush events, will retry in 30 s",
    "Detected kernel version 4.18.0, which is below the recommended minimum of 5.5.0",
)


def _mislead(s):
    """Add lines that look bad and mean nothing."""
    host = s.rng.choice(s.hosts)
    at = s.rng.uniform(150, 500)
    s.kernel(host, at, HEALED[0])
    s.kernel(host, at + 4, HEALED[1])
    lines = s.rng.sample(QUIET, 3)
    for line in lines:
        s.kernel(s.rng.choice(s.hosts), s.rng.uniform(-2000, 700), line)
    said = s.rng.choice(CHATTER)
    s.info(s.rng.randrange(s.world), s.rng.uniform(60, 400), said, "WARNING")
    s.decoys += [HEALED[0], *lines, said]


def _begin(s, low=1300, high=3600):
    _mislead(s)
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(low, high)
    s.end = at + 900
    return rank, host, gpu, at


def _slow_from(at, extra):
    return lambda _, now: extra if now > at else 0.0


def nvlink_uncorrectable(s):
    rank, host, gpu, at = _begin(s)
    s.progress(at)
    s.file(
        f"nodes/{host}/dcgmi-health.txt",
        "+-----------------+-------------------------------------------------------+\n"
        "| Overall Health  | Failure                                               |\n"
        f"| GPU {gpu}           | Failure                                               |\n"
        f"|  NVLink system  | Failure: GPU {gpu}'s NvLink link 7 is currently down    |\n"
        "+-----------------+-------------------------------------------------------+",
    )
    s.fails(
        at + 1,
        rank,
        "enqueue.cc:1402 NCCL WARN Cuda failure 220 'uncorrectable NVLink error detected "
        "during the execution'",
    )
    return s.finish("gpu_hardware", ("nvlink",), host, "stop", ("application", "network"))


def ecc_seen_by_jax(s):
    rank, host, gpu, at = _begin(s)
    s.progress(at)
    s.say(
        rank,
        at,
        "jaxlib.xla_extension.XlaRuntimeError: INTERNAL: Failed to synchronize GPU: "
        "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
    )
    for other in range(s.world):
        if other != rank:
            s.say(
                other,
                at + s.rng.uniform(90, 140),
                "jax.errors.JaxRuntimeError: UNAVAILABLE: Task was unhealthy: coordination "
                "service detected missing heartbeat of /job:jax_worker/replica:0/task:"
                f"{rank}",
            )
    s.file(
        f"nodes/{host}/sel.txt",
        f" 4f | 03/12/2026 | {s.when(at):%H:%M:%S} | Critical Interrupt GPU{gpu} | "
        "Bus Uncorrectable error | Asserted",
    )
    return s.finish("gpu_hardware", ("ecc", "memory"), host, "stop", ("application", "network"))


def lanes_lost(s):
    _, host, gpu, at = _begin(s, 700, 1000)
    s.end = at + 1500
    s.progress(s.end, changes=_slow_from(at, 5.0))
    for each in s.hosts:
        parts = []
        for n in range(s.gpus):
            bad = each == host and n == gpu
            state = (
                "Speed 8GT/s (downgraded), Width x4 (downgraded)" if bad
                else "Speed 32GT/s (ok), Width x16 (ok)"
            )  # fmt: skip
            parts.append(
                f"{BUSES[n]}:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)\n"
                f"\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported\n"
                f"\t\tLnkSta:\t{state}"
            )
        s.file(f"nodes/{each}/lspci-vv.txt", "\n".join(parts))
    s.sacct("RUNNING", "0:0")
    return s.finish("gpu_hardware", ("pcie", "lane", "width"), host, "slow", ("application",))


def capped_clock_prom(s):
    _, host, gpu, at = _begin(s, 700, 1000)
    s.end = at + 1500
    s.progress(s.end, changes=_slow_from(at, 4.0))
    for each in s.hosts:
        rows = ["# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).",
                "# TYPE DCGM_FI_DEV_SM_CLOCK gauge"]  # fmt: skip
        for n in range(s.gpus):
            bad = each == host and n == gpu
            labels = f'gpu="{n}",UUID="GPU-{n}a{sum(each.encode()):x}",Hostname="{each}"'
            rows.append(f"DCGM_FI_DEV_SM_CLOCK{{{labels}}} {345 if bad else 1755 + n}")
            rows.append(f"DCGM_FI_DEV_GPU_TEMP{{{labels}}} {48 if bad else 60 + n % 3}")
            rows.append(f"DCGM_FI_DEV_POWER_USAGE{{{labels}}} {210 if bad else 640 + n}")
        s.file(f"nodes/{each}/dcgm-exporter.prom", "\n".join(rows))
    s.sacct("RUNNING", "0:0")
    return s.finish("gpu_hardware", ("clock", "power"), host, "slow", ("application", "network"))


def firmware_crash(s):
    rank, host, gpu, at = _begin(s)
    s.progress(at)
    s.kernel(host, at, "NVRM: kgspHealthCheck_TU102: ****** GSP-CrashCat Report *******")
    s.kernel(host, at + 1, f"NVRM: GPU{gpu} _kgspIsHeartbeatTimedOut: GSP heartbeat timed out")
    s.kernel(host, at + 40, f"NVRM: GPU {s.pci(gpu)}.0: RmInitAdapter failed! (0x62:0xffff:2477)")
    s.file(
        f"nodes/{host}/nvidia-smi.txt",
        f"Unable to determine the device handle for GPU{gpu}: 0000:{BUSES[gpu].upper()}:00.0: "
        "Unknown Error",
    )
    s.watchdog(at, s.rng.randrange(9000, 90000), but=(rank,))
    return s.finish("gpu_hardware", ("gsp", "driver", "gpu"), host, "hang", ("application",))


def amd_ras(s):
    rank, host, gpu, at = _begin(s)
    s.progress(at)
    s.kernel(
        host, at,
        f"amdgpu {s.pci(gpu)}.0: amdgpu: socket: 0 4 uncorrectable hardware errors detected in "
        "UMC block, no user action is needed.",
    )  # fmt: skip
    s.kernel(host, at + 1, f"amdgpu {s.pci(gpu)}.0: amdgpu: GPU mode1 reset")
    s.kernel(host, at + 2, f"amdgpu {s.pci(gpu)}.0: amdgpu: GPU reset begin!")
    s.fails(
        at + 3,
        rank,
        "HIP error: unspecified launch failure\nHIP kernel errors might be asynchronously reported at some other API call",
    )
    return s.finish(
        "gpu_hardware", ("ecc", "memory", "gpu", "reset"), host, "stop", ("application",)
    )


def fabric_interface_gone(s):
    _rank, host, gpu, at = _begin(s)
    s.progress(at)
    first = s.hosts.index(host) * s.gpus
    for other in range(s.world):
        if first <= other < first + s.gpus:
            continue
        s.nccl_line(
            other, at + s.rng.uniform(1, 6),
            "NET/OFI Request 0x7f3c completed with error. RC: 103. Error: 4110 (Unresponsive "
            f"remote). Completed length: 0, Request: {{ dev: {gpu}, type: SEND }}",
            "WARN",
        )  # fmt: skip
    s.kernel(
        host, at, f"efa 0000:{BUSES[gpu]}:1b.0: Reset the device; admin queue no longer responds"
    )
    s.close(at + 30)
    return s.finish("network", ("efa", "nic", "adapter", "peer", "fabric"), host, "stop",
                    ("application", "gpu_hardware"))  # fmt: skip


def transceiver_pulled(s):
    rank, host, gpu, at = _begin(s)
    s.progress(at)
    s.switch("leaf-b2", at, f"NOTICE pmon#xcvrd: Ethernet{gpu * 8}: Got SFP removed event")
    s.switch(
        "leaf-b2", at + 0.2,
        f"NOTICE swss#orchagent: :- updatePortOperStatus: Port Ethernet{gpu * 8} "
        f"({host}:{NICS[gpu]}) oper state set from up to down",
    )  # fmt: skip
    for other in range(s.world):
        if other % 8 == gpu and other != rank:
            s.nccl_line(
                other, at + s.rng.uniform(5, 12),
                f"NET/IB : Got completion from peer {s.address(host)}<41822> with status=12 "
                "opcode=129 len=0 vendor err 129 (Send)", "WARN",
            )  # fmt: skip
    s.close(at + 24)
    return s.finish("network", ("link", "transceiver", "port", "sfp"), host, "stop",
                    ("application", "gpu_hardware"))  # fmt: skip


def bit_errors_by_ufm(s):
    _, host, gpu, at = _begin(s, 800, 1100)
    s.end = at + 1600
    s.progress(s.end, changes=lambda _, now: 2.5 + 2 * s.rng.random() if now > at else 0.0)
    for n in range(5):
        s.put(
            "fabric/ufm_events.log", at + n * 180,
            f"{s.stamp(at + n * 180)},000 WARNING: [{110 + n}] [Hardware] Symbol BER exceeded "
            f"threshold (7.1e-09 > 1e-12) on port 22 of switch ib-leaf-07, peer {host} HCA-{gpu + 1}",
        )  # fmt: skip
    s.put(
        "fabric/ufm_events.log",
        at + 400,
        f"{s.stamp(at + 400)},000 MINOR: Link recoveries on ib-leaf-07:22 ({host}) 41 per hour",
    )
    s.sacct("RUNNING", "0:0")
    return s.finish("network", ("link", "ber", "symbol", "port", "cable"), host, "slow",
                    ("application", "gpu_hardware", "storage"))  # fmt: skip


def duplicate_address(s):
    _mislead(s)
    s.startup(complete=False)
    _, host, _ = s.pick()
    at = 65.0
    s.end = at + 200
    s.kernel(
        host, 12,
        f"bond0: IPv4 duplicate address {s.address(host)} detected (in use by b8:ce:f6:0a:11:02)!",
        "NetworkManager[1310]",
    )  # fmt: skip
    for rank in range(s.world):
        s.nccl_line(
            rank, at + s.rng.uniform(0, 5),
            f"socketPollConnect: connect to {s.address(host)}<38113> returned No route to host, "
            "exceeded error retry count after 35 attempts", "WARN",
        )  # fmt: skip
        s.say(
            rank,
            at + 6,
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)",
        )
    s.close(at + 20)
    return s.finish("network", ("address", "route", "ip", "connect"), host, "stop",
                    ("application", "gpu_hardware"))  # fmt: skip


def lossless_queue_drops(s):
    _mislead(s)
    s.startup()
    at = s.rng.uniform(800, 1100)
    s.end = at + 1600
    s.progress(s.end, changes=lambda _, now: 3 + s.rng.random() if now > at else 0.0)
    for n in range(12):
        s.switch(
            "spine-03", at + n * 60,
            f"%QOS-4-QUEUE_DROPS: Interface Ethernet{17 + n % 2}/1 no-drop queue 3: "
            f"{1200 + 310 * n} packets discarded in the last 60 s, buffer headroom exceeded",
        )  # fmt: skip
    host = s.rng.choice(s.hosts)
    s.put(
        "switches/spine-03.syslog",
        at - 30,
        f"{s.when(at - 30):%Y %b %d %H:%M:%S}.100000 spine-03 %SYS-5-CONFIG_I: Configured from console by netops",
    )
    rows = ["time,host,nic,out_of_sequence,roce_adp_retrans"]
    for n in range(80):
        now = n * s.end / 80
        for each in s.hosts:
            grows = max(0.0, now - at)
            rows += [f"{s.when(now):%Y-%m-%dT%H:%M:%SZ},{each},{nic},{grows * 40 + 3:.0f},{grows * 7 + 1:.0f}"
                     for nic in NICS[:2]]  # fmt: skip
    s.file("metrics/rdma.csv", "\n".join(rows))
    s.sacct("RUNNING", "0:0")
    del host
    return s.finish("network", ("drop", "discard", "queue", "retrans", "sequence", "congestion"), None,
                    "slow", ("application", "gpu_hardware", "storage", "host"))  # fmt: skip


def no_subnet_manager(s):
    _mislead(s)
    s.startup(complete=False, net="Socket")
    _, host, _ = s.pick()
    s.end = 260.0
    for each in s.hosts:
        s.file(
            f"nodes/{each}/ibstat.txt",
            "\n".join(
                f"CA '{n}'\n\tCA type: MT4129\n\tPort 1:\n"
                f"\t\tState: {'Initializing' if each == host else 'Active'}\n"
                f"\t\tPhysical state: LinkUp\n\t\tRate: 400\n"
                f"\t\tBase lid: {0 if each == host else 31}\n"
                f"\t\tSM lid: {0 if each == host else 1}\n\t\tLink layer: InfiniBand"
                for n in NICS
            ),
        )
    first = s.hosts.index(host) * s.gpus
    for rank in range(first, first + s.gpus):
        s.nccl_line(rank, 70 + s.rng.random(), "NET/IB : No device found.")
        s.say(
            rank,
            74,
            "RuntimeError: NCCL_NET=IB was requested but the plugin found no usable HCA: ncclInvalidUsage",
        )
    s.close(80)
    return s.finish("network", ("port", "hca", "ib", "lid", "device", "link"), host, "stop",
                    ("application", "gpu_hardware"))  # fmt: skip


def expelled_from_gpfs(s):
    rank, host, _gpu, at = _begin(s)
    s.progress(at)
    line = f"[E] Lost membership in cluster fs1.example. Unmounting file systems. Lease of {host} expired."
    s.put(f"nodes/{host}/mmfs.log.latest", at, f"{s.stamp(at)} {line}")
    s.put(
        f"nodes/{host}/mmfs.log.latest",
        at + 1,
        f"{s.stamp(at + 1)} [N] Disk lease overdue. Reason: no reply from cluster manager gpfs-nsd02",
    )
    s.fails(
        at + 3, rank, "OSError: [Errno 116] Stale file handle: '/gpfs/fs1/data/shard-004121.bin'"
    )
    return s.finish("storage", ("gpfs", "file", "storage", "lease", "mount"), host, "stop",
                    ("application", "gpu_hardware", "network"))  # fmt: skip


def beegfs_target_slow(s):
    _mislead(s)
    s.startup()
    at = s.rng.uniform(1300, 3000)
    s.progress(at)
    for host in s.hosts:
        s.kernel(host, at + s.rng.uniform(0, 9),
                 "beegfs: python(41233) [Messaging (RPC)] >> Retrying communication with node: beegfs-storage stor03 [ID: 3]; Receive timed out")  # fmt: skip
    s.put(
        "storage/stor03.log",
        at - 2,
        f"{s.stamp(at - 2)} stor03 StorageTargets [ID 301] >> Marking target offline: I/O error on /data/t301",
    )
    stuck = s.rng.sample(range(s.world), 3)
    for r in stuck:
        s.stack(
            r,
            (
                "readinto (io.py:311)",
                "__getitem__ (data/mmap.py:77)",
                "fetch (torch/utils/data/_utils/fetch.py:52)",
                "main (train.py:71)",
            ),
        )
    s.stacks_waiting(but=stuck)
    s.watchdog(at, s.rng.randrange(9000, 90000), but=stuck)
    return s.finish("storage", ("beegfs", "storage", "target", "data"), None, "hang",
                    ("application", "gpu_hardware", "framework", "network"))  # fmt: skip


def ceph_mds_laggy(s):
    _mislead(s)
    s.startup()
    at = s.rng.uniform(1300, 3000)
    s.progress(at)
    for host in s.hosts:
        s.kernel(host, at + s.rng.uniform(0, 9), "ceph: mds0 hung")
        s.kernel(host, at + 20, "ceph: mds0 caps stale")
        s.kernel(host, at + 140, "INFO: task python:51221 blocked for more than 122 seconds.")
    s.put(
        "storage/ceph-mon.log",
        at - 1,
        f"{s.stamp(at - 1)} mon.a cluster [WRN] Health check failed: 1 MDSs report slow metadata IOs (MDS_SLOW_METADATA_IO)",
    )
    s.info(0, at - 3, "saving checkpoint to /cephfs/ckpt/step_41000")
    s.watchdog(at, s.rng.randrange(9000, 90000), but=(0,))
    return s.finish("storage", ("ceph", "mds", "metadata", "storage", "checkpoint"), None, "hang",
                    ("application", "gpu_hardware", "framework", "network", "host"))  # fmt: skip


def xfs_shut_down(s):
    rank, host, _gpu, at = _begin(s)
    s.progress(at)
    s.kernel(host, at, "XFS (md127): log I/O error -5")
    s.kernel(host, at + 0.1, "XFS (md127): Filesystem has been shut down due to log error (0x2).")
    s.kernel(
        host, at + 0.2, "XFS (md127): Please unmount the filesystem and rectify the problem(s)."
    )
    s.fails(
        at + 3, rank, "OSError: [Errno 5] Input/output error: '/scratch/cache/train_0031.arrow'"
    )
    return s.finish("storage", ("xfs", "disk", "file", "storage", "i/o"), host, "stop",
                    ("application", "gpu_hardware", "network"))  # fmt: skip


def oss_rebuilds(s):
    _mislead(s)
    s.startup()
    at = s.rng.uniform(800, 1100)
    s.end = at + 1800
    s.progress(s.end, changes=lambda _, now: 8 * s.rng.random() if now > at else 0.0)
    s.put(
        "servers/oss04-messages",
        at,
        f"{s.when(at).astimezone(s.zone):%b %d %H:%M:%S} oss04 kernel: md/raid:md3: Disk failure on sdk, disabling device.",
    )
    for n in range(6):
        s.put(
            "servers/oss04-messages",
            at + 60 + n * 200,
            f"{s.when(at + 60 + n * 200).astimezone(s.zone):%b %d %H:%M:%S} oss04 kernel: Lustre: work-OST0007: slow i_mutex {30 + n * 9}s due to heavy IO load",
        )
    for n in range(5):
        s.info(
            s.rng.randrange(s.world),
            at + 100 + n * 250,
            f"data loader: waited {12 + n}.4 s for /lustre/work/shard_{n:05d}.tar",
            "WARNING",
        )
    s.sacct("RUNNING", "0:0")
    return s.finish("storage", ("ost", "disk", "storage", "raid", "data"), "oss04", "slow",
                    ("application", "gpu_hardware", "network"))  # fmt: skip


def lsf_run_limit(s):
    _mislead(s)
    s.slurm = False
    s.startup()
    at = s.rng.uniform(2500, 3500)
    s.progress(at)
    for rank in range(0, s.world, s.gpus):
        s.say(rank, at, "WARNING: received SIGUSR2, saving is not finished")
        s.say(rank, at + 4, "Terminated")
    s.put(
        f"lsf-{s.job}.out",
        at + 12,
        f"TERM_RUNLIMIT: job killed after reaching LSF run time limit.\nExited with exit code 140.\n\nResource usage summary:\n\n    CPU time :  {at * 40:.0f} sec.\n    Max Memory : 812 GB",
    )
    s.end = at + 20
    return s.finish("scheduler", ("limit", "time"), None, "stop",
                    ("application", "gpu_hardware", "host", "network"))  # fmt: skip


def requeued_by_root(s):
    _mislead(s)
    s.startup()
    at = s.rng.uniform(1500, 3500)
    s.progress(at)
    s.slurmctld(at - 0.2, f"_slurm_rpc_requeue: Requeue of JobId={s.job} returned Success by UID=0")
    for node, host in enumerate(s.hosts):
        s.say(
            node * s.gpus,
            at,
            f"slurmstepd: error: *** STEP {s.job}.0 ON {host} CANCELLED AT {s.when(at).astimezone(s.zone):%Y-%m-%dT%H:%M:%S} DUE TO JOB REQUEUE ***",
        )
    s.say(0, at + 1, "srun: forcing job termination")
    s.sacct("REQUEUED", "0:15", at)
    s.end = at + 12
    return s.finish("scheduler", ("requeue", "cancel", "scheduler"), None, "stop",
                    ("application", "gpu_hardware", "host", "network"))  # fmt: skip


def memory_page_poisoned(s):
    rank, host, _gpu, at = _begin(s)
    s.progress(at)
    s.kernel(host, at, "mce: Uncorrected hardware memory error in user-access at 2a41f3c000")
    s.kernel(
        host,
        at + 0.1,
        f"Memory failure: 0x2a41f3c: Sending SIGBUS to python3:{s.pids[rank]} due to hardware memory corruption",
    )
    s.kernel(
        host, at + 0.2, "Memory failure: 0x2a41f3c: recovery action for dirty LRU page: Recovered"
    )
    s.remote_errors(at + 1, but=(rank,), peer=host)
    s.close(at + 2, rank=rank, code=-7)
    return s.finish("host", ("memory", "dimm", "mce", "sigbus"), host, "stop",
                    ("application", "gpu_hardware", "network"))  # fmt: skip


def node_swaps(s):
    _, host, _, at = _begin(s, 700, 1000)
    s.end = at + 1500
    s.progress(s.end, changes=_slow_from(at, 6.0))
    rows = ["time,node,swap_used_gib,load1,cpu_iowait_pct"]
    for n in range(90):
        now = n * s.end / 90
        for each in s.hosts:
            bad = each == host and now > at
            rows.append(
                f"{s.when(now):%Y-%m-%dT%H:%M:%SZ},{each},{61 if bad else 0},"
                f"{190 + n % 7 if bad else 33 + n % 5},{44 + n % 3 if bad else 1}"
            )
    s.file("metrics/node.csv", "\n".join(rows))
    s.sacct("RUNNING", "0:0")
    return s.finish("host", ("swap", "load", "iowait", "cpu"), host, "slow",
                    ("application", "gpu_hardware", "network"))  # fmt: skip


def too_few_threads(s):
    _mislead(s)
    s.startup()
    rank, host, _ = s.pick()
    at = 66.0
    for each in s.hosts:
        s.file(f"nodes/{each}/ulimit-a.txt",
               "core file size          (blocks, -c) 0\nopen files                      (-n) 1048576\n"
               f"max user processes              (-u) {1024 if each == host else 'unlimited'}\n"
               "max locked memory       (kbytes, -l) unlimited")  # fmt: skip
    s.fails(
        at,
        rank,
        "OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable\nlibgomp: Thread creation failed: Resource temporarily unavailable",
    )
    return s.finish("host", ("process", "thread", "limit", "nproc"), host, "stop",
                    ("gpu_hardware", "network"))  # fmt: skip


def driver_absent(s):
    _mislead(s)
    _, host, _ = s.pick()
    s.end = 120.0
    first = s.hosts.index(host) * s.gpus
    s.say(
        first,
        20,
        "docker: Error response from daemon: OCI runtime create failed: nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: cannot open shared object file: no such file or directory: unknown",
    )
    s.file(
        f"nodes/{host}/nvidia-smi.txt",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.",
    )
    for other in s.hosts:
        if other != host:
            s.say(
                s.hosts.index(other) * s.gpus,
                110,
                f"torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. {s.world - s.gpus}/{s.world} clients joined.",
            )
    s.kernel(
        host,
        3,
        "dkms: nvidia/550.90.07: autoinstall for kernel 5.15.0-118-generic FAILED",
        "dkms[881]",
    )
    return s.finish("host", ("driver", "nvidia", "library"), host, "stop",
                    ("application", "network"))  # fmt: skip


def state_does_not_fit(s):
    _mislead(s)
    s.startup()
    at = 80.0
    for rank in range(s.world):
        s.say(rank, at + s.rng.random(),
              'Traceback (most recent call last):\n  File "/work/pretrain.py", line 310, in load\n    engine.load_checkpoint(args.load)\n'
              "RuntimeError: Error(s) in loading state_dict for GPTModel:\n\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([50304, 4096]) from checkpoint, the shape in current model is torch.Size([50432, 4096]).")  # fmt: skip
    s.close(at + 4)
    return s.finish("application", ("shape", "checkpoint", "mismatch", "code", "state"), None, "stop",
                    ("gpu_hardware", "network", "storage", "host"))  # fmt: skip


def picture_unreadable(s):
    rank, _host, _gpu, at = _begin(s)
    s.progress(at)
    s.fails(at, rank,
            'Traceback (most recent call last):\n  File "/work/train.py", line 88, in <module>\n    for batch in loader:\n'
            "PIL.UnidentifiedImageError: Caught UnidentifiedImageError in DataLoader worker process 3.\n"
            "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f12a4>")  # fmt: skip
    return s.finish("application", ("data", "image", "exception", "code"), f"rank {rank}", "stop",
                    ("gpu_hardware", "network", "host"))  # fmt: skip


def wrong_architecture(s):
    _mislead(s)
    s.startup()
    for rank in range(s.world):
        s.say(rank, 70 + s.rng.random() * 3,
              "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device\n"
              "NVIDIA H100 80GB HBM3 with CUDA capability sm_90 is not compatible with the current PyTorch installation.")  # fmt: skip
    s.close(78)
    return s.finish("framework", ("kernel image", "compat", "version", "build", "library", "capability"), None, "stop",
                    ("gpu_hardware", "network", "storage", "host"))  # fmt: skip


def slowly_diverges(s):
    _, _, _, at = _begin(s, 900, 1200)
    s.end = at + 2000
    s.progress(
        s.end,
        loss=lambda _, now: 2.2 if now < at else 2.2 + (now - at) / 90 + s.rng.uniform(0, 0.4),
    )
    s.info(
        0,
        at + 600,
        "loss scale reached its minimum of 1.0, gradients overflow at every update",
        "ERROR",
    )
    s.sacct("RUNNING", "0:0")
    return s.finish("application", ("loss", "numeric", "diverg", "gradient", "scale"), None, "numerics",
                    ("gpu_hardware", "network", "storage", "host"))  # fmt: skip


def well_beside_noise(s):
    _mislead(s)
    s.startup()
    s.progress(2400)
    for line in QUIET:
        s.kernel(s.rng.choice(s.hosts), s.rng.uniform(-900, 2000), line)
    s.info(0, 2410, "training run finished, 41000 steps, exiting normally")
    s.end = 2420.0
    s.sacct("COMPLETED", "0:0", 2420)
    return s.finish(
        "none", (), None, "none", ("gpu_hardware", "network", "storage", "host", "application")
    )


CASES = (
    nvlink_uncorrectable, ecc_seen_by_jax, lanes_lost, capped_clock_prom, firmware_crash, amd_ras,
    fabric_interface_gone, transceiver_pulled, bit_errors_by_ufm, duplicate_address,
    lossless_queue_drops, no_subnet_manager, expelled_from_gpfs, beegfs_target_slow,
    ceph_mds_laggy, xfs_shut_down, oss_rebuilds, lsf_run_limit, requeued_by_root,
    memory_page_poisoned, node_swaps, too_few_threads, driver_absent, state_does_not_fit,
    picture_unreadable, wrong_architecture, slowly_diverges, well_beside_noise,
)  # fmt: skip


def write_bundles(folder: Path, seed: int) -> list[Case]:
    """Write every bundle into a folder of its own below `folder`; return the cases."""
    return [maker(Scene(maker.__name__, folder, seed)) for maker in CASES]
