"""Whose file it is: a host in a file's name, or in the prefix that NCCL gives its lines."""

import re

from kansoku.formats.job_log import host_in_path
from kansoku.model import Domain

__all__ = ["addresses_of_nodes", "device_domain", "host_of_nccl", "node_of_name"]

_NODE_FOLDER = re.compile(r"(?:^|/)(?:nodes?|hosts?)/([A-Za-z][\w.-]*\d[\w.-]*)/")
# Outputs that are taken on one node, which the name tells: what is left of it is the node.
_TOOL = re.compile(
    r"(?<![A-Za-z0-9])(?:dmesg|kern(?:el)?|kmsg|messages|syslog|journal(?:ctl)?|console|sel|switch"
    r"|nvidia[_-]?smi|nv[_-]?smi|dcgmi?(?:[_-]diag)?|ibstat(?:us)?|ibv_devinfo|ethtool|mlxlink"
    r"|rdma(?:[_-]stat(?:istics?)?)?|show_gids|lspci|ipmi(?:tool)?|slurmd|df|top|free|ulimit"
    r"|pip[_-]freeze)"
    r"(?:[_-](?:q|S|vv+|iso))?(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"[._/ ]+|(?<![A-Za-z0-9])-|-(?![A-Za-z0-9])")
_HOST = re.compile(r"[A-Za-z][A-Za-z0-9-]*\d[A-Za-z0-9-]*")
# Devices, jobs and models carry digits as hosts do.
_NO_HOST = re.compile(
    r"(?:mlx5?|ib|eth|ens?|enp|bond|rdma|hca|nic|nvme|sd|cuda|gpu|device|rank|job|jobid|step|task|run"
    r"|try|attempt|part|day|week|hour|min|log|v|t|r|q)-?\d[a-z0-9]*"
    r"|a100?|a800|h20|h[128]00|g?b[123]00|l4|l40s?|v100|mi\d{3}x?|bz2",
    re.IGNORECASE,
)
_NCCL_PREFIX = re.compile(r"^\s*(?:\d+: )?([A-Za-z][\w.-]*):\d+:\d+ (?:\[\d+\] |NCCL )")

_NCCL_ADDRESS = re.compile(
    r"([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] NCCL INFO (?:Bootstrap : Using|NET/\w+ : Using.*OOB)"
    r" [\w.-]+:((?:\d{1,3}\.){3}\d{1,3})<\d+>"
)
# What a device's or metric's name tells of its kind; GPUs alone go by a bare number, or by a PCI
# address with a domain of eight digits, as nvidia-smi writes it.
_KINDS = (
    (
        Domain.GPU_HARDWARE,
        re.compile(r"(?i)(?<![a-z])(?:gpu|nvidia|dcgm|cuda|amdgpu|rocm|hw\.gpu)|^\d{1,2}$"
                   r"|^[0-9a-f]{8}:[0-9a-f]{2}:"),
    ),
    (
        Domain.NETWORK,
        re.compile(r"(?i)(?<![a-z])(?:mlx\d|hca|nic|rdma|ib|eth|ens|enp|eno|bond|bnxt|efa|irdma)"
                   r"(?![a-z]{2})"),
    ),
    (Domain.STORAGE, re.compile(r"(?i)(?<![a-z])(?:nvme|disk|sd[a-z]|raid)")),
)  # fmt: skip


def device_domain(*names: str | None) -> Domain | None:
    """Return whose trouble a device's own link is, by the first name that tells; None: none does.

    The device at the link's end comes first: its edge connector, its riser and its slot are swapped
    with it. A link of unknown devices is the host's.
    """
    for name in names:
        for domain, pattern in _KINDS:
            if name and pattern.search(name):
                return domain
    return None


def node_of_name(name: str) -> str | None:
    """Return the node that a file's name or folder tells."""
    folder = _NODE_FOLDER.search(name)
    if folder is not None:
        return folder[1]
    known = host_in_path(name)
    base = name.rpartition("/")[2]
    if not _TOOL.search(base):
        return known
    parts = _BETWEEN.split(_TOOL.sub(" ", base))
    hosts = {p for p in parts if _HOST.fullmatch(p) and (p == known or not _NO_HOST.fullmatch(p))}
    # A part that holds the known name says more of it: "pod2-n3" before "n3".
    whole = [h for h in hosts if known is not None and known in h]
    if len(whole) == 1:
        return whole[0]
    return hosts.pop() if known is None and len(hosts) == 1 else known


def host_of_nccl(line: str) -> str | None:
    """Return the host of ``host:pid:tid [device] NCCL ...``."""
    match = _NCCL_PREFIX.match(line)
    return match[1] if match else None


def addresses_of_nodes(text: str) -> dict[str, str]:
    """Return ``{address: node}`` as NCCL prints it when it starts; peers are named by address."""
    return {address: node for node, address in _NCCL_ADDRESS.findall(text)}
