"""The analyser: one window in, anomalies with evidence out.

Order matters. Hosts first (silent, starved, responder stopped), because a host that does not
answer looks like loss; then the vote over RNICs, links and switches on what is left, separately
for cluster and service; then traces decide between components that the vote cannot tell apart.
"""

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kansoku.fabric.localise import LINK, RNIC, SWITCH, Blame, component_totals, localise
from kansoku.fabric.paths import Names, PathBook
from kansoku.fabric.pinglist import SERVICE, tuple_keys
from kansoku.fabric.settings import Settings
from kansoku.fabric.summary import percentile_of
from kansoku.fabric.topology import Topology
from kansoku.fabric.window import Window

__all__ = ["Analysis", "Anomaly", "analyse"]

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
_FROM_TO = 4  # a host whose probes to others are lost this much less than those to it only listens
_SPREAD = 0.6  # share of a host's incoming probes on lossy tuples: its fault touches all peers
_NEAR = 5  # probes of neighbours that say something
_LATE = 0.3  # share of the lost that was answered after all


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One thing at fault in one window."""

    kind: str
    """``rnic``, ``link``, ``switch`` or ``host``."""
    subject: str
    """``nic:…``, ``link:A-B``, ``switch:…`` or ``node:…``."""
    scope: str
    """``cluster`` or ``service``: whose probes voted."""
    loss_ratio: float | None
    """None for a silent host."""
    votes: int
    probes: int
    evidence: tuple[str, ...]
    strong: bool
    """One window is enough."""
    confidence: float
    impact: str = "P2"
    tied_with: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What one window says."""

    start_ns: int
    end_ns: int
    verdict: str
    """``clear``, ``rnic``, ``link``, ``switch``, ``host`` or ``unknown``."""
    reason: str
    anomalies: tuple[Anomaly, ...]
    sla: dict[str, dict[str, object] | None]
    probes: int
    lost: int
    excluded: dict[str, int] = field(default_factory=dict)
    """Probes set aside, by reason."""
    coverage: dict[str, object] = field(default_factory=dict)


def analyse(window: Window, topology: Topology, book: PathBook, settings: Settings) -> Analysis:
    """Return the verdict of a window, before hysteresis."""
    rows = window.rows
    valid, excluded = _valid(window, topology)
    hosts, bad_hosts = _hosts(window, topology, valid, settings)
    ends = bad_hosts[topology.rnic_host[rows.source]] | bad_hosts[topology.rnic_host[rows.target]]
    valid &= ~ends
    components = book.components(rows.source, rows.target, rows.port)
    kinds = book.names.kinds_array()
    hop_ratio = _hop_ratios(window, topology, book)
    hop_slow = _hop_ratios(window, topology, book, slow=True)
    anomalies = list(hosts)
    seen = np.zeros(len(kinds))
    for scope, mine in (("cluster", rows.kind != SERVICE), ("service", rows.kind == SERVICE)):
        keep = valid & mine
        if not keep.any():
            continue
        part = components if keep.all() else components[:, keep]
        # What a slow host answered after the timeout was not lost by the network.
        lost = rows.lost[keep] - rows.late[keep]
        probes = rows.probes[keep].astype(np.float64)
        totals = component_totals(part, probes, len(kinds))
        seen += totals
        blames = localise(part, probes, lost, kinds, settings, totals=totals)
        found = _named(blames, book.names, topology, hop_ratio, scope, settings)
        # What loses probes was named above; queues are looked for in the probes that came back.
        answered = rows.probes[keep] - rows.lost[keep]
        slow = localise(part, answered, rows.slow[keep], kinds, settings, slow=True)
        named = {anomaly.subject for anomaly in found}
        found += [
            _congested(anomaly, settings)
            for anomaly in _named(slow, book.names, topology, hop_slow, scope, settings)
            if anomaly.subject not in named
        ]
        anomalies += found
    impacted = _impact(anomalies, window, topology, book, components, settings)
    return Analysis(
        start_ns=window.start_ns,
        end_ns=window.end_ns,
        verdict=_verdict(impacted, window),
        reason=_reason(impacted, window, topology),
        anomalies=tuple(impacted),
        sla=_sla(window, valid),
        probes=int(rows.probes.sum()),
        lost=int(rows.lost.sum()),
        excluded=excluded,
        coverage=_coverage(seen, kinds, window),
    )


def _valid(window: Window, topology: Topology) -> tuple[Bools, dict[str, int]]:
    """Return rows that say something about the network, and what was set aside."""
    rows = window.rows
    count = len(topology.rnics)
    newest = np.full(count, -1, dtype=np.int64)
    for rnic, qpn in window.qpns.items():
        newest[rnic] = qpn
    known = newest[rows.target] >= 0
    changed = np.zeros(count, dtype=bool)
    changed[list(window.changed)] = True
    gone = np.zeros(count, dtype=bool)
    gone[list(window.gone)] = True
    stale = (known & (newest[rows.target] != rows.qpn)) | changed[rows.target]
    left = gone[rows.target] & ~stale
    excluded = {
        "stale QPN": int(rows.probes[stale].sum()),
        "agent left": int(rows.probes[left].sum()),
    }
    return ~(stale | left), {reason: n for reason, n in excluded.items() if n}


def _per_host(host: npt.NDArray[np.int32], weights: npt.ArrayLike, count: int) -> Floats:
    values = np.asarray(weights, dtype=np.float64)
    return np.bincount(host, weights=values, minlength=count).astype(np.float64)


def _hosts(
    window: Window, topology: Topology, valid: Bools, settings: Settings
) -> tuple[list[Anomaly], Bools]:
    """Return host anomalies and a mask of hosts whose rows the vote must not see."""
    count = len(topology.hosts)
    bad = np.zeros(count, dtype=bool)
    found: list[Anomaly] = []
    number_of = {name: number for number, name in enumerate(topology.hosts)}
    for name, age in window.silent_hosts.items():
        bad[number_of[name]] = True
        since = "has never reported" if age is None else f"has not reported for {age:.1f} s"
        if name in window.clocks_off:
            off = window.clocks_off[name]
            way = "ahead of" if off > 0 else "behind"
            since = f"reports, but its clock is {abs(off):.0f} s {way} the controller's: set it"
        found.append(
            Anomaly(
                kind="host", subject=f"node:{name}", scope="cluster", loss_ratio=None, votes=0,
                probes=0, evidence=(f"its agent {since}",), strong=True, confidence=0.95,
            )
        )  # fmt: skip
    rows = window.rows
    if not len(rows):
        return found, bad
    keep = valid & ~bad[topology.rnic_host[rows.target]]
    source, target = topology.rnic_host[rows.source[keep]], topology.rnic_host[rows.target[keep]]
    probes, lost = rows.probes[keep], rows.lost[keep]
    to_n, to_lost = _per_host(target, probes, count), _per_host(target, lost, count)
    from_n, from_lost = _per_host(source, probes, count), _per_host(source, lost, count)
    late = _per_host(target, rows.late[keep], count)
    spread = _per_host(target, np.where(lost > 0, probes, 0), count)
    # Its neighbours on the leaf are reached over no link above: answering them acquits a host.
    near = topology.rnic_tor[rows.source[keep]] == topology.rnic_tor[rows.target[keep]]
    near_n = _per_host(target, np.where(near, probes, 0), count)
    near_lost = _per_host(target, np.where(near, lost, 0), count)
    delay = rows.responder_p50_ns[keep]
    answered = ~np.isnan(delay)
    usual = float(np.median(delay[answered])) if answered.any() else 0.0
    limit = max(float(settings.delay_ns), 10 * usual)
    slow_n = _per_host(target[answered], np.where(delay[answered] > limit, 1.0, 0.0), count)
    answered_n = _per_host(target[answered], np.ones(int(answered.sum())), count)
    with np.errstate(divide="ignore", invalid="ignore"):
        to_ratio, from_ratio = to_lost / to_n, from_lost / from_n
        enough = (to_lost >= settings.minimum_lost) & (to_ratio > settings.rnic_loss)
        one_way = (
            enough & (from_n >= 10) & (from_ratio < to_ratio / _FROM_TO)
            & (spread / to_n >= _SPREAD)
            & ((near_n < _NEAR) | (near_lost > settings.rnic_loss * near_n))
        )  # fmt: skip
        too_late = enough & (late / to_lost >= _LATE)
        slow = (answered_n > 0) & (slow_n / answered_n > 0.5) & (to_n >= 10)
    for number in np.flatnonzero((one_way | too_late | slow) & ~bad):
        mine = delay[(target == number) & answered]
        evidence = []
        if slow[number]:
            evidence.append(
                f"median responder delay {np.median(mine) / 1e6:.1f} ms, "
                f"fabric's median {usual / 1e6:.3f} ms"
            )
        if too_late[number]:
            evidence.append(
                f"{late[number]:.0f} of {to_lost[number]:.0f} lost probes were answered after "
                f"the timeout"
            )
        if one_way[number]:
            evidence.append(
                f"{to_ratio[number]:.0%} of probes to it lost from all peers, but only "
                f"{from_ratio[number]:.1%} of its own: its network works, its responder does not"
            )
        bad[number] = True
        found.append(
            Anomaly(
                kind="host", subject=f"node:{topology.hosts[number]}", scope="cluster",
                loss_ratio=float(to_ratio[number]), votes=int(to_lost[number]),
                probes=int(to_n[number]), evidence=tuple(evidence),
                strong=bool(slow[number] or to_ratio[number] > 0.5), confidence=0.9,
            )
        )  # fmt: skip
    return found, bad


_HopRatio = dict[int, tuple[int, int, int]]


def _congested(anomaly: Anomaly, settings: Settings) -> Anomaly:
    """Return the anomaly of a vote over slow probes in its own words."""
    share = anomaly.loss_ratio or 0.0
    text = (
        f"congested: {anomaly.votes} of {anomaly.probes} answered probes over it ({share:.0%}) "
        f"took more than {settings.slow_rtt_ns / 1e6:g} ms"
    )
    return replace(anomaly, loss_ratio=0.0, evidence=(text, *anomaly.evidence[1:]))


def _hop_ratios(
    window: Window, topology: Topology, book: PathBook, *, slow: bool = False
) -> _HopRatio:
    """Return, per directed link, traces over it, answers of its near and of its far switch.

    With ``slow`` an answer that took long counts as none.
    """
    counts: dict[int, list[int]] = {}
    total = len(topology.rnics)
    for source, trace in window.traces:
        known = book.known(int(tuple_keys(source, trace.target, trace.port, total)))
        if not known:
            continue
        path = book.switches_of(known)
        answers = book.hop_numbers(trace.hops)
        answers += [None] * (len(path) - len(answers))
        if any(a is not None and a != b for a, b in zip(answers, path, strict=False)):
            continue  # rerouted: it says nothing about the path before the failure
        if slow:
            late = [*trace.slow, *([False] * len(path))]
            answers = [None if late[i] else a for i, a in enumerate(answers)]
        for place, (first, second) in enumerate(itertools.pairwise(path)):
            cell = counts.setdefault(book.names.link(first, second), [0, 0, 0])
            cell[0] += 1
            cell[1] += answers[place] is not None
            cell[2] += answers[place + 1] is not None
    return {link: (cell[0], cell[1], cell[2]) for link, cell in counts.items()}


def _fall(ratios: _HopRatio, link: int) -> float | None:
    """Return how much less the far switch of a link answers than the near one; None unknown."""
    if link not in ratios or ratios[link][0] < 3:
        return None
    sent, near, far = ratios[link]
    return (near - far) / sent


@dataclass(frozen=True, slots=True)
class _Decided:
    kind: str
    subject: str
    blame: Blame
    lines: list[str]


def _decide(members: list[Blame], names: Names, ratios: _HopRatio) -> list[_Decided]:
    """Return whom a group of equal leaders comes down to; all of them where nothing decides.

    The vote cannot tell apart what the very same probes cross. Traces can: they stop, or thin
    out, at one link; at all links of a switch when it is the switch.
    """
    by_subject: dict[str, _Decided] = {}
    for blame in members:
        kind, subject = _subject(names, blame.component)
        lines = [f"{blame.votes} of {blame.probes} probes over it lost"]
        both = sum(_subject(names, other.component)[1] == subject for other in members) > 1
        if kind == "link" and not both:
            first, second = names.ends[blame.component]
            lines[0] += f", direction {names.names[first]} to {names.names[second]}"
        by_subject.setdefault(subject, _Decided(kind, subject, blame, lines))
    for decided in list(by_subject.values()):
        if decided.kind == "switch":
            cut = _cut_links(decided.blame, names, ratios)
            if len(cut) == 1:
                ((subject, why),) = cut.items()
                return [_Decided("link", subject, decided.blame, [*decided.lines, why])]
            if len(cut) > 1 and len(by_subject) > 1:
                why = f"path traces fail at it from {len(cut)} sides"
                return [replace(decided, lines=[*decided.lines, why])]
    if len(by_subject) > 1:
        falls = sorted(
            ((_subject_fall(d.subject, names, ratios), d) for d in by_subject.values()),
            key=lambda pair: -pair[0],
        )
        (best, first_one), (second_best, _) = falls[:2]
        if best >= _wanted_fall(first_one.blame) and best >= 2 * second_best:
            why = f"{best:.0%} of the path traces over it fail there"
            return [replace(first_one, lines=[*first_one.lines, why])]
    return list(by_subject.values())


def _wanted_fall(blame: Blame) -> float:
    return max(0.3 * blame.loss_ratio, 0.08)


def _subject_fall(subject: str, names: Names, ratios: _HopRatio) -> float:
    """Return the greater fall of a link's two directions: a lost answer shows on the other."""
    return max(
        (_fall(ratios, n) or 0.0 for n in names.ends if _subject(names, n)[1] == subject),
        default=0.0,
    )


def _cut_links(blame: Blame, names: Names, ratios: _HopRatio) -> dict[str, str]:
    """Return the links of a switch at which traces stop, with the evidence."""
    falls: dict[str, float] = {}
    for link, ends in names.ends.items():
        if blame.component in ends and link in ratios:
            subject = _subject(names, link)[1]
            falls[subject] = max(falls.get(subject, 0.0), _fall(ratios, link) or 0.0)
    if len(falls) < 2:
        return {}
    floor = max(_wanted_fall(blame), 0.5 * max(falls.values()))
    return {
        subject: (
            f"{fall:.0%} of the path traces over it fail there; "
            f"{names.names[blame.component]} answers its other neighbours"
        )
        for subject, fall in falls.items()
        if fall >= floor
    }


def _named(
    blames: list[Blame],
    names: Names,
    topology: Topology,
    ratios: _HopRatio,
    scope: str,
    settings: Settings,
) -> list[Anomaly]:
    """Return anomalies of the blamed components, directions of one link put together."""
    groups: dict[int, list[Blame]] = {}
    for blame in blames:
        groups.setdefault(blame.group, []).append(blame)
    found: dict[str, Anomaly] = {}
    for members in groups.values():
        decided = _decide(members, names, ratios)
        for one in decided:
            tied = tuple(sorted(other.subject for other in decided if other is not one))
            lines = [*one.lines, *([f"nothing tells it from {', '.join(tied)}"] if tied else [])]
            blame, before = one.blame, found.get(one.subject)
            anomaly = Anomaly(
                kind=one.kind, subject=one.subject, scope=scope, loss_ratio=blame.loss_ratio,
                votes=blame.votes, probes=blame.probes, evidence=tuple(lines),
                strong=blame.gain >= settings.strong_evidence,
                confidence=min(0.99, 1 - float(np.exp(-blame.gain / 12))) / (1 + 0.5 * len(tied)),
                tied_with=tied,
            )  # fmt: skip
            if before is not None:
                anomaly = replace(
                    before,
                    votes=before.votes + blame.votes,
                    probes=before.probes + blame.probes,
                    loss_ratio=max(before.loss_ratio or 0.0, blame.loss_ratio),
                    evidence=tuple(dict.fromkeys((*before.evidence, *lines))),
                    strong=before.strong or anomaly.strong,
                    tied_with=tuple(sorted({*before.tied_with, *tied})),
                )
            found[one.subject] = anomaly
    return _whole_hosts(list(found.values()), topology)


def _subject(names: Names, component: int) -> tuple[str, str]:
    kind = names.kinds[component]
    if kind == RNIC:
        return "rnic", f"nic:{names.names[component]}"
    if kind == SWITCH:
        return "switch", f"switch:{names.names[component]}"
    first, second = names.ends[component]
    return "link", "link:" + "-".join(sorted((names.names[first], names.names[second])))


def _whole_hosts(anomalies: list[Anomaly], topology: Topology) -> list[Anomaly]:
    """Turn "every RNIC of a host" into the host: RNICs on different rails do not die together."""
    total = np.bincount(topology.rnic_host, minlength=len(topology.hosts))
    of_host: dict[int, list[Anomaly]] = {}
    for anomaly in anomalies:
        if anomaly.kind == "rnic":
            rnic = topology.index[anomaly.subject.removeprefix("nic:")]
            of_host.setdefault(int(topology.rnic_host[rnic]), []).append(anomaly)
    whole = {h: part for h, part in of_host.items() if total[h] > 1 and len(part) == total[h]}
    gone = {id(a) for part in whole.values() for a in part}
    kept = [a for a in anomalies if id(a) not in gone]
    for host, part in whole.items():
        votes, probes = sum(a.votes for a in part), sum(a.probes for a in part)
        kept.append(
            Anomaly(
                kind="host", subject=f"node:{topology.hosts[host]}", scope=part[0].scope,
                loss_ratio=votes / probes, votes=votes, probes=probes,
                evidence=(f"all {len(part)} of its RNICs lose probes at once",),
                strong=any(a.strong for a in part), confidence=0.85,
            )
        )  # fmt: skip
    return kept


def _impact(
    anomalies: list[Anomaly],
    window: Window,
    topology: Topology,
    book: PathBook,
    components: npt.NDArray[np.int32],
    settings: Settings,
) -> list[Anomaly]:
    """Set P0 (a running job loses probes over it), P1 (a job uses it), P2 (no job does)."""
    service = window.rows.kind == SERVICE
    if not service.any():
        return anomalies
    mine = components[:, service]
    lost, probes = window.rows.lost[service], window.rows.probes[service]
    result = []
    for anomaly in anomalies:
        wanted = _component_numbers(anomaly, topology, book.names)
        touched = np.isin(mine, wanted).any(axis=0)
        used = int(probes[touched].sum())
        ratio = lost[touched].sum() / used if used else 0.0
        hurt = ratio > settings.link_loss or (used and window.degraded_jobs)
        result.append(replace(anomaly, impact=("P0" if hurt else "P1") if used else "P2"))
    return result


def _component_numbers(anomaly: Anomaly, topology: Topology, names: Names) -> list[int]:
    kind, name = anomaly.subject.split(":", 1)
    if kind == "node":
        host = topology.hosts.index(name)
        return np.flatnonzero(topology.rnic_host == host).tolist()
    if kind == "nic":
        return [topology.index[name]]
    if kind == "switch":
        return [names.switch(name)]
    return [n for n in names.ends if _subject(names, n)[1] == anomaly.subject]


_RANK = ("switch", "link", "rnic", "host")


def _verdict(anomalies: list[Anomaly], window: Window) -> str:
    if anomalies:
        worst = min(anomalies, key=lambda a: (a.impact, -a.votes, _RANK.index(a.kind)))
        return worst.kind
    return "clear" if len(window.rows) else "unknown"


def _reason(anomalies: list[Anomaly], window: Window, topology: Topology) -> str:
    seconds = (window.end_ns - window.start_ns) / 1e9
    if anomalies:
        return f"{len(anomalies)} anomalies in {seconds:g} s"
    if not len(window.rows):
        if window.reporting:
            return (
                f"no probe in this window: {window.reporting} of {len(topology.rnics)} RNICs "
                "report, none of which knows another one to probe (same address family)"
            )
        return "no agent reported a probe in this window"
    rows = window.rows
    return (
        f"network cleared: {int(rows.probes.sum())} probes between {window.reporting} of "
        f"{len(topology.rnics)} RNICs in {seconds:g} s, {int(rows.lost.sum())} lost, none of "
        f"them gathered on an RNIC, link, switch or host"
    )


_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99_9", 0.999))


def _sla(window: Window, valid: Bools) -> dict[str, dict[str, object] | None]:
    result: dict[str, dict[str, object] | None] = {}
    for scope, mine in (
        ("cluster", window.rows.kind != SERVICE), ("service", window.rows.kind == SERVICE),
    ):  # fmt: skip
        probes = int(window.rows.probes[mine].sum())
        if not probes:
            result[scope] = None
            continue
        network = int(window.rows.probes[mine & valid].sum())
        entry: dict[str, object] = {
            "probes": probes,
            "drop_ratio": int(window.rows.lost[mine].sum()) / probes,
            "network_drop_ratio": (
                int(window.rows.lost[mine & valid].sum()) / network if network else None
            ),
        }
        for name, histograms in (
            ("rtt_us", window.rtt), ("responder_delay_us", window.responder),
            ("prober_delay_us", window.prober),
        ):  # fmt: skip
            values = {q: percentile_of(histograms.get(scope, {}), at) for q, at in _QUANTILES}
            entry[name] = {q: None if v is None else v / 1e3 for q, v in values.items()}
        worst = int(window.rows.stamps[mine].max(initial=-1))
        entry["stamp_source"] = (None, "hardware", "kernel", "application")[worst + 1]
        result[scope] = entry
    return result


def _coverage(seen: Floats, kinds: npt.NDArray[np.int8], window: Window) -> dict[str, object]:
    """Return how well the links above the ToRs are watched; ``seen`` is probes per component."""
    links = seen[kinds == LINK]
    links = links[links > 0]
    seconds = (window.end_ns - window.start_ns) / 1e9
    return {
        "rnics": window.reporting,
        "links": len(links),
        "least_link_per_s": float(links.min() / seconds) if len(links) else None,
    }
