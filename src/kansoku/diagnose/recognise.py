"""Recognise what one log line says: signatures, driver codes, exceptions, and plain words.

Order of trust: noise is dropped; a driver code (Xid, SXid, work completion status) is read through
the catalogue; a specific signature beats a generic one, a stronger a weaker; a Python exception
that no signature knows is the application's; last, a component word beside a fault word.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kansoku.catalog.concepts import concepts, fault_level
from kansoku.catalog.signatures import Signature, signatures
from kansoku.catalog.xid import Code, codes
from kansoku.diagnose.observation import Observation
from kansoku.model import Domain

__all__ = [
    "HANDLED_WEIGHT",
    "Recognised",
    "by_code",
    "placed",
    "progress_of",
    "recognise",
    "says_healed",
]

_XID = re.compile(r"(?<![A-Za-z])Xid\b\s*(?:\([^)\n]*\))?\s*[:=]?\s*(\d{1,3})\b", re.IGNORECASE)
_SXID = re.compile(r"SXid\b\s*(?:\([^)\n]*\))?\s*[:=]?\s*(\d{5})\b", re.IGNORECASE)
_WC_STATUS = re.compile(
    r"(?:completion|wc|status)\D{0,40}?(?:status|error)\D{0,20}?(\d{1,2})\b", re.IGNORECASE
)
# A bare 05:05 is a time of day; a PCI address has its segment, its function or the word before it.
_BDF = re.compile(
    r"((?:[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?)"
    r"|(?<=PCI:)[0-9a-fA-F]{2}:[0-9a-fA-F]{2}|\b[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d\b)"
)
_GPU_INDEX = re.compile(r"\b(?:GPU|device|cuda:)\s*#?(\d{1,2})\b", re.IGNORECASE)
_NIC = re.compile(r"\b((?:mlx5|bnxt|irdma|rxe|ib|eth|ens|enp|bond)[\w]*?\d\w*)\b")
_STORAGE_TARGET = re.compile(
    r"\b([\w-]+-(?:OST|MDT)[0-9a-fA-F]{4})|(?:server|target|bucket)\s+([\w.:/-]+)"
    # GPFS names the file system, or the disk below it.
    r"|Physical volume ([\w.-]+)|[Ff]ile ?[Ss]ystem ([\w.-]+)(?=:| (?:un)?mounted\b)"
)
_PEER = re.compile(
    r"(?:peer|remote(?: host)?|to|from)\s+((?:\d{1,3}\.){3}\d{1,3}|[a-z][\w.-]*\d)", re.IGNORECASE
)
_JOB = re.compile(r"\b(?:Job(?:Id)?|Step(?:Id)?)[ =]#?(\d+)", re.IGNORECASE)
_EXCEPTION = re.compile(
    r"(?:^|[\s:\]])((?:[A-Za-z_]\w*\.)*(?!(?:Lustre|LNet)Error)[A-Z]\w*"
    r"(?:Error|Exception|Exit))(?::|$)"
    # A class of a module, at the line's begin, as a traceback ends: whatever its name.
    r"|^(?:\S{1,24} )?((?:[a-z_]\w*\.)+[A-Z]\w*[a-z]\w*): \S"
)
# Frames and carets of a traceback say where the error passed, not what it is.
_FRAME = re.compile(
    r'^(?:[^"]{0,60}[\s\]:|])?File "[^"]+", line \d+|^\s*(?:\[\w+\]:)?\s*[\^~]+\s*$|^\s*#\d+ 0x|'
    r"^\s*frame #\d+:"
)
# A scheduler that loses a node names it: the node is what failed, the scheduler only tells.
_NODE_NAME = r"([A-Za-z][\w.-]*\d[\w.,\[\]-]*)"
_LOST_NODE = re.compile(
    rf"\bnode (?:failure|fail|crash|loss) (?:on|of)(?: node)? {_NODE_NAME}"
    rf"|\bfailure of node {_NODE_NAME}|\bon failed nodes? {_NODE_NAME}"
    rf"|\bnodes?[ :=]+{_NODE_NAME}(?: (?:is|has|was|not|went|became|marked|now))*"
    r"[ :,]+(?:not responding|responding|unresponsive|down\b|lost\b|unreachable|failed|dead"
    r"|NotReady)"
    rf"|\b(?:lost|losing) (?:contact|connection|communication) (?:with|to) (?:node|host)"
    rf" {_NODE_NAME}",
    re.IGNORECASE,
)
# Nodes are named after what they hold: gpu-a-086 is no GPU.
_HOST_NAME = re.compile(
    r"\b(?:gpu|node|dgx|hgx|host|worker|compute)(?:[-_][a-z0-9]+)*[-_]?\d{2,}[a-z]?\b"
)
# A line of progress says "reduced loss" and means no harm.
_STEPS_TELL = 0.75
# The program's own judgement of its line: told for information, or a remark to whoever wrote it.
# NCCL's WARN is its word for an error, and stays out.
_TOLD_ONLY = re.compile(
    r"^.{0,120}?(?:(?<![\w/.-])(?:INFO|DEBUG|TRACE|NOTICE)(?![\w/.-])"
    r"|^(?:\[\w+\]:)?\s*\[?[ID]\d{4} \d\d:\d\d:\d\d|level=(?:info|debug)\b)"
)
_REMARK = re.compile(
    r"\b\w*(?:Deprecat|Future|User|Runtime|Syntax|Resource)\w*Warning: |\bis deprecated\b"
    r"|\bwill be (?:removed|deprecated)\b"
)
_TOLD_WEIGHT = 0.3
# Classes that a compiler or the framework's own parts raise; the rest of them hand on what the
# user's code did.
_INTERNAL = re.compile(
    r"^(?!.*(?:Unsupported|UserError|Uncapturable|TorchRuntimeError))"
    r"(?=.*(?:\._[a-z]\w*\.|\b(?:triton|compiler\w*|codegen|mlir|llvm)\b"
    r"|\b(?:Inductor|InternalTorch|Compil|Lowering|Codegen)\w*(?:Error|Exception)))"
)
_NOT_A_NUMBER = re.compile(
    r"\b(?:nan|infs?|infinity|non-?finite)\b(?=.{0,60}\b(?:loss\w*|grad\w*|norm|forward|backward"
    r"|weights?|param\w*|activation\w*|logits?|output|tensor)\b)"
    r"|\b(?:loss\w*|grad\w*|norm|forward|backward|weights?|param\w*|activation\w*|logits?|output"
    r"|tensor|result|value)\b.{0,40}\b(?:nan|infs?|infinity|non-?finite)\b",
    re.IGNORECASE,
)
_CGROUP_OOM = re.compile(r"memory cgroup|CONSTRAINT_MEMCG|oom_memcg|task_memcg", re.IGNORECASE)
_SHARED_MEMORY = re.compile(r"\bshm\b|shared memory")
_PROGRESS = re.compile(
    r"\b(?:global[_ ]?step|train[_ ]?step|step|iteration|iter|it|batch|update)\b"
    r"[\"']?\s*[:=#\[(]?\s*(\d{1,9})(?![\d.]*\s*(?:s|ms|sec)\b)"
    r"|\[\s*(\d{1,9})\s*/\s*\d{1,9}\s*\]|\|\s*(\d{1,9})/\d{1,9}\s*\[",
    re.IGNORECASE,
)
# A value that says that nothing is wrong.
_FINE = re.compile(
    r"^\s*[A-Za-z][\w /().,%-]{1,60}?\s*:\s*(?:not active|inactive|no|none|n/?a|0(?:\.0+)?|"
    r"false|ok|good|healthy|normal)\s*$",
    re.IGNORECASE,
)
# The program met it and went on.
_HANDLED = re.compile(
    r"\bcaught\b(?! (?:signal|collective|\w+ in (?:DataLoader|replica)))|"
    r"\bfall(?:s|ing)? back\b|\bretry \d+ of \d+|"
    r"\bretry loop\b|(?<!number of )\b(?:will retry|retrying|skipped|skipping|ignored|ignoring"
    r"|polled)\b",
    re.IGNORECASE,
)
HANDLED_WEIGHT = 0.3
_HEALED = re.compile(
    r"\blink (?:is )?up\b|\brestored\b|\brecovered\b|\breconnected\b|\b(?:now|again) responding\b"
    r"|\bresponding again\b|\bback (?:online|up|in service)\b|\bgained carrier\b|"
    r"\b(?:state|status) (?:changed )?to (?:up|ok|active)\b|\bOK\s*$|\blink becomes ready\b",
    re.IGNORECASE,
)
_RESOLVED = re.compile(
    r"\b(?:corrected|recovered|restored|cleared|resolved|succe\w+|(?:0|no) errors?)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """What a line says, without who and when."""

    rule: str
    domain: Domain
    component: str
    role: str
    strength: float
    meaning: str
    action: str
    device: str | None = None
    target: str | None = None
    handled: bool = False
    """The program met it and went on."""


_ROLE_ORDER = {"noise": 0, "root": 1, "cascade": 2, "either": 3, "symptom": 4, "info": 5}


def _device(text: str, domain: Domain) -> str | None:
    if domain is Domain.GPU_HARDWARE:
        match = _BDF.search(text) or _GPU_INDEX.search(text)
    elif domain is Domain.NETWORK:
        match = _NIC.search(text)
    else:
        match = None
    return match[1] if match else None


def _target(text: str, domain: Domain) -> str | None:
    if domain is Domain.STORAGE:
        match = _STORAGE_TARGET.search(text)
        return next(g for g in match.groups() if g).rstrip(".,:") if match else None
    if domain in {Domain.NETWORK, Domain.FRAMEWORK}:
        match = _PEER.search(text)
        return match[1] if match else None
    if domain is Domain.SCHEDULER:
        match = _JOB.search(text)
        return f"job:{match[1]}" if match else None
    return None


_CODE_DOMAINS = {
    "app-first": (Domain.APPLICATION, "kernel bug", "either"),
    "app-or-driver": (Domain.APPLICATION, "kernel or driver", "either"),
    "app-or-hardware": (Domain.GPU_HARDWARE, "gpu", "either"),
    "driver-fw": (Domain.GPU_HARDWARE, "driver or firmware", "root"),
    "config": (Domain.HOST, "configuration", "root"),
    "host-config": (Domain.HOST, "configuration", "root"),
    "network-config": (Domain.NETWORK, "ib/roce config", "root"),
    "network-or-dead-peer": (Domain.NETWORK, "ib/roce", "either"),
    "peer-slow-or-dead": (Domain.NETWORK, "ib/roce", "symptom"),
    "peer": (Domain.NETWORK, "ib/roce", "symptom"),
    "cascade": (Domain.FRAMEWORK, "cleanup", "cascade"),
    "informational": (Domain.GPU_HARDWARE, "driver", "info"),
    "thermal": (Domain.GPU_HARDWARE, "thermal", "root"),
}


def _by_code(code: Code, text: str) -> Recognised:
    kind = code.responsibility
    if kind in _CODE_DOMAINS:
        domain, component, role = _CODE_DOMAINS[kind]
    elif kind.endswith("-info"):
        domain, component, role = Domain.GPU_HARDWARE, kind.split("-")[1], "info"
    else:
        domain, component, role = Domain.GPU_HARDWARE, kind.partition("-")[2], "root"
    fatal = code.fatal_to_job
    strength = 1.0 if fatal.startswith(("yes", "always")) else 0.7
    if fatal == "no":
        strength, role = 0.3, "info" if role == "root" else role
    if code.kind == "sxid" and "non-fatal" in text.lower():
        strength, role = 0.4, "symptom"
    return Recognised(
        rule=f"{code.kind}.{code.code}",
        domain=domain,
        component=component,
        role=role,
        strength=strength,
        meaning=code.meaning,
        action=code.action,
        device=_device(text, domain) or _device(text, Domain.GPU_HARDWARE),
    )


def by_code(seen: Observation, code: Code) -> Observation:
    """Return an observation with what a driver code means; what it is about stays."""
    said = _by_code(code, seen.text)
    return replace(
        seen, rule=said.rule, domain=said.domain, component=said.component, role=said.role,
        strength=min(said.strength, 0.9), meaning=said.meaning, action=said.action,
    )  # fmt: skip


def _code(text: str) -> Recognised | None:
    table = codes()
    for kind, pattern in (("sxid", _SXID), ("xid", _XID)):
        match = pattern.search(text)
        if match is not None:
            code = table.get((kind, int(match[1])))
            if code is not None:
                return _by_code(code, text)
    return None


def _completion_status(text: str) -> Recognised | None:
    match = _WC_STATUS.search(text)
    code = codes().get(("ib_wc_status", int(match[1]))) if match else None
    return None if code is None or code.code == 0 else _by_code(code, text)


def _lost_node(text: str) -> Recognised | None:
    match = _LOST_NODE.search(text)
    if match is None or re.search(r"\b(?:responding again|now responding|back)\b", text):
        return None
    name = next(group for group in match.groups() if group)
    return Recognised(
        rule="node-lost",
        domain=Domain.HOST,
        component="node lost: not responding" if "not respond" in text else "node lost",
        role="either",
        strength=0.75,
        meaning="the scheduler lost this node",
        action="look at its console, power, network and daemon",
        target=name.rstrip(".,:") if "[" not in name else None,
    )


def _by_signature(text: str, rules: Sequence[Signature]) -> Signature | None:
    found = [rule for rule in rules if rule.pattern.search(text)]
    if not found:
        return None
    noise = next((rule for rule in found if rule.role == "noise"), None)
    if noise is not None and all(rule.strength <= noise.strength for rule in found):
        return noise
    return min(found, key=lambda r: (r.generic, -r.strength, _ROLE_ORDER[r.role]))


def _by_words(text: str) -> Recognised | None:
    level = fault_level(text)
    if level == 0 or (level < _STEPS_TELL and _PROGRESS.search(text)):
        return None
    text = _HOST_NAME.sub("", text)
    hits = [(len(c.pattern.findall(text)), c) for c in concepts() if c.pattern.search(text)]
    if not hits:
        return None
    weights: dict[Domain, int] = {}
    for count, concept in hits:
        weights[concept.domain] = weights.get(concept.domain, 0) + count
    # Python files and libraries are named in every traceback; a part's name says more.
    order = sorted(
        weights,
        key=lambda d: (d in {Domain.APPLICATION, Domain.FRAMEWORK}, -weights[d]),
    )
    domain = order[0]
    concept = max((h for h in hits if h[1].domain is domain), key=lambda hit: hit[0])[1]
    strength = 0.55 * level * (0.5 if _RESOLVED.search(text) else 1.0)
    told = _TOLD_ONLY.search(text) or _REMARK.search(text)
    if told:
        strength *= _TOLD_WEIGHT
    return Recognised(
        rule=f"concept.{concept.component}",
        domain=domain,
        component=concept.component,
        role="either" if level >= 0.75 and not told else "symptom",
        strength=strength,
        meaning=f"speaks of {concept.component} and of trouble",
        action="",
        device=_device(text, domain),
        target=_target(text, domain),
    )


def recognise(text: str, *, extra: Sequence[Signature] = ()) -> Recognised | None:
    """Return what the line says, or None; ``extra`` are an operator's own signatures."""
    if _FRAME.match(text) or _FINE.search(text):
        return None
    said = _recognise(text, extra)
    if said is None or said.role in {"info", "cascade"} or not _HANDLED.search(text):
        return said
    return replace(said, role="symptom", strength=said.strength * HANDLED_WEIGHT, handled=True)


def placed(said: Recognised, text: str) -> Recognised:
    """Return what another line of the same kind says: its own device and target."""
    device = _device(text, said.domain)
    if said.rule.startswith(("xid.", "sxid.")):
        device = device or _device(text, Domain.GPU_HARDWARE)
    return replace(said, device=device, target=_target(text, said.domain))


def says_healed(text: str) -> bool:
    """Say whether the line tells that something is well again."""
    return bool(_HEALED.search(text)) and not re.search(r"\b(?:not|failed|cannot)\b", text)


def _recognise(text: str, extra: Sequence[Signature]) -> Recognised | None:
    coded = _code(text)
    if coded is not None:
        return coded
    lost = _lost_node(text)
    if lost is not None:
        return lost
    rule = _by_signature(text, extra) or _by_signature(text, signatures())
    if rule is not None and rule.role == "noise":
        return None
    if rule is None or (rule.generic and rule.domain is Domain.NETWORK):
        status = _completion_status(text) if "complet" in text.lower() else None
        if status is not None:
            return status
    if rule is not None and rule.component == "code bug":
        whose = _by_exception(text)
        if whose is not None and whose.domain is Domain.FRAMEWORK:
            return whose  # the class that wraps it tells who was at work
    if rule is not None:
        domain, component, role = rule.domain, rule.component, rule.role
        if rule.id == "host-oom-killer" and _CGROUP_OOM.search(text):
            # A cgroup's limit is the job's own request, not the node's shortage.
            domain, component = Domain.APPLICATION, "host memory limit"
        if rule.id == "app-disk-full" and _SHARED_MEMORY.search(text):
            domain, component = Domain.HOST, "shared memory"
        kills = re.search(r"Detected (\d+) oom", text) if rule.id == "sch-oom" else None
        if kills is not None and int(kills[1]) > 1:
            # Several processes at once: the node's group was emptied, not one greedy rank.
            domain, component = Domain.HOST, "host memory: whole group killed"
        return Recognised(
            rule=rule.id,
            domain=domain,
            component=component,
            role=role,
            strength=rule.strength * (0.5 if rule.role != "info" and _RESOLVED.search(text) else 1),
            meaning=rule.meaning,
            action=rule.action,
            device=_device(text, domain),
            target=_target(text, domain),
        )
    return _by_exception(text) or _by_words(text)


def _by_exception(text: str) -> Recognised | None:
    """Return what an exception says that no signature knows: whose class it is, and of what."""
    exception = _EXCEPTION.search(text)
    if exception is None:
        return None
    name = exception[1] or exception[2]
    rule, domain, component = "exception", Domain.APPLICATION, "code bug"
    if _NOT_A_NUMBER.search(text):
        rule, component = "app-nan-tensor", "numerics"
    elif _INTERNAL.search(name):
        rule, domain, component = "exception.framework", Domain.FRAMEWORK, "compiler or internals"
    return Recognised(
        rule=rule,
        domain=domain,
        component=component,
        role="either",
        strength=0.6,
        meaning=f"an uncaught {name}",
        action="look for another version of the framework, or switch the compiler off"
        if domain is Domain.FRAMEWORK
        else "hand to the user with the traceback",
    )


def progress_of(text: str) -> int | None:
    """Return the step number that a progress line states, or None."""
    match = _PROGRESS.search(text)
    if match is None or fault_level(text) >= 0.75:
        return None
    return int(match[1] or match[2] or match[3])
