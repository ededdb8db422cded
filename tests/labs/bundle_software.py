"""Incident bundles of the application and the framework, healthy jobs, and undecidable ones."""

import math

from tests.labs.bundle_scene import DOMAINS

STEP = '  File "/work/train/loop.py", line 214, in train_step'


# application


def device_memory(s):
    s.decoy("link_flap")
    s.decoy("old_xid")
    s.startup()
    rank = s.pick()[0]
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.fails(
        at,
        rank,
        f"{STEP}\n    loss.backward()\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.14 GiB. GPU {rank % 8} has a total capacity of 79.11 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.07 GiB memory in use. Of the allocated memory 74.18 GiB is allocated by PyTorch, and 2.61 GiB is reserved by PyTorch but unallocated.",
    )
    return s.finish(
        "application",
        ("memory", "oom"),
        None,
        "stop",
        ("gpu_hardware", "network", "host", "framework"),
    )


def device_memory_jax(s):
    s.decoy("edac_ce", at=-700)
    s.decoy("nvme_polled", at=-2500)
    s.startup(complete=False)
    for rank in range(s.world):
        s.say(
            rank,
            95 + s.rng.random(),
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 91268055040 bytes in the BFC arena of the accelerator.",
        )
    s.close(98)
    return s.finish(
        "application",
        ("memory", "oom", "exhaust"),
        None,
        "stop",
        ("gpu_hardware", "network", "host"),
    )


def missing_key(s):
    s.decoy("link_flap")
    s.decoy("xid_quiet")
    s.startup()
    rank = s.pick()[0]
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.fails(
        at,
        rank,
        f"Traceback (most recent call last):\n{STEP}\n    tokens = self.table[sample['lang']]\nKeyError: 'yue'",
        hang=s.job % 2 == 0,
    )
    return s.finish(
        "application",
        ("key", "exception", "code", "error"),
        f"rank {rank}",
        "stop",
        ("gpu_hardware", "network", "host", "framework"),
    )


def own_exception_class(s):
    """An exception the user defined: no catalogue can know its name."""
    s.decoy("lustre_back")
    s.decoy("stranger_xid")
    s.startup()
    rank = s.pick()[0]
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.fails(
        at,
        rank,
        f"Traceback (most recent call last):\n{STEP}\n    self.curriculum.advance(step)\n  File \"/work/train/curriculum.py\", line 61, in advance\n    raise StageExhausted(f'stage {{self.stage}} has no samples left')\ntrain.curriculum.StageExhausted: stage 3 has no samples left",
    )
    return s.finish(
        "application",
        ("exception", "code", "error", "stage", "python"),
        f"rank {rank}",
        "stop",
        ("gpu_hardware", "network", "host", "storage"),
    )


def label_out_of_range(s):
    s.decoy("edac_ce")
    s.decoy("link_flap")
    s.startup()
    rank = s.pick()[0]
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    lines = "\n".join(
        f'../aten/src/ATen/native/cuda/Indexing.cu:1369: indexSelectLargeIndex: block: [{n},0,0], thread: [{n * 7 % 64},0,0] Assertion `ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of bounds"` failed.'
        for n in range(30)
    )
    s.kernel(
        s.host(rank),
        at + 1,
        f"NVRM: Xid (PCI:{s.pci(rank % 8)}): 43, pid={s.pids[rank]}, name=python, Ch 00000008",
    )
    s.fails(
        at,
        rank,
        f"{lines}\n{STEP}\nRuntimeError: CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    )
    return s.finish(
        "application",
        ("assert", "index", "data", "input"),
        None,
        "stop",
        ("gpu_hardware", "network", "host", "framework"),
    )


def wrong_shape(s):
    s.decoy("stranger_xid")
    s.decoy("chrony", at=-900)
    s.startup()
    for rank in range(s.world):
        s.say(
            rank,
            55 + s.rng.random() * 2,
            f"Traceback (most recent call last):\n{STEP}\nRuntimeError: Error(s) in loading state_dict for Transformer:\n\tsize mismatch for embed.weight: copying a param with shape torch.Size([64000, 5120]) from checkpoint, the shape in current model is torch.Size([65024, 5120]).",
        )
    s.close(60)
    return s.finish(
        "application",
        ("shape", "size", "checkpoint", "code", "mismatch"),
        None,
        "stop",
        ("gpu_hardware", "network", "host", "storage"),
    )


def module_absent(s):
    s.decoy("old_xid")
    s.decoy("link_flap", at=-2000)
    for rank in range(s.world):
        s.say(
            rank,
            9 + s.rng.random(),
            "Traceback (most recent call last):\n  File \"/work/train/main.py\", line 4, in <module>\n    from flash_attn_3 import flash_attn_func\nModuleNotFoundError: No module named 'flash_attn_3'",
        )
    s.close(12)
    return s.finish(
        "application",
        ("import", "module", "environment", "package"),
        None,
        "stop",
        ("gpu_hardware", "network", "host", "storage"),
    )


def bad_kernel_everywhere(s):
    """The same fault on many devices of several nodes in one job: the new kernel, not the GPUs."""
    s.decoy("edac_ce")
    s.decoy("lustre_back")
    s.startup()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    for rank in range(0, s.world, 3):
        late = at + s.rng.uniform(0, 0.4)
        s.kernel(
            s.host(rank),
            late,
            f"NVRM: Xid (PCI:{s.pci(rank % 8)}): 13, pid={s.pids[rank]}, name=python, Graphics SM Warp Exception on (GPC {rank % 7}, TPC {rank % 9}, SM 1): Out Of Range Address"
            if rank % 2
            else f"NVRM: Xid (PCI:{s.pci(rank % 8)}): 31, pid={s.pids[rank]}, name=python, Ch 00000009, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_{rank % 9} faulted @ 0x7f02_{rank:04x}0000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
        )
        s.say(
            rank,
            late + 0.1,
            '  File "/work/train/kernels/fused_rope.py", line 40, in forward\ntorch.AcceleratorError: CUDA error: an illegal memory access was encountered',
        )
    s.close(at + 3)
    return s.finish(
        "application",
        ("kernel", "illegal", "memory access", "code", "address"),
        None,
        "stop",
        ("gpu_hardware", "network", "host"),
    )


def nan_from_data(s):
    s.decoy("edac_ce")
    s.decoy("thermal_past")
    s.startup()
    at = s.rng.uniform(1500, 2600)
    last = s.progress(
        at + 90, loss=lambda _, t: math.nan if t > at else 1.9 + s.rng.uniform(-0.02, 0.02)
    )
    s.info(
        0,
        at + 91,
        f"step {last}: loss is nan on all data-parallel replicas; batch from shard web-00871 holds 3 sequences of length 0",
        "ERROR",
    )
    s.info(
        0,
        at + 99,
        "step repeated on other devices: nan again, bit for bit; result is reproducible",
        "ERROR",
    )
    s.fails(at + 100, 0, "train.errors.NonFiniteLoss: aborting after 5 non-finite steps")
    return s.finish(
        "application",
        ("nan", "numeric", "data", "loss"),
        None,
        "numerics",
        ("gpu_hardware", "network", "host"),
    )


def one_rank_still_evaluates(s):
    s.decoy("link_flap")
    s.decoy("aer_corr")
    s.startup()
    rank = s.pick()[0]
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.flight((rank,), at=at)
    s.stacks_waiting(but=(rank,))
    s.stack(
        rank,
        (
            "generate_samples (train/evaluate.py:118)",
            "evaluate (train/evaluate.py:44)",
            "main (train.py:83)",
        ),
    )
    s.watchdog(at, 40_220, but=(rank,))
    return s.finish(
        "application",
        ("rank", "evaluat", "collective", "code", "diverg", "missing"),
        f"rank {rank}",
        "hang",
        ("gpu_hardware", "network", "host", "storage"),
    )


def shorter_data(s):
    s.decoy("edac_ce")
    s.decoy("wandb")
    s.startup()
    rank = s.pick()[0]
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.info(rank, at + 1, "epoch 2 done: 18203 batches (iterator exhausted), leaving training loop")
    s.flight((rank,), at=at)
    s.stacks_waiting(but=(rank,))
    s.stack(rank, ("wait (threading.py:331)", "join (train/ckpt.py:19)", "finish (train.py:99)"))
    s.watchdog(at + 2, 18_204, but=(rank,))
    return s.finish(
        "application",
        ("data", "batch", "rank", "uneven", "collective", "iterator", "missing"),
        f"rank {rank}",
        "hang",
        ("gpu_hardware", "network", "host", "storage"),
    )


def rotating_collector(s):
    """Pauses that wander over the ranks: Python's collector, no node's fault."""
    s.decoy("edac_ce")
    s.decoy("link_flap")
    s.startup()
    onset = 700.0
    s.end = 2600
    s.progress(s.end, changes=lambda _, at: s.rng.choice((0, 1.4, 1.7)) if at > onset else 0)
    rows = []
    for n in range(300):
        slow = s.rng.randrange(s.world)
        at = onset + n * 6
        rows += [
            f"{s.when(at):%Y-%m-%dT%H:%M:%SZ},{n + 900},{r},{s.rng.uniform(1.4, 1.7) if r == slow else s.rng.uniform(0.01, 0.03):.3f}"
            for r in range(s.world)
        ]
        if n % 3 == 0:
            s.info(
                slow,
                at,
                f"gc: generation 2 collection took {s.rng.uniform(1.3, 1.7):.2f} s, 41220918 objects tracked",
                "DEBUG",
            )
    s.file("metrics/host_wait.csv", "time,step,rank,host_stall_s\n" + "\n".join(rows))
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "application",
        ("garbage", "gc", "collect", "jitter", "pause"),
        None,
        "slow",
        ("gpu_hardware", "network", "storage", "host"),
    )


def long_sequences(s):
    s.decoy("edac_ce")
    s.decoy("aer_corr")
    s.startup()
    onset = s.rng.uniform(900, 1300)
    s.end = onset + 1400
    s.progress(s.end, changes=lambda _, at: s.rng.uniform(1, 5) if at > onset else 0)
    rows = []
    for n in range(120):
        for r in range(s.world):
            tokens = s.rng.lognormvariate(9.6, 0.7 if n > 40 else 0.02)
            rows.append(f"{n + 3000},{r},{tokens:.0f},{tokens * tokens / 4e7 + 2.0:.3f}")
    s.file(
        "metrics/rank_steps.csv", "step,rank,longest_sequence_tokens,compute_s\n" + "\n".join(rows)
    )
    s.info(
        0,
        onset,
        "switching data mixture to long-context phase: sequences are packed without balancing across ranks",
    )
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "application",
        ("sequence", "imbalance", "data", "balanc"),
        None,
        "slow",
        ("gpu_hardware", "network", "storage", "host"),
    )


# framework


def order_differs(s):
    """Two ranks sent other collectives than their peers: seen in the dumps alone."""
    s.decoy("link_flap")
    s.decoy("xid_quiet")
    s.startup()
    rank, _, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    frames = [
        {
            "name": "_reduce_scatter_bucket",
            "filename": "/opt/venv/lib/python3.11/site-packages/torch/distributed/fsdp/_runtime_utils.py",
            "line": 861,
        }
    ]
    s.flight(
        (),
        at=at,
        ops=("nccl:_reduce_scatter_base",),
        other={rank: "nccl:_all_gather_base"},
        frames=frames,
    )
    s.watchdog(at, 22_190, op="_REDUCE_SCATTER_BASE")
    return s.finish(
        "framework",
        ("collective", "mismatch", "order", "desync", "diverg"),
        f"rank {rank}",
        "hang",
        ("gpu_hardware", "network", "host", "storage"),
    )


def library_versions_mixed(s):
    s.decoy("stranger_xid")
    s.decoy("edac_ce", at=-400)
    _, host, _ = s.pick()
    s.startup(complete=False)
    first = s.hosts.index(host) * s.gpus
    s.nccl_line(
        first,
        32,
        "bootstrap.cc:113 NCCL WARN Mismatched NCCL version detected : rank 0 22304 rank 8 21805",
        "WARN",
    )
    for r in range(first, first + s.gpus):
        s.say(
            r,
            33,
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\ntorch.distributed.DistBackendError: peers run different releases of the communication library",
        )
    s.close(36, rank=first)
    return s.finish(
        "framework", ("version", "nccl"), None, "stop", ("gpu_hardware", "network", "storage")
    )


def port_taken(s):
    s.decoy("old_xid")
    s.decoy("link_flap", at=-1500)
    s.say(
        0,
        6,
        "[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 98 - Address already in use).",
    )
    s.say(
        0,
        6.2,
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: true, code: -98, name: EADDRINUSE, message: address already in use",
    )
    for rank in range(s.gpus, s.world, s.gpus):
        s.say(
            rank,
            607,
            "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.",
        )
    s.close(610, rank=0)
    return s.finish(
        "framework",
        ("port", "address", "rendezvous"),
        s.hosts[0],
        "stop",
        ("gpu_hardware", "network", "storage"),
    )


def library_crash(s):
    s.decoy("lustre_back")
    s.decoy("edac_ce")
    s.startup()
    rank, host, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.kernel(
        host,
        at,
        f"pt_nccl_watchdg[{s.pids[rank]}]: segfault at 48 ip 00007f1c2a0911d4 sp 00007f1a33ffe9b0 error 4 in libnccl.so.{s.nccl.split('+')[0]}[7f1c2a000000+a400000]",
    )
    s.say(
        rank,
        at + 0.1,
        "Fatal Python error: Segmentation fault\n\nThread 0x00007f1a (most recent call first):\n  <no Python frame>",
    )
    s.close(at + 1, rank=rank, code=-11)
    s.remote_errors(at + 1, peer=host)
    return s.finish(
        "framework",
        ("nccl", "segfault", "segmentation", "crash", "library"),
        None,
        "stop",
        ("gpu_hardware", "network", "storage"),
    )


def compiler_lock(s):
    """A rank waits in the compiler's own lock: library code, no user frame does anything."""
    s.decoy("edac_ce")
    s.decoy("grad_skip")
    s.startup()
    rank, _, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.info(
        rank,
        at,
        "torch._dynamo: recompiling function forward, reason: tensor 'x' size mismatch at index 1. expected 8192, actual 8064",
        "WARNING",
    )
    s.flight((rank,), at=at)
    s.stacks_waiting(but=(rank,))
    s.stack(
        rank,
        (
            "acquire (filelock/_api.py:332)",
            "load (torch/_inductor/codecache.py:2310)",
            "compile_fx_inner (torch/_inductor/compile_fx.py:711)",
            "_call_user_compiler (torch/_dynamo/output_graph.py:1460)",
        ),
    )
    s.watchdog(at, 70_551, but=(rank,))
    return s.finish(
        "framework",
        ("compil", "inductor", "lock", "dynamo", "rank"),
        f"rank {rank}",
        "hang",
        ("gpu_hardware", "network", "host", "storage"),
    )


def backend_internal(s):
    s.decoy("aer_corr", at=-700)
    s.decoy("nfs_ok", at=-2500)
    s.startup(complete=False)
    for rank in range(s.world):
        s.nccl_line(
            rank,
            32 + s.rng.random(),
            "graph/search.cc:1128 NCCL WARN Could not find a path for pattern 4, falling back to simple order; internal invariant broken (nChannels 0)",
            "WARN",
        )
        s.say(
            rank,
            34,
            "ncclInternalError: Internal check failed.\nLast error:\nthis is a defect of the library or memory corruption, with tuner plugin libnccl-tuner.so v3",
        )
    s.close(37)
    return s.finish(
        "framework",
        ("nccl", "internal", "library", "tuner"),
        None,
        "stop",
        ("gpu_hardware", "network", "storage", "application"),
    )


# healthy


def healthy(s, decoys, *, state="COMPLETED", end=2400.0):
    for kind in decoys:
        s.decoy(kind)
    s.startup()
    s.end = end
    s.progress(end - 30)
    if state == "COMPLETED":
        for rank in range(0, s.world, s.gpus):
            s.info(rank, end - 20, "training finished, exiting")
    s.sacct(state, "0:0")
    return s.finish("none", (), None, "none", DOMAINS)


def well_with_old_faults(s):
    return healthy(s, ("old_xid", "stranger_xid", "edac_ce", "chrony"))


def well_with_healed_links(s):
    return healthy(s, ("link_flap", "lustre_back", "nfs_ok", "ctld"), state="RUNNING")


def well_with_warnings(s):
    return healthy(s, ("caught_oom", "wandb", "grad_skip", "loader_slow", "aer_corr"))


def well_after_closing_signals(s):
    """A finished job whose launcher stops its helpers, as it always does."""
    for rank in range(0, s.world, s.gpus):
        s.say(
            rank,
            2398,
            f"W torch/distributed/elastic/multiprocessing/api.py:897] Sending process {s.pids[rank]} closing signal SIGTERM",
        )
    return healthy(s, ("nvme_polled", "thermal_past"))


def well_with_metrics(s):
    s.end = 2400
    s.metrics(lambda *_: None)
    for host in s.hosts:
        s.smi(host, corrected=5)
    return healthy(s, ("edac_ce", "xid_quiet"), state="RUNNING")


# undecidable


def all_wait_for_all(s):
    """Every rank entered the same collective and it never ended: nothing else was collected."""
    s.decoy("old_xid")
    s.startup()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.flight((), at=at)
    s.watchdog(at, 33_100)
    return s.finish("unknown", (), None, "hang", ("scheduler", "storage", "host"))


def killed_by_nobody(s):
    s.decoy("stranger_xid")
    s.decoy("link_flap")
    s.startup()
    rank, _, _ = s.pick()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.close(at, rank=rank, code=-9)
    s.remote_errors(at + 1, peer=s.host(rank))
    return s.finish("unknown", (), None, "stop", ("gpu_hardware", "network", "storage"))


def slow_without_reason(s):
    s.decoy("edac_ce")
    s.decoy("loader_slow", at=350)
    s.startup()
    onset = s.rng.uniform(900, 1300)
    s.end = onset + 1500
    s.progress(s.end, changes=lambda _, at: 1.9 if at > onset else 0)
    s.sacct("RUNNING", "0:0")
    return s.finish("unknown", (), None, "slow", ("scheduler", "gpu_hardware"))


def log_ends(s):
    """The output stops in the middle and nothing was collected after it."""
    s.decoy("old_xid")
    s.decoy("lustre_back")
    s.startup()
    at = s.rng.uniform(1500, 2600)
    s.progress(at)
    s.remote_errors(at)
    s.close(at + 4)
    return s.finish("unknown", (), None, "stop", ("gpu_hardware", "storage", "scheduler"))


APPLICATION = (
    device_memory,
    device_memory_jax,
    missing_key,
    own_exception_class,
    label_out_of_range,
    wrong_shape,
    module_absent,
    bad_kernel_everywhere,
    nan_from_data,
    one_rank_still_evaluates,
    shorter_data,
    rotating_collector,
    long_sequences,
)
FRAMEWORK = (
    order_differs,
    library_versions_mixed,
    port_taken,
    library_crash,
    compiler_lock,
    backend_internal,
)
HEALTHY = (
    well_with_old_faults,
    well_with_healed_links,
    well_with_warnings,
    well_after_closing_signals,
    well_with_metrics,
)
UNDECIDABLE = (all_wait_for_all, killed_by_nobody, slow_without_reason, log_ends)
CASES = (*APPLICATION, *FRAMEWORK, *HEALTHY, *UNDECIDABLE)
