"""Known paths of tuples and of their ACKs, and the components of every row of a window."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kansoku.fabric.localise import LINK, RNIC, SWITCH
from kansoku.fabric.pinglist import tuple_keys
from kansoku.fabric.topology import Topology

__all__ = ["Names", "PathBook"]

Ints32 = npt.NDArray[np.int32]
_SWITCHES = 3  # interior switches of a path that are voted on: aggregation, core, aggregation
_UNKNOWN = 0  # path number of a tuple that was never traced to its end


class Names:
    """Numbers of components: RNICs first, then switches, then directed links as they appear."""

    def __init__(self, topology: Topology) -> None:
        """Take RNICs and the switches that the cluster file names."""
        self.names: list[str] = list(topology.rnics)
        self.kinds: list[int] = [RNIC] * len(self.names)
        self._numbers: dict[str, int] = {}
        self.ends: dict[int, tuple[int, int]] = {}
        self.tor_number = np.array([self.switch(name) for name in topology.tors], dtype=np.int32)
        for name in topology.spines:
            self.switch(name)

    def switch(self, name: str) -> int:
        """Return the number of a switch, new or known."""
        return self._number(name, SWITCH)

    def link(self, first: int, second: int) -> int:
        """Return the number of the directed link between two switches."""
        number = self._number(f"{self.names[first]}>{self.names[second]}", LINK)
        self.ends[number] = (first, second)
        return number

    def _number(self, name: str, kind: int) -> int:
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self.names)
            self.names.append(name)
            self.kinds.append(kind)
        return found

    def kinds_array(self) -> npt.NDArray[np.int8]:
        """Return the kind of every component, ``(components,)``."""
        return np.array(self.kinds, dtype=np.int8)


class PathBook:
    """The last complete path of every tuple: what a failure cuts is what was known before it."""

    def __init__(self, topology: Topology, switch_of_address: Mapping[str, str]) -> None:
        """``switch_of_address`` names the switch behind each hop address; others keep theirs."""
        self.topology = topology
        self.names = Names(topology)
        self._switch_of_address = switch_of_address
        self._paths: dict[tuple[int, ...], int] = {(): _UNKNOWN}
        self._hops: list[tuple[int, ...]] = [()]
        self._keys = np.zeros(0, dtype=np.int64)
        self._numbers = np.zeros(0, dtype=np.int32)
        self._new: dict[int, int] = {}
        self._switch_table = np.zeros((0, _SWITCHES), dtype=np.int32)
        self._link_table = np.zeros((0, _SWITCHES + 1), dtype=np.int32)
        self._used = 1
        self._kept_keys = np.zeros(0, dtype=np.int64)
        self._kept = np.zeros((0, 0), dtype=np.int32)
        self._dirty: set[int] = set()
        self.changes = 0

    def __len__(self) -> int:
        return len(self._keys) + len(self._new)

    def path(self, hops: tuple[int, ...]) -> int:
        """Return the number of a path of switches (component numbers, ToR to ToR)."""
        number = self._paths.get(hops)
        if number is None:
            number = self._paths[hops] = len(self._hops)
            self._hops.append(hops)
            for first, second in pairwise(hops):
                self.names.link(first, second)
        return number

    def hop_numbers(self, hops: Sequence[str | None]) -> list[int | None]:
        """Return the switches of traced hop addresses."""
        return [
            None if hop is None else self.names.switch(self._switch_of_address.get(hop, hop))
            for hop in hops
        ]

    def learn(self, source: int, target: int, port: int, hops: Sequence[str | None]) -> None:
        """Take a trace that reached its target; hops that did not answer make it unknown."""
        numbers = self.hop_numbers(hops)
        if any(number is None for number in numbers):
            return
        self._set(source, target, port, tuple(n for n in numbers if n is not None))

    def _set(self, source: int, target: int, port: int, hops: tuple[int, ...]) -> None:
        key = int(tuple_keys(source, target, port, len(self.topology.rnics)))
        number = self.path(hops)
        before = self.known(key)
        if before == number:
            return
        self.changes += before != _UNKNOWN
        self._dirty |= {key, int(tuple_keys(target, source, port, len(self.topology.rnics)))}
        self._new[key] = number
        if len(self._new) > 4096 + len(self._keys) // 8:
            self._merge()

    def known(self, key: int) -> int:
        """Return the path number of one tuple key, 0 where unknown."""
        if key in self._new:
            return self._new[key]
        place = int(np.searchsorted(self._keys, key))
        if place < len(self._keys) and self._keys[place] == key:
            return int(self._numbers[place])
        return _UNKNOWN

    def load(self, keys: npt.NDArray[np.int64], numbers: npt.NDArray[np.int32]) -> None:
        """Replace everything by sorted keys and their path numbers."""
        self._keys, self._numbers, self._new = keys, numbers, {}
        self._kept_keys = np.zeros(0, dtype=np.int64)
        self._kept = np.zeros((0, 0), dtype=np.int32)

    def _merge(self) -> None:
        if not self._new:
            return
        keys = np.fromiter(self._new.keys(), dtype=np.int64)
        numbers = np.fromiter(self._new.values(), dtype=np.int32)
        # Later entries win: np.unique keeps the first, so the new ones stand first.
        keys, first = np.unique(np.concatenate([keys, self._keys]), return_index=True)
        self._numbers = np.concatenate([numbers, self._numbers])[first]
        self._keys, self._new = keys, {}

    def numbers_of(self, keys: npt.NDArray[np.int64]) -> Ints32:
        """Return the path number of every key."""
        self._merge()
        if not len(self._keys):
            return np.zeros(len(keys), dtype=np.int32)
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[place] == keys, self._numbers[place], _UNKNOWN).astype(np.int32)

    def switches_of(self, number: int) -> tuple[int, ...]:
        """Return the switches of a path as component numbers."""
        return self._hops[number]

    def hops_of(self, number: int) -> list[str]:
        """Return the switch names of a path."""
        return [self.names.names[hop] for hop in self._hops[number]]

    def _tables(self) -> tuple[Ints32, Ints32]:
        """Return interior switches ``(paths, 3)`` and links ``(paths, 4)`` of every path."""
        done = len(self._switch_table)
        if done < len(self._hops):
            switches = np.full((len(self._hops) - done, _SWITCHES), -1, dtype=np.int32)
            links = np.full((len(self._hops) - done, _SWITCHES + 1), -1, dtype=np.int32)
            for row, hops in enumerate(self._hops[done:]):
                inner = hops[1:-1][:_SWITCHES]
                switches[row, : len(inner)] = inner
                pairs = list(pairwise(hops))[: _SWITCHES + 1]
                links[row, : len(pairs)] = [self.names.link(a, b) for a, b in pairs]
            self._switch_table = np.concatenate([self._switch_table, switches])
            self._link_table = np.concatenate([self._link_table, links])
            self._used = max(int((self._switch_table >= 0).sum(axis=1).max(initial=0)), 1)
        return self._switch_table[:, : self._used], self._link_table[:, : self._used + 1]

    def components(self, source: Ints32, target: Ints32, port: Ints32) -> Ints32:
        """Return the distinct components of each row, ``(columns, rows)``, -1 for none.

        The same tuples come every window, so their components are kept; only tuples that are new,
        or whose path or way back has changed, are worked out.
        """
        keys = tuple_keys(source, target, port, len(self.topology.rnics))
        width = 2 + 2 + 2 * self._tables()[0].shape[1] + 2 * self._tables()[1].shape[1]
        if width != len(self._kept):
            self._kept_keys = np.zeros(0, dtype=np.int64)
            self._kept = np.zeros((width, 0), dtype=np.int32)
        if self._dirty:
            dirty = np.fromiter(self._dirty, dtype=np.int64, count=len(self._dirty))
            self._dirty = set()
            clean = ~np.isin(self._kept_keys, dirty)
            self._kept_keys, self._kept = self._kept_keys[clean], self._kept[:, clean]
        if np.array_equal(keys, self._kept_keys):
            return self._kept
        place = np.searchsorted(self._kept_keys, keys)
        found = place < len(self._kept_keys)
        found[found] = self._kept_keys[place[found]] == keys[found]
        new = np.flatnonzero(~found)
        if len(new):
            made = self._compute(source[new], target[new], port[new])
            every = np.concatenate([self._kept_keys, keys[new]])
            self._kept_keys, first = np.unique(every, return_index=True)
            kept = np.concatenate([self._kept, made], axis=1)[:, first]
            self._kept = np.ascontiguousarray(kept)
            if np.array_equal(keys, self._kept_keys):
                return self._kept
            place = np.searchsorted(self._kept_keys, keys)
        return self._kept[:, place]

    def _compute(self, source: Ints32, target: Ints32, port: Ints32) -> Ints32:
        count = len(self.topology.rnics)
        forward = self.numbers_of(tuple_keys(source, target, port, count))
        back = self.numbers_of(tuple_keys(target, source, port, count))
        tors = self.names.tor_number[self.topology.rnic_tor]
        first, second = tors[source], tors[target]
        columns = [source, target, first, np.where(first == second, -1, second)]
        switches, links = self._tables()
        inner = [switches[forward, place] for place in range(switches.shape[1])]
        for place in range(switches.shape[1]):
            other = switches[back, place]
            for seen in inner[: switches.shape[1]]:
                other = np.where(other == seen, -1, other)
            inner.append(other)
        columns += inner
        columns += [links[forward, place] for place in range(links.shape[1])]
        columns += [links[back, place] for place in range(links.shape[1])]
        return np.stack(columns).astype(np.int32)
