"""Texts that tools print of devices: nvidia-smi -q, ibstat, ibv_devinfo, lspci -vv, ethtool, df.

All are read the same way: a line that begins a device, indented ``key: value`` lines under
headings. Facts of several devices and nodes are compared: the one that differs from all others is
told. A few facts need no peers: a current width below the width in the same text, a port that is
down, a reason that is active.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import polars as pl

from kansoku.diagnose.measures import MEASURE_COLUMNS
from kansoku.diagnose.names import device_domain
from kansoku.diagnose.observation import Observation
from kansoku.model import Domain

__all__ = ["DeviceFact", "compare_facts", "facts_of_text", "measures_of_facts"]

_DEVICE = re.compile(
    r"^\s*(?:GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)|GPU (\d+):"
    r"|(?:CA|hca_id|device)[: ]\s*'?([\w.-]+)'?\s*$"
    r"|((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]) \S"
    r"|(?:Settings for|NIC statistics for|Interface) ([\w.@-]+):?\s*$"
    r"|(\d+: )?([a-z][\w.-]*\d[\w.@-]*): (?:flags=|<))"
)
_PAIR = re.compile(
    r"^(\s*)([A-Za-z][\w /().,%\[\]-]{0,60}?)\s*(?::|=)\s+(\S.*?)\s*$|"
    r"^(\s*)([A-Za-z_][\w .]{1,60}?):\s*(\S.*?)\s*$"
)
_HEADING = re.compile(r"^(\s*)([A-Za-z][\w /().'-]{1,60}?)\s*:?\s*$")
_NUMBER = re.compile(r"^[-+]?\d[\d.]*")
_ULIMIT = re.compile(r"^([a-z][a-z /-]{3,40}?)\s+\((?:[\w ]+, )?-\w\)\s+(\S+)\s*$")
_SHM = re.compile(r"^\S+\s+([\d.]+[KMGT]?i?B?)\s.*\s/dev/shm\s*$")
_IOMMU = re.compile(r"\b((?:intel_|amd_)?iommu)=(\S+)")
# Facts that must agree among equal nodes.
_CONFIGURATION = re.compile(
    r"version|driver|firmware|fw|vbios|mtu|kernel|gid|iommu|acs|memlock|nofile|ulimit|locked|shm|"
    r"governor|persistence|ecc mode|mig|compute mode|addressing|hugepage|tuned|numa|nccl|cuda|"
    r"link layer|transport|max (?:rd|read)|relaxed|pfc|dscp|trust|bios|cmdline|open files",
    re.IGNORECASE,
)
_OWN = re.compile(
    r"serial|uuid|guid|mac|address|addr|pid|time|uptime|date|hostname|node name|lid|"
    r"index|minor|id$|bus|process|used|free|usage",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFact:
    """One ``key: value`` of one device."""

    node: str | None
    device: str | None
    key: str
    """With its headings."""
    value: str
    source: str
    kind: str = ""
    """``gpu``, ``nic`` or ``disk`` where the text names the device's class."""


# A narrow link is first the trouble of the device at its end.
_LINK_DOMAINS = {
    "gpu": Domain.GPU_HARDWARE, "nic": Domain.NETWORK, "disk": Domain.STORAGE,
}  # fmt: skip
_CLASSES = (
    ("gpu", re.compile(r"3D controller|VGA|Display controller|Processing accelerators")),
    ("nic", re.compile(r"Ethernet controller|Infiniband controller|Network controller")),
    ("disk", re.compile(r"Non-Volatile memory|NVMe|RAID bus|SATA")),
)


def _link_domain(fact: DeviceFact) -> Domain:
    """Return whose trouble a device's link is, by its class, else its name, else the host's."""
    return _LINK_DOMAINS.get(fact.kind) or device_domain(fact.device) or Domain.HOST


def _plain_facts(line: str) -> list[tuple[str, str]]:
    """Return facts of tools that write neither colon nor equals sign: ulimit, df, cmdline."""
    limit = _ULIMIT.match(line)
    if limit is not None:
        return [(f"ulimit {limit[1].strip()}", limit[2])]
    shm = _SHM.match(line)
    if shm is not None:
        return [("shm size", shm[1])]
    return [(f"cmdline {key}", value) for key, value in _IOMMU.findall(line)]


def facts_of_text(lines: Iterable[str], *, node: str | None, name: str) -> list[DeviceFact]:
    """Return every pair of a text, with its device and headings."""
    device: str | None = None
    kind = ""
    stack: list[tuple[int, str]] = []
    found = []
    for number, line in enumerate(lines, start=1):
        for key, value in _plain_facts(line):
            source = f"{name}:{number}"
            found.append(DeviceFact(node=node, device=None, key=key, value=value, source=source))
        begins = _DEVICE.match(line)
        if begins is not None:
            device = next((g for g in begins.groups()[:5] if g), begins[7])
            stack = []
            kind = next((name for name, words in _CLASSES if words.search(line)), "")
            if "mtu" in line and (mtu := re.search(r"\bmtu[ :=]+(\d+)", line)):
                found.append(
                    DeviceFact(
                        node=node, device=device, key="mtu", value=mtu[1], source=f"{name}:{number}"
                    )
                )
            continue
        pair = _PAIR.match(line)
        if pair is not None:
            indent, key, value = (
                (pair[1], pair[2], pair[3]) if pair[2] else (pair[4], pair[5], pair[6])
            )
            while stack and stack[-1][0] >= len(indent):
                stack.pop()
            path = " ".join([*(h for _, h in stack[-3:]), key])
            found.append(
                DeviceFact(
                    node=node,
                    device=device,
                    key=path,
                    value=value,
                    source=f"{name}:{number}",
                    kind=kind,
                )
            )
            continue
        heading = _HEADING.match(line)
        if heading is not None and line.strip():
            while stack and stack[-1][0] >= len(heading[1]):
                stack.pop()
            stack.append((len(heading[1]), heading[2]))
    return found


def measures_of_facts(facts: Sequence[DeviceFact]) -> pl.DataFrame:
    """Return the numbers among the facts, as a snapshot."""
    rows = []
    for fact in facts:
        number = _NUMBER.match(fact.value)
        word = fact.value.lower()
        if number is not None:
            try:
                value = float(number[0])
            except ValueError:
                continue
        elif word in {"active", "yes"}:
            value = 1.0
        elif word in {"not active", "no", "none"}:
            value = 0.0
        else:
            continue
        rows.append((fact.key, fact.node, fact.device, None, None, None, value))
    return pl.DataFrame(rows, schema=MEASURE_COLUMNS, orient="row")


def _observation(
    fact: DeviceFact,
    rule: str,
    domain: Domain,
    component: str,
    strength: float,
    text: str,
    role: str = "root",
) -> Observation:
    return Observation(
        rule=rule, text=text, source=fact.source, kind="other", domain=domain, component=component,
        role=role, strength=strength, meaning="", action="", node=fact.node, device=fact.device,
    )  # fmt: skip


def _switched_off(facts: Sequence[DeviceFact]) -> set[tuple[str | None, str | None]]:
    """Return the ports that nobody uses: disabled by hand, and up on no node."""
    states = [f for f in facts if f.device and f.key.lower().endswith("state")]
    used = {f.device for f in states if re.match(r"(?:\d+: )?(?:active|linkup)", f.value.lower())}
    disabled = {(f.node, f.device) for f in states if "disabled" in f.value.lower()}
    return {(node, device) for node, device in disabled if device not in used}


_BAD_STATE = re.compile(
    r"^(?:\d+: )?(down|polling|disabled|init\w*|linkerrorrecovery|port_down|port_init)"
)


def _of_port(fact: DeviceFact, key: str, value: str, *, off: bool) -> list[Observation]:
    """Return that a port is down; ``off``: it was switched off, and nobody uses it."""
    text = f"{fact.key}: {fact.value}"
    found = []
    if re.search(r"(phys\w* )?state$", key) and _BAD_STATE.search(value.replace("'", "")):
        strength, role = (0.3, "symptom") if off else (0.8, "root")
        found.append(_observation(fact, "port-down", Domain.NETWORK, "link", strength, text, role))
    if "link detected" in key and value == "no":
        found.append(_observation(fact, "port-down", Domain.NETWORK, "link", 0.8, text))
    return found


def _of_pcie(fact: DeviceFact, key: str, value: str) -> list[Observation]:
    """Return that lspci calls a link downgraded."""
    if not ("lnksta" in key and "downgraded" in value and "width" in value):
        return []
    narrow = "(downgraded)" in value.partition("width")[2]
    # Idle links lower their speed, never their width.
    strength, role = (0.75, "root") if narrow else (0.3, "symptom")
    text = f"{fact.key}: {fact.value}"
    return [_observation(fact, "pcie-degraded", _link_domain(fact), "pcie", strength, text, role)]


def _of_gpu(fact: DeviceFact, key: str, value: str) -> list[Observation]:
    """Return that rows cannot be remapped, or that a GPU slows itself down."""
    text = f"{fact.key}: {fact.value}"
    found = []
    remaps = re.search(r"remapping failure|pending", key) and re.search(r"remap|page|row", key)
    if remaps and value == "yes":
        found.append(_observation(fact, "gpu-remap-fail", Domain.GPU_HARDWARE, "memory", 0.8, text))
    if re.search(r"(hw|thermal|power brake)", key) and "slowdown" in key and value == "active":
        found.append(
            _observation(fact, "gpu-hwslow", Domain.GPU_HARDWARE, "thermal or power", 0.75, text)
        )
    return found


_SIDES = re.compile(r"\b(max|maximum|current|device current|device max|host max)\b")


def _narrow_links(facts: Iterable[DeviceFact]) -> list[Observation]:
    """Return the links that are narrower now than the same text says they could be."""
    widths: dict[tuple[str | None, str | None, str], dict[str, DeviceFact]] = defaultdict(dict)
    for fact in facts:
        key = fact.key.lower()
        if re.search(r"link (width|gen)|pcie generation|\bwidth\b|\bgen\b", key):
            base = " ".join(_SIDES.sub("", key).split())
            widths[fact.node, fact.device, base]["max" if "max" in key else "current"] = fact
    found = []
    for both in widths.values():
        if set(both) != {"max", "current"} or "width" not in both["current"].key.lower():
            continue
        now, most = (_NUMBER.match(both[side].value) for side in ("current", "max"))
        if now and most and float(now[0]) < float(most[0]):
            fact = both["current"]
            text = f"{fact.key} {fact.value}, {both['max'].value} possible"
            found.append(_observation(fact, "pcie-degraded", _link_domain(fact), "pcie", 0.8, text))
    return found


def _alone(facts: Sequence[DeviceFact]) -> list[Observation]:
    """Return what single facts say."""
    found = []
    switched_off = _switched_off(facts)
    for fact in facts:
        key, value = fact.key.lower(), fact.value.lower()
        found += _of_port(fact, key, value, off=(fact.node, fact.device) in switched_off)
        found += _of_pcie(fact, key, value)
        found += _of_gpu(fact, key, value)
    return found + _narrow_links(facts)


def _domain_of(key: str) -> tuple[Domain, str]:
    text = key.lower()
    if re.search(r"mtu|gid|link layer|pfc|dscp|trust|fw_ver|firmware|port|hca|transport", text):
        return Domain.NETWORK, "configuration"
    if re.search(r"nccl|torch", text):
        return Domain.FRAMEWORK, "version mix"
    return Domain.HOST, "configuration"


def _of_two(key: str, by_node: dict[str, list[DeviceFact]]) -> Observation:
    """Return that two nodes differ; which of them is right is not known."""
    domain, component = _domain_of(key)
    (one, ours), (other, theirs) = sorted(by_node.items())
    values = [", ".join(sorted({f.value for f in facts})) for facts in (ours, theirs)]
    text = f"{key}: {values[0]} on {one}, {values[1]} on {other}"
    seen = _observation(ours[0], "odd-configuration", domain, component, 0.3, text, "either")
    return replace(seen, node=None, device=None)


def _odd(facts: Sequence[DeviceFact]) -> list[Observation]:
    """Return configuration in which one or two nodes differ from all others."""
    values: dict[str, dict[str, list[DeviceFact]]] = defaultdict(lambda: defaultdict(list))
    for fact in facts:
        if fact.node and _CONFIGURATION.search(fact.key) and not _OWN.search(fact.key):
            values[fact.key][fact.node].append(fact)
    found = []
    for key, by_node in values.items():
        told = {n: tuple(sorted({f.value for f in items})) for n, items in by_node.items()}
        if len(told) == 2 and len(set(told.values())) == 2:
            found.append(_of_two(key, by_node))
        if len(by_node) < 3:
            continue
        counts = Counter(told.values())
        usual, many = counts.most_common(1)[0]
        odd = [n for n, value in told.items() if value != usual]
        if not odd or many < 2 or len(odd) > max(1, len(told) // 4):
            continue
        for node in odd:
            domain, component = _domain_of(key)
            fact = next((f for f in by_node[node] if f.value not in usual), by_node[node][0])
            text = f"{key}: {fact.value} here, {', '.join(usual)} on the {many} others"
            found.append(
                _observation(fact, "odd-configuration", domain, component, 0.55, text, "either")
            )
    return found


def _missing_devices(facts: Sequence[DeviceFact]) -> list[Observation]:
    """Return nodes that list fewer GPUs or ports than all others."""
    kinds: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for fact in facts:
        if fact.node and fact.device:
            tool = re.sub(r"\d+", "#", fact.source.rpartition(":")[0].rpartition("/")[2])
            kinds[tool][fact.node].add(fact.device)
    found = []
    for by_node in kinds.values():
        if len(by_node) < 3:
            continue
        counts = Counter(len(devices) for devices in by_node.values())
        usual, many = counts.most_common(1)[0]
        for node, devices in by_node.items():
            if len(devices) < usual and many >= 2:
                fact = next(f for f in facts if f.node == node and f.device in devices)
                gpu = any(re.fullmatch(r"\d+|[0-9A-Fa-f]{8}:.*", d) for d in devices)
                found.append(
                    Observation(
                        rule="device-missing",
                        text=f"{len(devices)} devices, {usual} on the others",
                        source=fact.source, kind="other", component="missing", role="root",
                        domain=Domain.GPU_HARDWARE if gpu else Domain.NETWORK, strength=0.7,
                        meaning="a device is not seen any more", action="", node=node,
                    )
                )  # fmt: skip
    return found


def compare_facts(facts: Sequence[DeviceFact]) -> list[Observation]:
    """Return what the facts say alone and against each other."""
    return [*_alone(facts), *_odd(facts), *_missing_devices(facts)]
