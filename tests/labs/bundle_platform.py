"""Incident bundles whose cause is storage, the scheduler or the host."""

from tests.labs.bundle_fabric import completion_errors

READING = (
    "read (torch/utils/data/_utils/fetch.py:51)",
    "__getitem__ (train/data.py:77)",
    "next_batch (train/loop.py:180)",
)


def lustre_eviction(s):
    s.decoy("xid_quiet")
    s.decoy("edac_ce")
    s.startup()
    at = s.rng.uniform(1500, 3000)
    s.progress(at)
    for host in s.hosts:
        s.kernel(
            host,
            at + s.rng.random() * 3,
            "LustreError: 167-0: work-OST0007-osc-ffff9c21: This client was evicted by work-OST0007; in progress operations using this service will fail.",
        )
        s.kernel(
            host,
            at + 4,
            "LustreError: 5120:0:(ldlm_resource.c:1126:ldlm_resource_complain()) work-OST0007-osc: namespace resource [0x4c1:0x0:0x0].0x0 refcount nonzero (2)",
        )
    rank = s.pick()[0]
    s.fails(
        at + 5,
        rank,
        "  File \"/work/train/data.py\", line 77, in __getitem__\n    return self.mm[offset:offset + n]\nOSError: [Errno 5] Input/output error: '/lustre/work/corpus/shard_00412.bin'",
    )
    return s.finish(
        "storage",
        ("lustre", "ost", "evict"),
        None,
        "stop",
        ("application", "gpu_hardware", "network"),
    )


def lustre_slow_save(s):
    """A checkpoint takes 40 minutes: one server answers late to every client."""
    s.decoy("link_flap", at=200)
    s.decoy("caught_oom")
    s.startup()
    at = s.rng.uniform(1500, 2200)
    s.progress(at)
    s.info(0, at + 1, "saving checkpoint at /lustre/work/ckpt/step_latest (async=False)")
    for host in s.hosts:
        for n in range(4):
            s.kernel(
                host,
                at + 110 + n * 120,
                f"Lustre: 4411:0:(client.c:2310:ptlrpc_expire_one_request()) @@@ Request sent has timed out for slow reply: [sent 1770000{n}/real 1770000{n}] req@ffff x18{n}/t0(0) o4->work-OST0012-osc@10.9.0.33@o2ib:6/4 lens 4584/448 e 0 to 1 dl",
            )
    for rank in range(0, s.world, 4):
        s.stack(
            rank,
            (
                "_write_item (torch/distributed/checkpoint/filesystem.py:311)",
                "save (torch/distributed/checkpoint/state_dict_saver.py:168)",
                "save_checkpoint (train/ckpt.py:52)",
            ),
        )
    s.watchdog(at + 20, 52_001, op="BARRIER", timeout_s=1800)
    return s.finish(
        "storage",
        ("lustre", "ost", "checkpoint", "reply"),
        None,
        "hang",
        ("application", "gpu_hardware", "network"),
    )


def nfs_gone(s):
    s.decoy("aer_corr")
    s.decoy("old_xid")
    s.startup()
    at = s.rng.uniform(1500, 2200)
    s.progress(at)
    for host in s.hosts:
        s.kernel(
            host,
            at + s.rng.random() * 20,
            "nfs: server filer-b.cluster not responding, timed out"
            if s.job % 2
            else "nfs: server filer-b.cluster not responding, still trying",
        )
        s.kernel(
            host,
            at + 140,
            f"INFO: task pt_data_worker:{s.rng.randrange(9000, 90000)} blocked for more than 122 seconds.",
        )
        s.kernel(
            host,
            at + 140.1,
            "task:pt_data_worker  state:D stack:0 flags:0x00004002 Call Trace: rpc_wait_bit_killable+0x1e/0xb0 [sunrpc] nfs4_call_sync",
        )
    s.stack(3, READING)
    s.watchdog(at + 30, 12_120)
    return s.finish(
        "storage",
        ("nfs", "filer"),
        None,
        "hang",
        ("application", "gpu_hardware", "framework", "host"),
    )


def disk_full_at_save(s):
    s.decoy("link_flap")
    s.decoy("wandb")
    s.startup()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    rank, host, _ = s.pick()
    s.info(rank, at + 1, "writing optimizer shard to /scratch/ckpt")
    s.file(
        f"nodes/{host}/df-h.txt",
        "Filesystem      Size  Used Avail Use% Mounted on\n/dev/md0         28T   28T     0 100% /scratch\n/dev/sda2       372G   41G  312G  12% /",
    )
    s.fails(
        at + 30,
        rank,
        "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 1946157120 vs 1946157008\n\nDuring handling of the above exception, another exception occurred:\nwrite failed: no free blocks remain on device /dev/md0 (ENOSPC)",
        hang=True,
    )
    return s.finish(
        "storage",
        ("disk", "full", "space", "scratch"),
        host,
        "stop",
        ("application", "framework", "network"),
    )


def quota_reached(s):
    s.decoy("nvme_polled")
    s.decoy("grad_skip")
    s.startup()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.fails(
        at + 9,
        0,
        "  File \"/work/train/ckpt.py\", line 88, in save\nOSError: [Errno 122] Disk quota exceeded: '/home/shared/ckpt/iter_0009000/mp_rank_00/model.pt'",
    )
    s.file(
        "storage/quota.txt",
        f"Disk quotas for usr {s.user}:\n      Filesystem    used   quota   limit   grace\n      /home/shared  10.0T*  10.0T   10.0T  expired",
    )
    return s.finish("storage", ("quota",), None, "stop", ("gpu_hardware", "network", "framework"))


def local_nvme(s):
    s.decoy("lustre_back", s.hosts[0])
    s.startup()
    rank, host, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.decoy("xid_quiet", s.hosts[0])
    s.kernel(
        host,
        at - 33,
        "nvme nvme2: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff",
    )
    s.kernel(host, at - 3, "nvme nvme2: Disabling device after reset failure: -19")
    s.kernel(
        host,
        at - 2.8,
        "XFS (nvme2n1): log I/O error -5, filesystem has been shut down due to log error (0x2)",
    )
    s.fails(
        at,
        rank,
        "pyarrow.lib.ArrowIOError: reading /local/cache/part-0031.arrow: device reports input/output failure",
    )
    return s.finish(
        "storage",
        ("nvme", "disk", "xfs", "local"),
        host,
        "stop",
        ("application", "gpu_hardware", "network"),
    )


def object_store_throttle(s):
    """Another product: the data come from an object store that refuses the rate."""
    s.decoy("link_flap", at=200)
    s.decoy("edac_ce")
    s.startup()
    onset = s.rng.uniform(900, 1300)
    s.end = onset + 1500
    s.progress(s.end, changes=lambda _, at: s.rng.uniform(7, 13) if at > onset else 0)
    for n in range(120):
        s.info(
            s.rng.randrange(s.world),
            onset + n * 12,
            f"data wait {s.rng.uniform(6, 14):.1f} s: GET s3://corpus/shard-{s.rng.randrange(9999):05d}.tar -> HTTP 503 SlowDown, backing off",
            "WARNING",
        )
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "storage",
        ("s3", "object", "503", "slowdown", "data"),
        None,
        "slow",
        ("gpu_hardware", "network", "framework"),
    )


def damaged_checkpoint(s):
    s.decoy("stranger_xid")
    s.decoy("edac_ce", at=-900)
    s.startup()
    rank, _, _ = s.pick()
    s.info(
        0,
        60,
        "resuming from /lustre/work/ckpt/step_41000 (written by the run that was killed during save)",
    )
    s.fails(
        70,
        rank,
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer\nwhile reading shard model-00017-of-00064.safetensors (0.71 of 2.14 GB present)",
    )
    return s.finish(
        "storage",
        ("checkpoint", "corrupt", "truncat"),
        None,
        "stop",
        ("gpu_hardware", "network", "host"),
    )


def weka_mount(s):
    s.decoy("aer_corr")
    s.decoy("nfs_ok")
    s.startup()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    for host in s.hosts:
        s.kernel(
            host,
            at,
            "wekafs: filesystem 'ai' lost quorum of backends, IO is suspended (5 of 9 reachable)",
        )
    rank = s.pick()[0]
    s.fails(
        at + 121,
        rank,
        "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/weka/ai/tokens.idx'",
    )
    return s.finish(
        "storage",
        ("weka", "mount", "backend", "filesystem", "file system", "transport endpoint"),
        None,
        "stop",
        ("application", "gpu_hardware", "network"),
    )


# scheduler


def stopped(s, at, words, *, state, code="0:15", why):
    for host in s.hosts:
        local = s.when(at).astimezone(s.zone)
        s.say(
            s.hosts.index(host) * s.gpus,
            at,
            f"slurmstepd: error: *** STEP {s.job}.0 ON {host} CANCELLED AT {local:%Y-%m-%dT%H:%M:%S} {why}***",
        )
    for rank in range(0, s.world, s.gpus):
        s.say(
            rank,
            at + 1,
            f"torch.distributed.elastic.multiprocessing.api.SignalException: Process {s.pids[rank] - 7} got signal: 15",
        )
        for other in range(rank, rank + s.gpus):
            s.say(
                rank,
                at + 0.4,
                f"W torch/distributed/elastic/multiprocessing/api.py:897] Sending process {s.pids[other]} closing signal SIGTERM",
            )
    s.remote_errors(at + 1)
    s.say(0, at + 3, "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.")
    s.end = at + 5
    s.sacct(state, code, at)
    return s.finish(
        "scheduler", words, None, "stop", ("application", "network", "gpu_hardware", "framework")
    )


def time_limit(s):
    s.decoy("link_flap")
    s.decoy("caught_oom")
    s.startup()
    s.progress(7200, step_s=20)
    s.file(
        "slurm/scontrol.txt",
        f"JobId={s.job} JobName={s.job_name}\n   RunTime=02:00:07 TimeLimit=02:00:00 TimeMin=N/A\n   JobState=TIMEOUT Reason=TimeLimit",
    )
    s.slurmctld(7205, f"Time limit exhausted for JobId={s.job}")
    return stopped(s, 7206, ("time",), state="TIMEOUT", why="DUE TO TIME LIMIT ")


def preempted(s):
    s.decoy("edac_ce")
    s.decoy("xid_quiet")
    s.startup()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.slurmctld(
        at - 0.3,
        f"preempted JobId={s.job} has been requeued to reclaim resources for JobId={s.job + 91} (qos urgent)",
    )
    return stopped(s, at, ("preempt",), state="PREEMPTED", code="0:0", why="DUE TO PREEMPTION ")


def cancelled_by_user(s):
    s.decoy("lustre_back")
    s.decoy("wandb")
    s.startup()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.slurmctld(
        at - 0.2, f"_slurm_rpc_kill_job: REQUEST_KILL_JOB JobId={s.job} uid {1000 + s.job % 900}"
    )
    return stopped(
        s, at, ("cancel", "user", "kill"), state=f"CANCELLED by {1000 + s.job % 900}", why=""
    )


def slurmd_died(s):
    """The machine is well; only its slurmd crashed, so the controller gives the node up."""
    s.decoy("nvme_polled")
    s.decoy("ctld")
    s.startup()
    _, host, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at + 298)
    s.kernel(
        host, at, "slurmd.service: Main process exited, code=killed, status=11/SEGV", "systemd[1]"
    )
    s.kernel(host, at + 0.1, "slurmd.service: Failed with result 'signal'.", "systemd[1]")
    for n in range(20):
        s.kernel(
            host, at + 15 * n, 'level=info msg="scrape finished" took=6120us', "dcgm-exporter[3301]"
        )
    s.slurmctld(at + 180, f"error: Nodes {host} not responding")
    s.slurmctld(at + 300, f"error: Nodes {host} not responding, setting DOWN")
    s.slurmctld(at + 300.2, f"Killing JobId={s.job} on failed node {host}")
    s.sinfo(host, "down*", "Not responding")
    return stopped(
        s,
        at + 301,
        ("slurmd", "node", "daemon"),
        state="NODE_FAIL",
        code="1:0",
        why="DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ",
    )


def higher_priority_workload(s):
    """Kubernetes with Kueue in place of Slurm."""
    s.slurm = False
    s.decoy("edac_ce")
    s.decoy("nfs_ok")
    s.startup()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    moment = f"{s.when(at):%Y-%m-%dT%H:%M:%SZ}"
    s.file(
        "kubernetes/events.txt",
        f"LAST SEEN             TYPE     REASON      OBJECT                          MESSAGE\n{moment}  Normal   Preempted   workload/pytorchjob-{s.job_name}   Preempted to accommodate a workload (UID: 8a1f) of higher priority in the ClusterQueue\n{moment}  Normal   Killing     pod/{s.job_name}-worker-0      Stopping container pytorch",
    )
    for rank in range(0, s.world, s.gpus):
        s.say(
            rank,
            at + 1,
            f"torch.distributed.elastic.multiprocessing.api.SignalException: Process {s.pids[rank] - 7} got signal: 15",
        )
    s.end = at + 40
    return s.finish(
        "scheduler",
        ("preempt", "priority"),
        None,
        "stop",
        ("application", "network", "gpu_hardware", "framework"),
    )


def prolog_times_out(s):
    s.decoy("stranger_xid")
    s.decoy("chrony", at=-700)
    _, host, _ = s.pick()
    s.slurmctld(61, f"error: Prolog launch failure, JobId={s.job}, node {host}")
    s.slurmctld(61.1, f"update_node: node {host} reason set to: Prolog error")
    s.kernel(
        host,
        60,
        f"error: prolog failed: job {s.job} uid 1203: script /etc/slurm/prolog.d/40-clean.sh exceeded PrologEpilogTimeout=60, rc 256:0",
        "slurmd[2210]",
    )
    s.say(
        0,
        62,
        f"srun: error: Task launch for StepId={s.job}.0 failed on node {host}: Job prolog failed\nsrun: error: Application launch failed: Job prolog failed\nsrun: Job step aborted",
    )
    s.end = 100
    s.sinfo(host, "drain", "Prolog error")
    return s.finish(
        "scheduler", ("prolog",), host, "stop", ("application", "network", "gpu_hardware")
    )


# host


def machine_killer(s):
    s.decoy("link_flap")
    s.decoy("caught_oom")
    s.startup()
    rank, host, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.kernel(
        host,
        at - 0.8,
        "pt_data_worker invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, oom_score_adj=0",
    )
    s.kernel(
        host,
        at - 0.2,
        f"Out of memory: Killed process {s.pids[rank]} (python) total-vm:412018004kB, anon-rss:198233120kB, file-rss:90112kB, shmem-rss:12kB, UID:1203 pgtables:400212kB oom_score_adj:0",
    )
    s.close(at, rank=rank, code=-9)
    s.remote_errors(at + 0.5, peer=host)
    return s.finish(
        "host", ("memory", "oom"), host, "stop", ("network", "gpu_hardware", "framework")
    )


def group_killer(s):
    """systemd-oomd and the job's control group in other words than the kernel's usual ones."""
    s.decoy("xid_quiet")
    s.decoy("edac_ce", s.hosts[0])
    s.startup()
    rank, host, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.kernel(
        host,
        at - 0.3,
        f"memory: usage 1468006400kB, limit 1468006400kB, failcnt 88112; task in /slurm/uid_1203/job_{s.job} exceeded its group's bound, victim pid {s.pids[rank]}",
    )
    s.say(
        rank,
        at + 2,
        f"slurmstepd: error: Detected 3 oom_kill events in StepId={s.job}.0. Some of the step tasks have been OOM Killed.",
    )
    s.close(at, rank=rank, code=-9)
    s.remote_errors(at + 1, peer=host)
    s.sacct("OUT_OF_MEMORY", "0:125", at)
    return s.finish(
        "host", ("memory", "oom", "cgroup"), host, "stop", ("network", "gpu_hardware", "framework")
    )


def panic_seen_by_peers(s):
    """Peers see retries exhausted, since the peer's kernel died: not the link."""
    s.decoy("link_flap", s.hosts[0])
    s.decoy("aer_corr", s.hosts[0])
    s.startup()
    _, host, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.dead[host] = at
    s.kernel(
        host,
        at,
        "mce: [Hardware Error]: CPU 87: Machine Check Exception: 5 Bank 7: be00000000a00f5",
    )
    s.kernel(host, at + 0.01, "Kernel panic - not syncing: Fatal local machine check")
    s.file(
        f"bmc/{host}-sel.txt",
        f" 41 | {s.when(at):%m/%d/%Y} | {s.when(at):%H:%M:%S} UTC | Processor CPU1 | IERR | Asserted\n 42 | {s.when(at + 80):%m/%d/%Y} | {s.when(at + 80):%H:%M:%S} UTC | System Event | OS Critical Stop | Asserted",
    )
    completion_errors(s, at + 14, host)
    s.slurmctld(at + 302, f"error: Nodes {host} not responding, setting DOWN")
    first = s.hosts.index(host) * s.gpus
    s.close(at + 25, but=range(first, first + s.gpus))
    s.sacct("NODE_FAIL", "1:0", at + 302)
    s.sinfo(host, "down*", "Not responding")
    return s.finish(
        "host",
        ("panic", "machine check", "mce", "kernel", "cpu"),
        host,
        "stop",
        ("network", "gpu_hardware", "framework", "application"),
    )


def lost_power(s):
    s.decoy("edac_ce", s.hosts[0])
    s.startup()
    _, host, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.dead[host] = at
    s.decoy("link_flap", s.hosts[0])
    moment = s.when(at)
    s.file(
        f"bmc/{host}-redfish-log.txt",
        f"{moment:%Y-%m-%dT%H:%M:%SZ} Critical PSU 3 input voltage lost\n{moment:%Y-%m-%dT%H:%M:%SZ} Critical PSU redundancy insufficient, 2 of 6 supplies available\n{moment:%Y-%m-%dT%H:%M:%SZ} Critical Chassis power state changed to Off (unexpected)",
    )
    completion_errors(s, at + 15, host)
    first = s.hosts.index(host) * s.gpus
    s.close(at + 26, but=range(first, first + s.gpus))
    s.slurmctld(at + 300, f"error: Nodes {host} not responding, setting DOWN")
    s.sinfo(host, "down*", "Not responding")
    return s.finish(
        "host", ("power", "psu", "supply"), host, "stop", ("network", "application", "framework")
    )


def driver_mismatch(s):
    s.decoy("old_xid")
    s.decoy("wandb", at=8)
    _, host, _ = s.pick()
    s.startup(complete=False)
    s.kernel(
        host,
        -40,
        "NVRM: API mismatch: the client has the version 570.133.20, but\nNVRM: this kernel module has the version 570.124.06.  Please\nNVRM: make sure that this kernel module and all NVIDIA driver\nNVRM: components have the same version.",
    )
    s.file(
        f"nodes/{host}/nvidia-smi.txt",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.133",
    )
    first = s.hosts.index(host) * s.gpus
    for rank in range(first, first + s.gpus):
        s.say(
            rank,
            40,
            "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero.",
        )
    s.close(42, rank=first)
    return s.finish(
        "host",
        ("driver", "version", "mismatch"),
        host,
        "stop",
        ("application", "network", "gpu_hardware"),
    )


def fabric_manager_off(s):
    s.decoy("link_flap", at=-2000)
    s.decoy("stranger_xid")
    _, host, _ = s.pick()
    s.startup(complete=False)
    s.kernel(
        host,
        -900,
        "nvidia-fabricmanager.service: Start request repeated too quickly; unit entered failed state",
        "systemd[1]",
    )
    s.kernel(
        host,
        -901,
        "fabric manager NVIDIA GPU driver interface version 550.90.07 don't match with driver version 550.127.05. Please update with matching NVIDIA driver package.",
        "nv-fabricmanager[3107]",
    )
    first = s.hosts.index(host) * s.gpus
    for rank in range(first, first + s.gpus):
        s.say(
            rank,
            38,
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        )
    s.close(42, rank=first)
    return s.finish(
        "host",
        ("fabric manager", "fabricmanager", "driver", "802"),
        host,
        "stop",
        ("application", "network"),
    )


def stray_process(s):
    """A scanner eats the cores of one node: its ranks arrive late, the GPUs are well."""
    s.decoy("edac_ce")
    s.decoy("grad_skip")
    s.startup()
    _, host, _ = s.pick()
    onset = s.rng.uniform(900, 1300)
    s.end = onset + 1500
    s.progress(s.end, changes=lambda _, at: 3.7 if at > onset else 0)
    s.kernel(host, onset - 2, "Started nightly malware scan of all file systems.", "systemd[1]")
    s.file(
        f"nodes/{host}/top.txt",
        "top - load average: 388.12, 371.40, 240.02\nTasks: 2210 total, 240 running\n%Cpu(s): 71.2 us, 28.6 sy,  0.0 ni,  0.1 id\n    PID USER      PR  NI    RES S  %CPU  COMMAND\n"
        + "\n".join(f"  {77100 + n} root      20   0   1.1g R  99.8  clamscan" for n in range(40)),
    )
    for other in s.hosts:
        if other != host:
            s.file(
                f"nodes/{other}/top.txt",
                "top - load average: 21.12, 20.40, 20.02\nTasks: 1710 total, 18 running\n%Cpu(s): 9.2 us, 1.6 sy,  0.0 ni,  89.1 id\n    PID USER      PR  NI    RES S  %CPU  COMMAND\n   9120 mlops     20   0   1.1g R  101.0  python",
            )
    s.file(
        "metrics/cpu.csv",
        "time,host,load1,cpu_idle_percent\n"
        + "\n".join(
            f"{s.when(onset - 300 + n * 60):%Y-%m-%dT%H:%M:%SZ},{h},{388 if h == host and n > 5 else 21},{0 if h == host and n > 5 else 89}"
            for n in range(30)
            for h in s.hosts
        ),
    )
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "host",
        ("cpu", "load", "process", "starv", "contention"),
        host,
        "slow",
        ("network", "gpu_hardware", "application", "storage"),
    )


def lockup(s):
    s.decoy("lustre_back", s.hosts[0])
    s.startup()
    rank, host, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.decoy("link_flap", s.hosts[0])
    for n in range(8):
        s.kernel(
            host,
            at + 21 + n * 28,
            f"watchdog: BUG: soft lockup - CPU#61 stuck for {22 + n * 26}s! [kworker/61:2:{s.rng.randrange(900, 4000)}]",
        )
    s.kernel(
        host,
        at + 60,
        "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks: 61-...0: (1 GPs behind) idle=9e4/1/0x4000000000000000",
    )
    s.watchdog(at, 60_123, but=(rank,))
    return s.finish(
        "host",
        ("lockup", "cpu", "stall", "kernel"),
        host,
        "hang",
        ("network", "gpu_hardware", "framework", "application"),
    )


def small_shm(s):
    s.decoy("stranger_xid")
    s.decoy("edac_ce", at=-1000)
    s.startup(complete=False)
    rank, host, _ = s.pick()
    s.file(
        f"nodes/{host}/df-shm.txt",
        "Filesystem      Size  Used Avail Use% Mounted on\nshm              64M   64M     0 100% /dev/shm",
    )
    s.nccl_line(
        rank,
        33,
        "misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-8Qd1xA to 9637892 bytes, error: No space left on device (28)",
        "WARN",
    )
    s.fails(
        34,
        rank,
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\nError while creating shared memory segment /dev/shm/nccl-8Qd1xA (size 9637888), error: No space left on device (28)",
    )
    return s.finish(
        "host",
        ("shm", "shared memory", "shared-memory"),
        host,
        "stop",
        ("network", "gpu_hardware", "application"),
    )


def locked_memory_limit(s):
    s.decoy("old_xid")
    s.decoy("chrony", at=-800)
    s.startup(complete=False)
    _, host, _ = s.pick()
    first = s.hosts.index(host) * s.gpus
    for h in s.hosts:
        s.file(
            f"nodes/{h}/ulimit-a.txt",
            f"core file size              (blocks, -c) 0\nmax locked memory           (kbytes, -l) {64 if h == host else 'unlimited'}\nopen files                          (-n) 1048576",
        )
    for rank in range(first, first + s.gpus):
        s.nccl_line(
            rank,
            32 + s.rng.random(),
            "misc/ibvwrap.cc:187 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory (12)",
            "WARN",
        )
        s.say(
            rank,
            34,
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        )
    s.close(36, rank=first)
    return s.finish(
        "host",
        ("lock", "memlock", "limit"),
        host,
        "stop",
        ("network", "gpu_hardware", "application"),
    )


STORAGE = (
    lustre_eviction,
    lustre_slow_save,
    nfs_gone,
    disk_full_at_save,
    quota_reached,
    local_nvme,
    object_store_throttle,
    damaged_checkpoint,
    weka_mount,
)
SCHEDULER = (
    time_limit,
    preempted,
    cancelled_by_user,
    slurmd_died,
    higher_priority_workload,
    prolog_times_out,
)
HOST = (
    machine_killer,
    group_killer,
    panic_seen_by_peers,
    lost_power,
    driver_mismatch,
    fabric_manager_off,
    stray_process,
    lockup,
    small_shm,
    locked_memory_limit,
)
CASES = (*STORAGE, *SCHEDULER, *HOST)
