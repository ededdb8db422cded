"""Lines of decoys and noise, and the GPU state, of synthetic incident bundles."""

DECOYS = {
    "link_flap": (
        "mlx5_core 0000:29:00.0 ens29f0np0: Link down",
        "mlx5_core 0000:29:00.0 ens29f0np0: Link up",
    ),
    "edac_ce": (
        "EDAC skx MC2: HANDLING MCE MEMORY ERROR: 1 CE memory read error on CPU_SrcID#1_MC#2_Chan#0_DIMM#0",
        None,
    ),
    "aer_corr": (
        "pcieport 0000:15:01.0: AER: Corrected error message received from 0000:16:00.0 (RxErr)",
        None,
    ),
    "nvme_polled": ("nvme nvme1: I/O tag 211 (a0d3) QID 7 timeout, completion polled", None),
    "lustre_back": (
        "Lustre: work-OST0011-osc-ff2e1c0: Connection to work-OST0011 (at 10.9.0.31@o2ib) was lost; in progress operations using this service will wait for recovery to complete",
        "Lustre: work-OST0011-osc-ff2e1c0: Connection restored to 10.9.0.31@o2ib (at 10.9.0.31@o2ib)",
    ),
    "nfs_ok": ("nfs: server {addr} not responding, still trying", "nfs: server {addr} OK"),
    "old_xid": (
        "NVRM: Xid (PCI:0000:{bus}:00): 31, pid={pid}, name=python3, Ch 00000013, MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 faulted @ 0x7f1c_20000000",
        None,
    ),
    "stranger_xid": (
        "NVRM: Xid (PCI:0000:{bus}:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        None,
    ),
    "xid_quiet": (
        "NVRM: Xid (PCI:0000:{bus}:00): 43, pid={pid}, name=nccl-tests, Ch 00000008",
        None,
    ),
    "caught_oom": (
        "autotune: caught CUDA out of memory for block size 256, falling back to 128",
        None,
    ),
    "wandb": ("wandb: Network error (ReadTimeout), entering retry loop.", None),
    "grad_skip": (
        "grad scaler: inf found in scaled gradients, step skipped, scale 65536 -> 32768",
        None,
    ),
    "loader_slow": ("dataloader: shard fetch took 9.4 s (retry 1 of 5 succeeded)", None),
    "ctld": ("error: Nodes {stranger} not responding", "Node {stranger} now responding"),
    "thermal_past": (
        "mce: CPU41: Package temperature above threshold, cpu clock throttled (total events = 3)",
        "mce: CPU41: Package temperature/speed normal",
    ),
    "chrony": ("chronyd[1203]: System clock was stepped by 0.812113 seconds", None),
}
NOISE = (
    ("systemd[1]", "Started Session {n} of user root."),
    (
        "kernel",
        "perf: interrupt took too long (2503 > 2500), lowering kernel.perf_event_max_sample_rate to 79000",
    ),
    (
        "kernel",
        "mlx5_core 0000:29:00.0: mlx5_cmd_out_err:808:(pid {n}): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3), syndrome (0x15c356), err(-22)",
    ),
    ("sshd[4411]", "Accepted publickey for root from 10.0.0.2 port {n} ssh2"),
    ("kernel", 'audit: type=1400 audit: apparmor="STATUS" operation="profile_replace" pid={n}'),
    ("slurmd[2210]", "launch task StepId={n}.extern request from UID:0"),
    ("kernel", "nvidia-peermem nvidia_p2p_get_pages: registered client pid {n}"),
    ("dcgm-exporter[3301]", 'level=info msg="scrape finished" took={n}us'),
)
SMI = """GPU 00000000:{bus}:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Serial Number                         : {serial}
    Performance State                     : P0
    Clocks Event Reasons
        Idle                              : Not Active
        SW Power Cap                      : Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Not Active
            HW Power Brake Slowdown       : Not Active
        SW Thermal Slowdown               : Not Active
    PCI
        Link Width
            Max                           : 16x
            Current                       : 16x
        Replays Since Reset               : 0
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable Parity     : 0
            DRAM Correctable              : {ce}
            DRAM Uncorrectable            : 0
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 0
        Pending                           : No
        Remapping Failure Occurred        : No
    Temperature
        GPU Current Temp                  : {temp} C
        GPU T.Limit Temp                  : 25 C
    GPU Power Readings
        Average Power Draw                : {watts}.10 W
        Current Power Limit               : 700.00 W
    Clocks
        SM                                : 1755 MHz
        Memory                            : 2619 MHz
"""
