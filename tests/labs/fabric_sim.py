"""A simulated rail-optimised Clos with random faults, written without a line of the analyser.

It takes who probes whom (arrays) and returns what the agents would have counted, and the truth.
"""

from dataclasses import dataclass, field

import numpy as np

HOST_KINDS = ("silent", "starved", "responder stopped", "all RNICs lossy")
KINDS = ("rnic", "link", "switch", "host")


@dataclass
class Clos:
    """``pods`` × ``hosts`` hosts × ``rails`` RNICs; leaf (pod, rail); every leaf to every spine."""

    pods: int
    hosts: int
    rails: int
    spines: int

    def __post_init__(self):
        self.count = self.pods * self.hosts * self.rails
        rnic = np.arange(self.count)
        self.host = rnic // self.rails
        self.leaf = (self.host // self.hosts) * self.rails + rnic % self.rails
        self.leaves = self.pods * self.rails

    def rnic_name(self, r):
        return f"n{self.host[r]:04d}/mlx5_{r % self.rails}"

    def leaf_name(self, leaf):
        return f"leaf{leaf:03d}"

    def spine_name(self, spine):
        return f"spine{spine:02d}"

    def toml(self) -> str:
        lines = ['name = "sim"', 'source = "simulated"', "[node_kind.k]"]
        for rail in range(self.rails):
            lines.append("[[node_kind.k.nic]]")
            lines.append(f'device = "mlx5_{rail}"\nrole = "fabric"\nrail = {rail}')
        for pod in range(self.pods):
            first, last = pod * self.hosts, (pod + 1) * self.hosts - 1
            lines += [f'[[nodes]]\nnames = "n[{first:04d}-{last:04d}]"\nkind = "k"\npod = "p{pod}"']
        lines += ['[fabric]\nprotocol = "rocev2"\nrail_optimised = true']
        for leaf in range(self.leaves):
            pod, rail = divmod(leaf, self.rails)
            lines += [
                (
                    f'[[fabric.switch]]\nnames = "{self.leaf_name(leaf)}"\ntier = "leaf"\n'
                    f'pod = "p{pod}"\nrails = [{rail}]'
                )
            ]
        names = ",".join(self.spine_name(s) for s in range(self.spines))
        lines += [f'[[fabric.switch]]\nnames = "{names}"\ntier = "spine"']
        return "\n".join(lines)


@dataclass
class Faults:
    """Loss of every part; and which subjects are at fault."""

    rnic: np.ndarray
    up: np.ndarray
    """``(leaves, spines)`` loss from leaf to spine."""
    down: np.ndarray
    """``(leaves, spines)`` loss from spine to leaf."""
    up_flows: np.ndarray
    """Share of flows that the link drops whole, leaf to spine."""
    down_flows: np.ndarray
    spine: np.ndarray
    leaf: np.ndarray
    host_loss: np.ndarray
    """Loss of probes that a host should answer, by slowness: answered late."""
    host_deaf: np.ndarray
    """The responder does not answer at all."""
    host_silent: np.ndarray
    truth: set = field(default_factory=set)
    described: list = field(default_factory=list)


def draw_faults(clos: Clos, rng: np.random.Generator, count: int) -> Faults:
    hosts = clos.count // clos.rails
    shape = (clos.leaves, clos.spines)
    f = Faults(
        rnic=np.zeros(clos.count), up=np.zeros(shape), down=np.zeros(shape),
        up_flows=np.zeros(shape), down_flows=np.zeros(shape), spine=np.zeros(clos.spines),
        leaf=np.zeros(clos.leaves), host_loss=np.zeros(hosts),
        host_deaf=np.zeros(hosts, dtype=bool), host_silent=np.zeros(hosts, dtype=bool),
    )  # fmt: skip
    busy_leaves, busy_spines, busy_hosts = set(), set(), set()
    for _ in range(count):
        kind = rng.choice(KINDS)
        total = float(rng.choice([1.0, rng.uniform(0.15, 0.8)]))
        if kind == "rnic":
            r = int(rng.integers(clos.count))
            if clos.leaf[r] in busy_leaves or clos.host[r] in busy_hosts:
                continue
            busy_hosts.add(clos.host[r])
            f.rnic[r] = total
            f.truth.add(("rnic", f"nic:{clos.rnic_name(r)}"))
            f.described.append(f"rnic {clos.rnic_name(r)} {total:.2f}")
        elif kind == "link":
            a, s = int(rng.integers(clos.leaves)), int(rng.integers(clos.spines))
            if a in busy_leaves or s in busy_spines:
                continue
            shape = rng.choice(["up", "down", "both", "flows"])
            loss = float(rng.choice([1.0, rng.uniform(0.05, 0.6)]))
            if shape in ("up", "both"):
                f.up[a, s] = loss
            if shape in ("down", "both"):
                f.down[a, s] = loss
            if shape == "flows":
                (f.up_flows if rng.random() < 0.5 else f.down_flows)[a, s] = rng.uniform(0.15, 0.5)
            ends = sorted((clos.leaf_name(a), clos.spine_name(s)))
            f.truth.add(("link", "link:" + "-".join(ends)))
            f.described.append(f"link {ends} {shape} {loss:.2f}")
        elif kind == "switch" and rng.random() < 0.6:
            s = int(rng.integers(clos.spines))
            if (
                f.up[:, s].any()
                or f.down[:, s].any()
                or f.up_flows[:, s].any()
                or f.down_flows[:, s].any()
                or len(busy_spines) >= 2
            ):
                continue
            busy_spines.add(s)
            f.spine[s] = float(rng.choice([1.0, rng.uniform(0.05, 0.5)]))
            f.truth.add(("switch", f"switch:{clos.spine_name(s)}"))
            f.described.append(f"spine {s} {f.spine[s]:.2f}")
        elif kind == "switch":
            a = int(rng.integers(clos.leaves))
            members = np.flatnonzero(clos.leaf == a)
            hosts_here = set(clos.host[members].tolist())
            if (
                f.rnic[members].any()
                or hosts_here & busy_hosts
                or f.up[a].any()
                or f.down[a].any()
                or f.up_flows[a].any()
                or f.down_flows[a].any()
            ):
                continue
            busy_leaves.add(a)
            f.leaf[a] = total
            f.truth.add(("switch", f"switch:{clos.leaf_name(a)}"))
            f.described.append(f"leaf {a} {total:.2f}")
        else:
            h = int(rng.integers(hosts))
            if h in busy_hosts or any(
                clos.leaf[r] in busy_leaves for r in np.flatnonzero(clos.host == h)
            ):
                continue
            busy_hosts.add(h)
            shape = rng.choice(HOST_KINDS)
            if shape == "silent":
                f.host_silent[h] = f.host_deaf[h] = True
            elif shape == "starved":
                f.host_loss[h] = rng.uniform(0.2, 0.9)
            elif shape == "responder stopped":
                f.host_deaf[h] = True
            else:
                f.rnic[np.flatnonzero(clos.host == h)] = rng.uniform(0.3, 1.0)
            f.truth.add(("host", f"node:n{h:04d}"))
            f.described.append(f"host {h} {shape}")
    return f


def paths_of(clos: Clos, source, target, port):
    """Return the spine of every tuple by a hash of its own; -1 under one leaf."""
    x = (
        (source.astype(np.uint64) * np.uint64(2654435761))
        ^ (target.astype(np.uint64) * np.uint64(40503))
        ^ (port.astype(np.uint64) * np.uint64(2246822519))
    )
    x = (x ^ (x >> np.uint64(15))) * np.uint64(2246822519)
    x = (x ^ (x >> np.uint64(13))) * np.uint64(3266489917)
    x ^= x >> np.uint64(16)
    spine = (x % np.uint64(clos.spines)).astype(np.int64)
    return np.where(clos.leaf[source] == clos.leaf[target], -1, spine)


def _leg(clos, f, source, target, port, spine):
    """Probability that one packet arrives."""
    a, b = clos.leaf[source], clos.leaf[target]
    ok = (1 - f.rnic[source]) * (1 - f.rnic[target]) * (1 - f.leaf[a])
    across = spine >= 0
    s = np.where(across, spine, 0)
    flow = ((port * 7919 + source * 31 + target * 17) % 1000) / 1000.0
    over = (1 - f.up[a, s]) * (1 - f.down[b, s]) * (1 - f.spine[s]) * (1 - f.leaf[b])
    over = over * (flow >= f.up_flows[a, s]) * (flow >= f.down_flows[b, s])
    return np.where(across, ok * over, ok)


def probe(clos: Clos, f: Faults, rng, source, target, port, mean_probes, *, background=2e-5):
    """Return probes, lost, late, responder delay (ns, NaN where none came) of one window."""
    probes = rng.poisson(mean_probes)
    forward = _leg(clos, f, source, target, port, paths_of(clos, source, target, port))
    back = _leg(clos, f, target, source, port, paths_of(clos, target, source, port))
    network = forward * back * back * (1 - background)
    host = clos.host[target]
    lost_network = rng.binomial(probes, 1 - network)
    arrived = probes - lost_network
    slow = rng.binomial(arrived, f.host_loss[host])
    deaf = np.where(f.host_deaf[host], arrived - slow, 0)
    lost = lost_network + slow + deaf
    # Most late answers come while the prober still looks; some do not.
    late = rng.binomial(np.where(f.host_deaf[host], 0, slow), 0.8)
    delay = np.where(
        f.host_loss[host] > 0,
        rng.uniform(5e7, 3e8, len(probes)),
        rng.uniform(2e4, 2e5, len(probes)),
    )
    delay[probes - lost + late == 0] = np.nan
    mine = ~f.host_silent[clos.host[source]]
    return np.where(mine, probes, 0), np.where(mine, lost, 0), np.where(mine, late, 0), delay
