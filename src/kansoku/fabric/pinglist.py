"""Who probes whom, from which port, how often: the whole fabric's plan as arrays.

The plan is a pure function of topology, settings and the hour, so every controller of a cluster
makes the same one, and a restarted controller continues it.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kansoku.fabric.ecmp import FIRST_PORT, PORTS, smallest_k
from kansoku.fabric.settings import Settings
from kansoku.fabric.topology import Topology

__all__ = ["INTER_TOR", "KINDS", "SERVICE", "TOR_MESH", "Plan", "make_plan", "tuple_keys"]

TOR_MESH, INTER_TOR, SERVICE = 0, 1, 2
KINDS = ("tor_mesh", "inter_tor", "service")
_PARTS = 5  # a fifth of the tuples is renewed per rotation
_HALF = 7  # bits: a port number is 14

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Tuples sorted by source; one row each."""

    source: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]
    port: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    interval_s: npt.NDArray[np.float32]
    """Mean time between two probes of the tuple."""
    offsets: npt.NDArray[np.int64]
    """``(rnics + 1,)``: rows of source r are ``offsets[r]:offsets[r + 1]``."""
    by_target: npt.NDArray[np.int64]
    """Rows sorted by target: whose ACK paths an RNIC traces."""
    target_offsets: npt.NDArray[np.int64]
    k: int
    """Tuples per ToR pair."""
    peers: int
    """ToRs that each ToR probes; all others unless thinned."""

    def __len__(self) -> int:
        return len(self.source)


def _mix(values: Ints, salt: int) -> npt.NDArray[np.uint64]:
    """Return 64 well-mixed bits of each value (splitmix64)."""
    offset = np.uint64((salt * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64) + offset
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _permuted_ports(number: Ints, pair: Ints, seed: int) -> npt.NDArray[np.int32]:
    """Return a source port for each number: for one pair, distinct numbers give distinct ports.

    A four-round Feistel network over 14 bits keyed by the pair: a bijection, so no set of ports
    has to be kept, and not linear, so it does not resonate with a switch's CRC hash.
    """
    mask = np.int64((1 << _HALF) - 1)
    key = _mix(pair, seed).astype(np.int64)
    left, right = (number >> _HALF) & mask, number & mask
    for turn in range(4):
        mixed = _mix(right + (key << np.int64(8)), seed + turn + 1)
        left, right = right, left ^ ((mixed >> np.uint64(20)).astype(np.int64) & mask)
    return (FIRST_PORT + (left << _HALF) + right).astype(np.int32)


def tuple_keys(
    source: npt.ArrayLike, target: npt.ArrayLike, port: npt.ArrayLike, rnics: int
) -> Ints:
    """Return one integer per (source, target, port), ordered by source, then target."""
    first = np.asarray(source, dtype=np.int64) * rnics + np.asarray(target, dtype=np.int64)
    return first * PORTS + (np.asarray(port, dtype=np.int64) - FIRST_PORT)


def _order_by(*columns: npt.NDArray[np.integer]) -> Ints:
    """Return the stable order by columns of non-negative numbers, the first one most significant.

    In passes of 16 bits, which NumPy sorts by radix: four times as fast as sorting tuple keys.
    """
    order = np.arange(len(columns[0]))
    for column in reversed(columns):
        for shift in range(0, int(column.max(initial=0)).bit_length(), 16):
            digits = (column[order] >> shift).astype(np.uint16)
            order = order[np.argsort(digits, kind="stable")]
    return order


def make_plan(topology: Topology, settings: Settings, *, time_s: float = 0.0) -> Plan:
    """Return the tuples of cluster monitoring at a time (Unix seconds)."""
    turn = int(time_s // settings.rotation_s)
    mesh = _tor_mesh(topology, settings, turn)
    inter, k, peers = _inter_tor(topology, settings, turn)
    source, target, port, interval = (
        np.concatenate([a, b]) for a, b in zip(mesh, inter, strict=True)
    )
    kind = np.repeat([TOR_MESH, INTER_TOR], [len(mesh[0]), len(inter[0])]).astype(np.int8)
    count = len(topology.rnics)
    order = _order_by(source, target, port)
    source, target, kind = source[order], target[order], kind[order]
    interval = _bounded(source, interval[order], count, settings.probes_per_s)
    return Plan(
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        port=port[order].astype(np.int32),
        kind=kind,
        interval_s=interval.astype(np.float32),
        offsets=np.searchsorted(source, np.arange(count + 1)),
        by_target=_order_by(target),
        target_offsets=np.concatenate([[0], np.cumsum(np.bincount(target, minlength=count))]),
        k=k,
        peers=peers,
    )


_Rows = tuple[Ints, Ints, npt.NDArray[np.int32], npt.NDArray[np.float64]]


def _tor_mesh(topology: Topology, settings: Settings, turn: int) -> _Rows:
    order, offsets = topology.by_tor
    sources, targets, intervals = [], [], []
    for start, end in pairwise(offsets.tolist()):
        members = order[start:end].astype(np.int64)
        size = len(members)
        if size < 2:
            continue
        a, b = np.divmod(np.arange(size * size), size)
        keep = a != b
        sources.append(members[a[keep]])
        targets.append(members[b[keep]])
        intervals.append(np.full(int(keep.sum()), (size - 1) / settings.tor_mesh_per_s))
    if not sources:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty.astype(np.int32), empty.astype(np.float64)
    source, target = np.concatenate(sources), np.concatenate(targets)
    pair = source * len(topology.rnics) + target
    number = np.full(len(pair), turn // _PARTS % PORTS, dtype=np.int64)
    return source, target, _permuted_ports(number, pair, settings.seed), np.concatenate(intervals)


def _shifts(topology: Topology, peers: int) -> Ints:
    """Return which ToRs a ToR probes, as distances in the list: the same in-degree for all.

    Where peers are thinned, ToRs of the same rail come first: traffic of a rail-optimised fabric
    stays on its rail.
    """
    count = len(topology.tors)
    all_shifts = np.arange(1, count)
    if peers >= count - 1:
        return all_shifts
    rails = len(set(topology.tor_rail.tolist())) if topology.rail_optimised else 1
    same = all_shifts[all_shifts % max(rails, 1) == 0] if rails > 1 else all_shifts[:0]
    same = (
        same[np.unique(np.linspace(0, len(same) - 1, min(peers, len(same))).astype(int))]
        if len(same)
        else same
    )
    other = np.setdiff1d(all_shifts, same)
    room = peers - len(same)
    picked = other[np.unique(np.linspace(0, len(other) - 1, room).astype(int))] if room else []
    return np.sort(np.concatenate([same, picked]).astype(np.int64))


def _inter_tor(topology: Topology, settings: Settings, turn: int) -> tuple[_Rows, int, int]:
    order, offsets = topology.by_tor
    sizes = np.diff(offsets).astype(np.int64)
    tors = len(topology.tors)
    k = smallest_k(topology.parallel_paths, settings.coverage)
    room = settings.tuples_per_rnic * max(int(np.median(sizes)), 1) // k
    peers = min(tors - 1, max(room, 1))
    shift = _shifts(topology, peers) if peers > 0 else np.zeros(0, dtype=np.int64)
    first = np.repeat(np.arange(tors), len(shift))
    second = (first + np.tile(shift, tors)) % tors
    used = (sizes[first] > 0) & (sizes[second] > 0)
    first, second = first[used], second[used]
    pair = np.repeat(first * tors + second, k)
    slot = np.tile(np.arange(k), len(first))
    # Slot j is renewed when the turn reaches j's fifth: 20 % of all tuples each turn.
    generation = (turn + _PARTS - 1 - slot % _PARTS) // _PARTS
    number = slot + k * (generation % (PORTS // k))
    a, b = np.repeat(first, k), np.repeat(second, k)
    chance = _mix(pair * k + slot, settings.seed + 17 * 1000 + 1)
    source = order[offsets[a] + (slot + pair) % sizes[a]]
    target = order[offsets[b] + (chance % sizes[b].astype(np.uint64)).astype(np.int64)]
    # A link carries, per direction, the probes of its own side and the ACKs to the other side's.
    tor_rate = settings.link_per_s * topology.parallel_paths / 2
    interval = np.full(len(pair), k * max(len(shift), 1) / tor_rate)
    rows = (
        source.astype(np.int64),
        target.astype(np.int64),
        _permuted_ports(number, pair, settings.seed + 7),
        interval,
    )
    return rows, k, len(shift)


def _bounded(
    source: Ints, interval: npt.NDArray[np.float64], count: int, limit: float
) -> npt.NDArray[np.float64]:
    rate = np.bincount(source, weights=1 / interval, minlength=count)
    factor = np.maximum(rate / limit, 1.0)
    return interval * factor[source]
