"""A recorded node in a folder: /proc, /sys and Lustre files as a SAKURAONE-like node shows them.

Text and layout follow the kernel's documentation and drivers; numbers are chosen by hand so that
tests can expect them.
"""

from pathlib import Path

STAT = """cpu  10000 200 3000 50000 400 50 60 7 0 0
cpu0 5000 100 1500 25000 200 25 30 3 0 0
cpu1 5000 100 1500 25000 200 25 30 4 0 0
intr 1234 0 0
ctxt 99
btime 1795960000
processes 4321
procs_running 3
procs_blocked 1
"""
MEMINFO = """MemTotal:       1000 kB
MemFree:         200 kB
MemAvailable:    700 kB
Buffers:          50 kB
Cached:          300 kB
SwapTotal:       100 kB
SwapFree:         60 kB
SReclaimable:     50 kB
HugePages_Total:       0
"""
PRESSURE = """some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000
full avg10=0.00 avg60=0.00 avg300=0.00 total=250000
"""
DISKSTATS = """ 259       0 nvme0n1 100 0 2000 50 200 0 4000 80 0 90 130 0 0 0 0 0 0
 259       1 nvme0n1p1 90 0 1800 45 190 0 3900 75 0 85 120 0 0 0 0 0 0
   7       0 loop0 1 0 8 0 0 0 0 0 0 0 0
"""
NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo:  100       1    0    0    0     0          0         0      100       1    0    0    0     0
  eth0: 5000      50    1    2    0     0          0         0     7000      70    3    4    0     0       0          0
"""
MOUNTSTATS = """device proc mounted on /proc with fstype proc
device fs1:/home mounted on /home with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2
\tage:\t100
\tbytes:\t10 20 0 0 4096 8192 1 2
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 0 0 1 0 24 100 100 0 0 0 0 0 0
\tper-op statistics
\t        READ: 10 12 0 1000 5000 3 400 450 0
\t       WRITE: 20 20 0 9000 2000 5 600 700 0
\t     BROKEN: x
"""
LUSTRE_STATS = """snapshot_time             1795960000.123456789 secs.nsecs
read_bytes                10 samples [bytes] 4096 1048576 5242880 27487790694
write_bytes               4 samples [bytes] 100 400 1000 340000
open                      7 samples [usecs] 10 90 350 20000
close                     7 samples [regs]
"""


def import_text(target: str, state: str) -> str:
    return f"""import:
    name: {target}-osc-ffff9f3a1c2d4800
    target: {target}_UUID
    state: {state}
    connect_flags: [ write_grant, server_lock ]
"""


MLX5_COUNTERS = {
    **{f"{way}_prio{p}_pause": 0 for way in ("rx", "tx") for p in range(8)},
    **{f"{way}_prio{p}_pause_duration": 0 for way in ("rx", "tx") for p in range(8)},
    **{f"{way}_prio{p}_bytes": 1000 for way in ("rx", "tx") for p in range(8)},
    **{f"rx_prio{p}_discards": 0 for p in range(8)},
    "rx_discards_phy": 0, "tx_discards_phy": 0, "link_down_events_phy": 1,
    "rx_corrected_bits_phy": 5, "rx_pcs_symbol_err_phy": 0, "rx_symbol_err_phy": 0,
    "rx_crc_errors_phy": 0, "rx_out_of_buffer": 0, "tx_pause_storm_warning_events": 0,
    "tx_pause_storm_error_events": 0, "rx_packets": 1, "ch0_events": 1,
    **{f"rx{q}_packets": 1 for q in range(64)},
}  # fmt: skip
RDMA_COUNTERS = {
    "port_xmit_data": 1000, "port_rcv_data": 2000, "port_xmit_packets": 10,
    "port_rcv_packets": 20, "symbol_error": 0, "link_error_recovery": 0, "link_downed": 0,
    "port_rcv_errors": 0, "port_xmit_discards": 0, "port_xmit_wait": 0,
    "unicast_xmit_packets": 10, "unicast_rcv_packets": 20,
}  # fmt: skip
RDMA_HW_COUNTERS = {
    "out_of_sequence": 0, "out_of_buffer": 0, "duplicate_request": 0, "packet_seq_err": 0,
    "implied_nak_seq_err": 0, "local_ack_timeout_err": 0, "rnr_nak_retry_err": 0,
    "np_cnp_sent": 0, "np_ecn_marked_roce_packets": 0, "rp_cnp_handled": 0, "rp_cnp_ignored": 0,
    "rx_write_requests": 0, "rx_read_requests": 0, "rx_atomic_requests": 0,
    "roce_adp_retrans": 0, "roce_adp_retrans_to": 0, "roce_slow_restart": 0,
    "req_cqe_error": 0, "resp_cqe_error": 0, "rx_icrc_encapsulated": 0, "lifespan": 10,
}  # fmt: skip


def write(root: Path, path: str, text: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def make_node(root: Path, *, nics: int = 10, lustre_targets: int = 4) -> Path:
    """Write the tree; return its root."""
    write(root, "/proc/stat", STAT)
    write(root, "/proc/meminfo", MEMINFO)
    write(root, "/proc/vmstat", "pgfault 500\npgmajfault 20\noom_kill 2\n")
    write(root, "/proc/loadavg", "1.50 1.20 1.00 2/300 999\n")
    write(root, "/proc/uptime", "1000.25 4000.00\n")
    for kind in ("cpu", "memory", "io"):
        write(root, f"/proc/pressure/{kind}", PRESSURE)
    write(root, "/proc/diskstats", DISKSTATS)
    write(root, "/proc/net/dev", NET_DEV)
    write(root, "/proc/mounts", "/dev/nvme0n1p1 / ext4 rw 0 0\nfs1:/home /home nfs4 rw 0 0\n")
    write(root, "/proc/self/mountstats", MOUNTSTATS)
    for number in range(2):
        folder = f"/sys/devices/system/node/node{number}"
        write(
            root,
            f"{folder}/meminfo",
            f"Node {number} MemFree: 100 kB\nNode {number} MemUsed: 400 kB\n",
        )
        write(
            root, f"{folder}/numastat", "numa_hit 70\nnuma_miss 5\nnuma_foreign 6\nother_node 7\n"
        )
    for number in range(nics):
        port = f"/sys/class/infiniband/mlx5_{number}/ports/1"
        write(root, f"{port}/state", "4: ACTIVE\n")
        write(root, f"{port}/rate", "400 Gb/sec (4X NDR)\n")
        for name, value in RDMA_COUNTERS.items():
            write(root, f"{port}/counters/{name}", f"{value}\n")
        for name, value in RDMA_HW_COUNTERS.items():
            write(root, f"{port}/hw_counters/{name}", f"{value}\n")
        net = root / f"sys/class/net/ens{number}f0"
        write(root, f"/sys/class/net/ens{number}f0/operstate", "up\n")
        write(root, f"/sys/class/net/ens{number}f0/speed", "400000\n")
        (net / "device").mkdir()
        (net / "device" / "driver").symlink_to("../../../bus/pci/drivers/mlx5_core")
    write(root, "/proc/fs/lustre/llite/scratch-ffff9f3a1c2d4800/stats", LUSTRE_STATS)
    for name, kilobytes in (("kbytestotal", 4000), ("kbytesfree", 3000), ("kbytesavail", 2500)):
        write(root, f"/proc/fs/lustre/llite/scratch-ffff9f3a1c2d4800/{name}", f"{kilobytes}\n")
    for number in range(lustre_targets):
        target = f"scratch-OST{number:04x}"
        folder = f"/proc/fs/lustre/osc/{target}-osc-ffff9f3a1c2d4800"
        write(root, f"{folder}/import", import_text(target, "FULL"))
    zone = "/sys/class/powercap/intel-rapl:0"
    write(root, f"{zone}/energy_uj", "262000000000\n")
    write(root, f"{zone}/max_energy_range_uj", "262143328850\n")
    write(root, f"{zone}/name", "package-0\n")
    return root
