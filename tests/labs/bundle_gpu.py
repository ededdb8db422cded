"""Incident bundles whose cause is a GPU, NVLink or NVSwitch."""

import math

GIVEN_UP = "RuntimeError: CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"


def off_the_bus(s):
    s.decoy("link_flap")
    s.decoy("edac_ce")
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(1800, 4000)
    s.progress(at)
    s.kernel(host, at, f"NVRM: GPU at PCI:{s.pci(gpu)}: GPU-7b1e{s.job:x}-0e3a-11aa")
    s.kernel(host, at, f"NVRM: Xid (PCI:{s.pci(gpu)}): 79, GPU has fallen off the bus.")
    s.kernel(
        host,
        at + 1,
        f"NVRM: GPU {s.pci(gpu)}.0: device lost from PCIe, marking unusable [NV_ERR_GPU_IS_LOST] (0x0000000F)",
    )
    s.kernel(
        host,
        at + 4,
        f"NVRM: Xid (PCI:{s.pci((gpu + 3) % 8)}): 45, pid={s.pids[rank]}, name=python, Ch 00000009",
    )
    s.fails(at + 3, rank, GIVEN_UP)
    return s.finish(
        "gpu_hardware", ("bus", "79", "pcie", "gpu"), host, "stop", ("network", "application")
    )


def double_bit_ecc(s):
    s.decoy("aer_corr", s.hosts[0])
    s.decoy("wandb")
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(1500, 5000)
    s.progress(at)
    s.kernel(
        host,
        at,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 48, pid={s.pids[rank]}, name=python, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 6, subpartition 0.",
    )
    s.kernel(
        host,
        at + 0.1,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 63, pid={s.pids[rank]}, name=python, Row Remapper: New row marked for remapping, reset gpu to activate.",
    )
    s.fails(at + 1, rank, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered")
    s.smi(
        host,
        gpu=gpu,
        edit=(
            ("Pending                           : No", "Pending                           : Yes"),
            ("DRAM Uncorrectable            : 0", "DRAM Uncorrectable            : 1"),
        ),
    )
    return s.finish("gpu_hardware", ("ecc", "memory", "row", "48"), host, "stop", ("application",))


def contained_ecc_reworded(s):
    """No Xid text at all: an exporter's event and nvidia-smi only."""
    s.decoy("edac_ce")
    s.decoy("caught_oom")
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(1500, 4000)
    s.progress(at)
    s.kernel(
        host,
        at,
        f'level=error component=memory gpu_index={gpu} bus_id={s.pci(gpu, long=True)}.0 msg="contained HBM uncorrectable error, offending process terminated, page offlined" process={s.pids[rank]}',
        "gpu-health[2231]",
    )
    s.fails(
        at + 2,
        rank,
        "cudaErrorECCUncorrectable: an uncorrectable memory fault was signalled by the device while executing cutlass_80_tensorop_bf16",
    )
    s.smi(
        host,
        gpu=gpu,
        corrected=3,
        edit=(("DRAM Uncorrectable            : 0", "DRAM Uncorrectable            : 2"),),
    )
    return s.finish("gpu_hardware", ("ecc", "memory", "hbm"), host, "stop", ("application", "host"))


def nvlink_xid74(s):
    s.decoy("lustre_back")
    s.decoy("xid_quiet")
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(1500, 4000)
    s.progress(at)
    s.kernel(
        host,
        at,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 11(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
    )
    s.fails(
        at + 1,
        rank,
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    )
    return s.finish("gpu_hardware", ("nvlink", "74"), host, "stop", ("network", "application"))


def nvlink_blackwell(s):
    s.decoy("link_flap")
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(1500, 4000)
    s.progress(at)
    s.kernel(
        host,
        at,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 145, pid={s.pids[rank]}, RLW_REMAP Nonfatal XC1 i0 Link 03 (0x00000004 0x80000000)",
    )
    s.kernel(
        host,
        at + 0.6,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x000045c6 0x00000000 0x00000000)",
    )
    s.kernel(
        host,
        at + 2,
        f"NVRM: knvlinkUpdatePostRxDetectLinkMask: link 3 of gpu {gpu} did not come back after recovery",
    )
    s.fails(
        at + 3,
        rank,
        "ncclUnhandledCudaError: Call to CUDA function failed.\nncclCommWatch: peer mapping over MNNVL lost",
        hang=True,
    )
    return s.finish(
        "gpu_hardware", ("nvlink", "149", "145", "link"), host, "stop", ("network", "framework")
    )


def nvswitch_fatal(s):
    s.decoy("aer_corr")
    s.decoy("old_xid")
    s.startup()
    _, host, _ = s.pick()
    at = s.rng.uniform(1500, 4000)
    s.progress(at)
    s.kernel(
        host, at, "nvidia-nvswitch2: SXid (PCI:0000:87:00.0): 20034, Fatal, Link 42 LTSSM Fault Up"
    )
    s.kernel(
        host,
        at + 1,
        "[ERROR] [tid 4410] switch chip at 00000000:87:00.0 raised a fatal fault on port 42; partition of 8 GPUs is being torn down",
        "nv-fabricmanager[3107]",
    )
    first = s.hosts.index(host) * s.gpus
    for rank in range(first, first + s.gpus):
        s.say(
            rank,
            at + 2 + s.rng.random(),
            "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        )
    for gpu in range(8):
        s.kernel(
            host,
            at + 1.5,
            f"NVRM: Xid (PCI:{s.pci(gpu)}): 45, pid={s.pids[first + gpu]}, name=python, Ch 0000000{gpu}",
        )
    s.remote_errors(at + 3, but=range(first, first + s.gpus), peer=host)
    s.close(at + 5, rank=first)
    return s.finish(
        "gpu_hardware", ("nvswitch", "sxid", "switch"), host, "stop", ("network", "application")
    )


def thermal_straggler(s):
    s.decoy("loader_slow", at=400)
    s.decoy("thermal_past", s.hosts[0])
    s.startup()
    _, host, gpu = s.pick()
    onset = s.rng.uniform(1200, 2000)
    s.end = onset + 1500
    s.progress(s.end, changes=lambda _, at: 2.4 if at > onset else 0.0)
    s.metrics(
        lambda name, h, g, at: (
            {"sm_clock_mhz": 1110, "gpu_temp_c": 91, "power_w": 410}.get(name)
            if (h, g) == (host, gpu) and at > onset
            else None
        )
    )
    s.smi(
        host,
        gpu=gpu,
        edit=(
            (
                "SW Thermal Slowdown               : Not Active",
                "SW Thermal Slowdown               : Active",
            ),
            (
                "HW Thermal Slowdown           : Not Active",
                "HW Thermal Slowdown           : Active",
            ),
            (
                "GPU T.Limit Temp                  : 25 C",
                "GPU T.Limit Temp                  : -2 C",
            ),
        ),
    )
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "gpu_hardware",
        ("therm", "clock", "temperature", "throttl"),
        host,
        "slow",
        ("storage", "application"),
    )


def clock_stuck(s):
    """No throttle reason, no alarm: only one GPU's clock differs from all its peers."""
    s.decoy("loader_slow", at=500)
    s.decoy("link_flap", at=300)
    s.startup()
    _, host, gpu = s.pick()
    onset = s.rng.uniform(1000, 1500)
    s.end = onset + 1400
    s.progress(s.end, step_s=5.0, changes=lambda _, at: 4.1 if at > onset else 0.0)
    s.metrics(
        lambda name, h, g, at: (
            {"sm_clock_mhz": 810, "gpu_temp_c": 44, "power_w": 290}.get(name)
            if (h, g) == (host, gpu) and at > onset
            else None
        )
    )
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "gpu_hardware", ("clock", "gpu"), host, "slow", ("network", "storage", "application")
    )


def power_brake(s):
    s.decoy("chrony")
    s.decoy("wandb")
    s.startup()
    _, host, _ = s.pick()
    onset = s.rng.uniform(1000, 1500)
    s.end = onset + 1400
    s.progress(s.end, changes=lambda _, at: 5.0 if at > onset else 0.0)
    s.metrics(
        lambda name, h, _, at: (
            {"sm_clock_mhz": 405, "gpu_temp_c": 41, "power_w": 205}.get(name)
            if h == host and at > onset
            else None
        )
    )
    for gpu in (0,):
        s.smi(
            host,
            gpu=gpu,
            edit=(
                (
                    "HW Power Brake Slowdown       : Not Active",
                    "HW Power Brake Slowdown       : Active",
                ),
                (
                    "HW Slowdown                       : Not Active",
                    "HW Slowdown                       : Active",
                ),
            ),
        )
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "gpu_hardware",
        ("power", "brake", "slowdown", "clock"),
        host,
        "slow",
        ("network", "application"),
    )


def gsp_timeout(s):
    s.decoy("nfs_ok")
    s.decoy("edac_ce")
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(1500, 4000)
    s.progress(at)
    s.kernel(
        host,
        at,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 119, pid={s.pids[rank]}, name=python, Timeout after 45s of waiting for RPC response from GPU{gpu} GSP! Expected function 10 (FREE) (0x20801348 0x410).",
    )
    for again in range(4):
        s.kernel(
            host,
            at + 50 + again * 45,
            f"NVRM: GPU{gpu} firmware processor does not answer, rpc history follows: entry {again} function 76 sequence {again + 8801}",
        )
    s.watchdog(at + 5, 20_000 + s.job % 999, but=(rank,))
    s.kernel(
        host,
        at + 640,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 45, pid={s.pids[rank]}, name=python, Ch 0000000b",
    )
    return s.finish(
        "gpu_hardware", ("gsp", "firmware", "119"), host, "hang", ("network", "application")
    )


def context_switch_timeout(s):
    s.decoy("lustre_back")
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(1500, 4000)
    s.progress(at)
    s.kernel(
        host,
        at,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 109, pid={s.pids[rank]}, name=python, Ch 0000000c, errorString CTX SWITCH TIMEOUT, Info 0x5c018",
    )
    s.kernel(
        host,
        at + 8,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 62, 32a5 0001d6f8 00000000 20274d92 internal micro-controller halt",
    )
    s.flight((rank,), at=at)
    s.stacks_waiting()
    s.watchdog(at + 5, 31_000, but=(rank,))
    return s.finish(
        "gpu_hardware", ("62", "109", "micro", "halt", "gpu"), host, "hang", ("network", "storage")
    )


def silent_corruption(s):
    s.decoy("grad_skip", at=300)
    s.decoy("caught_oom", at=320)
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(1500, 2600)
    last = s.progress(
        at + 60, loss=lambda _, t: math.nan if t > at else 1.94 + s.rng.uniform(-0.01, 0.01)
    )
    s.info(
        rank,
        at + 61,
        f"non-finite gradient norm at step {last} on rank {rank} only; repeating the step with identical inputs",
        "WARNING",
    )
    s.info(
        rank,
        at + 68,
        f"repeat 1 on the same device ({host} cuda:{gpu}): grad norm 0.3187 (finite), first result is not reproduced",
        "ERROR",
    )
    s.info(
        rank,
        at + 75,
        f"repeat 2 on another device: grad norm 0.3187; bitwise equal to repeat 1. Input batch is clean. Suspecting the device {host} cuda:{gpu}",
        "ERROR",
    )
    s.fails(
        at + 80,
        rank,
        "RuntimeError: validation of computed result failed: transient mismatch, leaving for node replacement",
        code=16,
    )
    return s.finish(
        "gpu_hardware",
        ("corruption", "silent", "gpu", "device", "mismatch"),
        host,
        "numerics",
        ("application", "framework"),
    )


def same_gpu_three_jobs(s):
    """Xid 31 on one device below three unrelated jobs of different users."""
    s.decoy("link_flap")
    s.decoy("grad_skip")
    s.startup()
    rank, host, gpu = s.pick()
    for back, (pid, name) in zip(
        (400_000, 190_000, 51_000),
        ((7712, "python3"), (90118, "vllm"), (33107, "gmx")),
        strict=True,
    ):
        s.kernel(
            host,
            -back,
            f"NVRM: Xid (PCI:{s.pci(gpu)}): 31, pid={pid}, name={name}, Ch 00000012, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_2 faulted @ 0x7fe4_1{pid:x}000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
        )
    earlier = "\n".join(
        f"{s.job - 100 * n}|{job}|{user}|gpu|FAILED|1:0|{host}"
        for n, job, user in (
            (31, "vlm-sft", "hyamada"),
            (17, "serve-eval", "infra"),
            (5, "md-run", "chem2"),
        )
    )
    s.file(
        "slurm/earlier_jobs_of_node.txt",
        f"JobID|JobName|User|Partition|State|ExitCode|NodeList\n{earlier}",
    )
    at = s.rng.uniform(900, 2600)
    s.progress(at)
    s.kernel(
        host,
        at,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 31, pid={s.pids[rank]}, name=python, Ch 00000009, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_2 faulted @ 0x7f02_11aa0000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    )
    s.fails(at + 1, rank, "RuntimeError: CUDA error: an illegal memory access was encountered")
    return s.finish(
        "gpu_hardware", ("gpu", "31", "recur", "memory"), host, "stop", ("application",)
    )


def remap_failure(s):
    s.decoy("nvme_polled")
    s.decoy("wandb")
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(900, 2600)
    s.progress(at)
    s.kernel(
        host,
        at,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 64, pid={s.pids[rank]}, name=python, Row Remapper Error: no spare rows left in bank 0x1c",
    )
    s.kernel(
        host,
        at + 0.3,
        f"NVRM: Xid (PCI:{s.pci(gpu)}): 95, pid={s.pids[rank]}, name=python, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
    )
    s.fails(at + 1, rank, GIVEN_UP)
    s.smi(
        host,
        gpu=gpu,
        edit=(
            ("Remapping Failure Occurred        : No", "Remapping Failure Occurred        : Yes"),
        ),
    )
    return s.finish(
        "gpu_hardware",
        ("row", "remap", "memory", "ecc", "95"),
        host,
        "stop",
        ("application", "host"),
    )


def gpu_missing_at_start(s):
    s.decoy("stranger_xid")
    s.decoy("chrony", at=-500)
    _, host, gpu = s.pick()
    s.startup(complete=False)
    s.kernel(host, -300, f"NVRM: GPU {s.pci(gpu)}.0: RmInitAdapter failed! (0x62:0x40:1860)")
    s.kernel(
        host, -300, f"NVRM: GPU {s.pci(gpu)}.0: rm_init_adapter failed, device minor number {gpu}"
    )
    s.smi(host, gpus=7)
    last = s.hosts.index(host) * s.gpus + 7
    s.say(
        last,
        41,
        "torch.AcceleratorError: CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?",
    )
    s.close(44, rank=last)
    return s.finish(
        "gpu_hardware",
        ("init", "missing", "gpu", "adapter", "device"),
        host,
        "stop",
        ("application", "network"),
    )


CASES = (
    off_the_bus,
    double_bit_ecc,
    contained_ecc_reworded,
    nvlink_xid74,
    nvlink_blackwell,
    nvswitch_fatal,
    thermal_straggler,
    clock_stuck,
    power_brake,
    gsp_timeout,
    context_switch_timeout,
    silent_corruption,
    same_gpu_three_jobs,
    remap_failure,
    gpu_missing_at_start,
)
