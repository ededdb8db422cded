"""Incident bundles whose cause is the network, InfiniBand or RoCE."""


def completion_errors(
    s, at, host, *, ranks=None, status="IBV_WC_RETRY_EXC_ERR(12)", opcode="IBV_WC_SEND(0)"
):
    """Ranks that talk to `host` give up retransmitting."""
    first = s.hosts.index(host) * s.gpus
    for rank in (
        ranks
        if ranks is not None
        else [r for r in range(s.world) if not first <= r < first + s.gpus]
    ):
        s.nccl_line(
            rank,
            at + s.rng.uniform(0, 4),
            f"NET/IB: Got completion from peer {s.address(host)}<{s.rng.randrange(30000, 60000)}> with status={status} opcode={opcode} reqSize=0 vendor_err=129 (Send) localGid fe80::1 remoteGid fe80::{s.hosts.index(host) + 2:x} hca {NIC[rank % 8]}",
            "WARN",
        )
        if s.rng.random() < 0.6:
            s.say(
                rank,
                at + 5,
                "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\ntorch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
            )


NIC = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_11")


def link_flap(s):
    s.decoy("edac_ce")
    s.decoy("old_xid")
    s.startup()
    rank, host, gpu = s.pick()
    at = s.rng.uniform(1500, 4000)
    s.progress(at)
    for n in range(4):
        s.kernel(host, at + n * 9, f"mlx5_core 0000:{60 + gpu}:00.0 ens{60 + gpu}f0np0: Link down")
        s.kernel(
            host, at + n * 9 + 5, f"mlx5_core 0000:{60 + gpu}:00.0 ens{60 + gpu}f0np0: Link up"
        )
    s.nccl_line(rank, at + 1, f"NET/IB : {NIC[gpu]}:1 Got async event : port error", "WARN")
    completion_errors(
        s, at + 14, host, ranks=[r for r in range(s.world) if r % 8 == gpu and r != rank]
    )
    s.close(at + 25)
    return s.finish(
        "network", ("link", "port", "flap", "nic"), host, "stop", ("application", "gpu_hardware")
    )


def link_cut_reworded(s):
    """The switch says it, the node only loses carrier; other words than mlx5's."""
    s.decoy("aer_corr")
    s.decoy("caught_oom")
    s.startup()
    _, host, gpu = s.pick()
    at = s.rng.uniform(1500, 4000)
    s.progress(at)
    s.switch(
        "leaf03",
        at,
        f"%PORT-5-IF_DOWN: Interface Ethernet{gpu * 8} ({host} rail{gpu}) changed state to down, reason: loss of signal",
    )
    s.kernel(host, at + 0.2, f"rail{gpu}: carrier lost", "NetworkManager[1402]")
    s.kernel(
        host,
        at + 1.2,
        f"<warn> device (rail{gpu}): state change: activated -> unavailable (reason 'carrier-changed')",
        "NetworkManager[1402]",
    )
    s.watchdog(at, 41_888, timeout_s=900)
    return s.finish(
        "network",
        ("link", "port", "carrier", "cable", "interface"),
        host,
        "hang",
        ("application", "gpu_hardware", "framework"),
    )


def ib_port_errors(s):
    s.decoy("nfs_ok")
    s.decoy("xid_quiet")
    s.startup()
    _, host, gpu = s.pick()
    onset = s.rng.uniform(1000, 1400)
    s.end = onset + 1500
    s.progress(s.end, changes=lambda _, at: 3.0 * s.rng.random() + 1.6 if at > onset else 0)
    s.file(
        f"nodes/{host}/perfquery_{NIC[gpu]}.txt",
        f"# Port extended counters: Lid {s.job % 900} port 1 (CapMask: 0x5A00)\nSymbolErrorCounter:..............48213\nLinkErrorRecoveryCounter:........177\nLinkDownedCounter:...............9\nPortRcvErrors:...................51120\nPortXmitDiscards:................0\nPortXmitWait:....................88213401",
    )
    s.file(
        f"nodes/{host}/ibstat.txt",
        "\n".join(
            f"CA '{n}'\n\tCA type: MT4129\n\tFirmware version: 28.39.3004\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n\t\tRate: {200 if i == gpu else 400}\n\t\tLink layer: InfiniBand"
            for i, n in enumerate(NIC)
        ),
    )
    for other in s.hosts:
        if other != host:
            s.file(
                f"nodes/{other}/perfquery_{NIC[gpu]}.txt",
                "# Port extended counters: port 1\nSymbolErrorCounter:..............2\nLinkErrorRecoveryCounter:........0\nLinkDownedCounter:...............0\nPortRcvErrors:...................0\nPortXmitWait:....................1180",
            )
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "network",
        ("link", "symbol", "port", "rate", "cable", "ib"),
        host,
        "slow",
        ("application", "gpu_hardware", "storage"),
    )


def pfc_storm(s):
    s.decoy("edac_ce")
    s.decoy("grad_skip")
    s.startup()
    _, host, gpu = s.pick()
    onset = s.rng.uniform(1000, 1400)
    s.end = onset + 1300
    s.progress(s.end, changes=lambda _, at: 9 * s.rng.random() + 4 if at > onset else 0)
    for n in range(6):
        s.switch(
            "leaf06",
            onset + n * 200,
            f"WARNING swss#orchagent: :- doTask: queue 3 of port Ethernet{gpu * 8} is in storm state, {180_000 + n * 7919} pause frames in the window; drop action applied",
        )
        s.switch(
            "leaf06",
            onset + n * 200 + 40,
            f"NOTICE swss#orchagent: :- doTask: queue 3 of port Ethernet{gpu * 8} left storm state",
        )
    s.file(
        "switches/leaf06.lldp.txt",
        f"Capability codes: (R) Router, (B) Bridge, (O) Other\nLocalPort   RemoteDevice  RemotePortDescr\nEthernet{gpu * 8}   {host}  rail{gpu}",
    )
    s.file(
        f"nodes/{host}/ethtool-S_rail{gpu}.txt",
        "NIC statistics:\n     rx_prio3_pause: 12\n     tx_prio3_pause: 91882345\n     tx_prio3_pause_duration: 880123411\n     rx_discards_phy: 0\n     rx_out_of_buffer: 0\n     outbound_pci_stalled_wr: 7",
    )
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "network",
        ("pfc", "pause", "storm"),
        None,
        "slow",
        ("application", "gpu_hardware", "storage"),
    )


def gid_at_start(s):
    s.decoy("stranger_xid")
    s.decoy("wandb", at=15)
    s.startup(complete=False)
    _, host, _ = s.pick()
    first = s.hosts.index(host) * s.gpus
    s.file(
        f"nodes/{host}/show_gids.txt",
        "DEV     PORT INDEX GID                                     IPv4          VER  DEV\nmlx5_0  1    0     fe80:0000:0000:0000:0a88:97ff:fe10:2211               v1   rail0\nmlx5_0  1    1     fe80:0000:0000:0000:0a88:97ff:fe10:2211               v2   rail0\nn_gids_found=2",
    )
    other = s.hosts[0]
    s.file(
        f"nodes/{other}/show_gids.txt",
        f"DEV     PORT INDEX GID                                     IPv4          VER  DEV\nmlx5_0  1    0     fe80:0000:0000:0000:0a88:97ff:fe10:3311               v1   rail0\nmlx5_0  1    1     fe80:0000:0000:0000:0a88:97ff:fe10:3311               v2   rail0\nmlx5_0  1    2     0000:0000:0000:0000:0000:ffff:0a28:0b01 {s.address(other)}    v1   rail0\nmlx5_0  1    3     0000:0000:0000:0000:0000:ffff:0a28:0b01 {s.address(other)}    v2   rail0\nn_gids_found=4",
    )
    for r in range(first, first + s.gpus):
        s.nccl_line(
            r,
            33 + s.rng.random(),
            "misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_0:1, curr state INIT, next state RTR, local GID index 3, local GID ::, remote GID ::ffff:10.40.11.1",
            "WARN",
        )
        s.say(
            r,
            34.5,
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled system error (run with NCCL_DEBUG=INFO for details)\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        )
    s.remote_errors(36, but=range(first, first + s.gpus), peer=host)
    s.close(40, rank=first)
    return s.finish(
        "network", ("gid", "config", "roce", "qp"), host, "stop", ("application", "gpu_hardware")
    )


def optic_hot(s):
    s.decoy("edac_ce")
    s.startup()
    _, host, gpu = s.pick()
    at = s.rng.uniform(1500, 3000)
    s.progress(at)
    s.kernel(
        host,
        at - 2,
        f"mlx5_core 0000:{60 + gpu}:00.0: Port module event[error]: module {gpu}, Cable error, High Temperature",
    )
    s.kernel(host, at, f"mlx5_core 0000:{60 + gpu}:00.0 rail{gpu}: Link down")
    s.file(
        f"nodes/{host}/ethtool-m_rail{gpu}.txt",
        "\tIdentifier : 0x19 (OSFP 8X Pluggable Transceiver)\n\tModule temperature : 83.12 degrees C\n\tModule temperature high alarm : On\n\tRx power lane 3 : -11.8 dBm\n\tRx power low alarm (lane 3) : On",
    )
    s.decoy("lustre_back", s.hosts[0])
    completion_errors(s, at + 15, host)
    s.close(at + 24)
    return s.finish(
        "network",
        ("optic", "module", "transceiver", "cable", "link"),
        host,
        "stop",
        ("application", "gpu_hardware", "storage"),
    )


def leaf_one_rail(s):
    """A switch's forwarding fault: no link falls, one rail of many nodes is slow."""
    s.decoy("loader_slow", at=250)
    s.decoy("edac_ce")
    s.startup()
    onset = s.rng.uniform(1000, 1400)
    s.end = onset + 1300
    s.progress(s.end, changes=lambda _, at: 4.4 if at > onset else 0)
    s.switch(
        "leaf05",
        onset - 3,
        "ERR syncd#SDK: [FDB] learn event queue overflow, 4096 entries not programmed, unknown unicast flooding on Vlan105",
    )
    s.switch(
        "leaf05",
        onset + 600,
        "ERR syncd#SDK: [FDB] learn event queue overflow, 4096 entries not programmed, unknown unicast flooding on Vlan105",
    )
    s.metrics(
        lambda _, h, g, at: (
            (s.rng.uniform(5.5, 6.5) if g == 4 and at > onset else s.rng.uniform(21, 23)) * 1000
        ),
        names=("nic_tx_mb_per_s",),
    )
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "network",
        ("switch", "leaf", "rail", "fdb", "nic", "mac"),
        None,
        "slow",
        ("application", "gpu_hardware", "storage", "host"),
    )


def nic_firmware(s):
    s.decoy("nvme_polled")
    s.decoy("grad_skip")
    s.startup()
    _, host, gpu = s.pick()
    at = s.rng.uniform(1500, 3000)
    s.progress(at)
    s.kernel(
        host,
        at,
        f"mlx5_core 0000:{60 + gpu}:00.0: poll_health:815:(pid 0): device's health compromised - reached miss count",
    )
    s.kernel(
        host,
        at + 0.1,
        f"mlx5_core 0000:{60 + gpu}:00.0: print_health_info:432:(pid 0): synd 0x1: firmware internal error, ext_synd 0x8a91",
    )
    s.kernel(
        host,
        at + 60,
        f"mlx5_core 0000:{60 + gpu}:00.0: mlx5_health_try_recover:327: health recovery flow aborted, PCI reads still not working",
    )
    s.watchdog(at + 1, 15_511)
    return s.finish(
        "network",
        ("nic", "firmware", "health", "mlx5"),
        host,
        "hang",
        ("application", "gpu_hardware", "framework"),
    )


def resolver_down(s):
    s.decoy("old_xid")
    s.decoy("edac_ce", at=-1000)
    _, host, _ = s.pick()
    first = s.hosts.index(host) * s.gpus
    for r in range(first, first + s.gpus):
        s.say(
            r,
            12 + s.rng.random(),
            f"[W socket.cpp:697] [c10d] The IPv4 network addresses of ({s.hosts[0]}, 29500) cannot be retrieved (gai error: -3 - Temporary failure in name resolution).",
        )
    s.kernel(
        host,
        5,
        "Server returned error SERVFAIL, mitigating; using degraded feature set UDP for DNS server 10.0.0.53",
        "systemd-resolved[990]",
    )
    s.say(
        first,
        614,
        f"torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of ({s.hosts[0]}, 29500); giving up after 600 s",
    )
    s.say(
        0,
        612,
        f"torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. {s.world - s.gpus}/{s.world} clients joined.",
    )
    s.close(616)
    return s.finish(
        "network", ("dns", "name", "resol"), host, "stop", ("application", "gpu_hardware")
    )


def socket_fallback(s):
    s.decoy("thermal_past")
    s.decoy("caught_oom")
    _, host, _ = s.pick()
    s.startup()
    first = s.hosts.index(host) * s.gpus
    for r in range(first, first + s.gpus):
        s.nccl_line(r, 27, "NET/IB : No device found.")
        s.nccl_line(r, 27.5, f"Using network Socket over bond0 ({s.address(host)})")
    for r in set(range(s.world)) - set(range(first, first + s.gpus)):
        s.nccl_line(r, 27.5, "Using network IB")
    s.end = 2400
    s.progress(s.end, step_s=61.0)
    s.info(
        0,
        1500,
        "throughput 128 tokens/s/GPU is far below the reference 702 for this configuration since the first step",
        "WARNING",
    )
    s.sacct("RUNNING", "0:0")
    return s.finish(
        "network",
        ("socket", "ib", "rdma", "device", "fallback", "transport"),
        host,
        "slow",
        ("application", "gpu_hardware", "storage"),
    )


def mtu_differs(s):
    s.decoy("stranger_xid")
    s.decoy("edac_ce", at=-300)
    s.startup()
    _, host, _ = s.pick()
    for h in s.hosts:
        s.file(
            f"nodes/{h}/ip-link.txt",
            "\n".join(
                f"{n + 4}: rail{n}: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu {1500 if h == host else 9000} qdisc mq state UP mode DEFAULT group default qlen 1000"
                for n in range(8)
            ),
        )
    completion_errors(s, 75, host, status="IBV_WC_RETRY_EXC_ERR(12)", opcode="IBV_WC_RDMA_WRITE(1)")
    s.close(82)
    return s.finish("network", ("mtu", "config"), host, "stop", ("application", "gpu_hardware"))


def storage_plane_of_one_client(s):
    """Every storage target is lost by one node only: its own bond, not the servers."""
    s.decoy("edac_ce", s.hosts[0])
    s.decoy("xid_quiet", s.hosts[0])
    s.startup()
    rank, host, _ = s.pick()
    at = s.rng.uniform(1500, 3000)
    s.progress(at)
    s.kernel(host, at, "bond_stor: (slave ens1f0np0): link status definitely down, disabling slave")
    s.kernel(
        host, at + 0.5, "bond_stor: (slave ens1f1np1): link status definitely down, disabling slave"
    )
    s.kernel(host, at + 0.6, "bond_stor: now running without any active interface!")
    for n in range(12):
        s.kernel(
            host,
            at + 20 + n,
            f"Lustre: work-OST{n:04x}-osc-ff88: Connection to work-OST{n:04x} (at 10.9.0.{31 + n % 4}@tcp) was lost; in progress operations using this service will wait for recovery to complete",
        )
    s.stack(
        rank,
        (
            "read (torch/utils/data/_utils/fetch.py:51)",
            "__getitem__ (train/data.py:77)",
            "next_batch (train/loop.py:180)",
        ),
    )
    s.watchdog(at + 60, 7_331, but=(rank,))
    return s.finish(
        "network",
        ("bond", "link", "interface"),
        host,
        "hang",
        ("storage", "application", "gpu_hardware"),
    )


CASES = (
    link_flap,
    link_cut_reworded,
    ib_port_errors,
    pfc_storm,
    gid_at_start,
    optic_hot,
    leaf_one_rail,
    nic_firmware,
    resolver_down,
    socket_fallback,
    mtu_differs,
    storage_plane_of_one_client,
)
