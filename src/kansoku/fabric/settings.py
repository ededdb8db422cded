"""Every time, rate and threshold of the fabric prober, with its reason."""

from dataclasses import dataclass, fields

from kansoku.errors import ConfigurationError

__all__ = ["Settings"]


_HUGE = 2**63 - 1
_DAY_S = 86_400
_SECONDS = ("window_s", "timeout_s", "hold_s", "silent_s", "refresh_s", "service_interval_s")
_RATES = ("tor_mesh_per_s", "link_per_s", "traces_per_s", "probes_per_s")
_ABOVE_ZERO = {*_SECONDS, *_RATES, "rotation_s", "cpu_ratio", "slow_rtt_ns"}
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_SECONDS, (0, _DAY_S)),
    **dict.fromkeys(_RATES, (0, 1e6)),
    **dict.fromkeys(("background_loss", "rnic_loss", "link_loss", "slow_ratio"), (0, 1)),
    "grace_s": (0, _DAY_S),
    "rotation_s": (0, 366 * _DAY_S),
    "max_hops": (1, 60),  # a trace carries its hop limit in a byte
    "cpu_ratio": (0, 1024),
    "tuples_per_rnic": (1, 16_384),  # source ports there are
    "minimum_lost": (1, _HUGE),
    "clear_after": (1, _HUGE),
}
"""Least and most of what the setting makes sense for; the rest is from 0 up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the controller hands to agents and analyser; results carry the policy used.

    Defaults follow R-Pingmesh (SIGCOMM 2024) where the paper gives a figure.
    """

    window_s: float = 20.0
    """Length of an analysis window."""
    timeout_s: float = 0.5
    """A probe without both ACKs after this time is lost."""
    hold_s: float = 2.0
    """How long after the timeout late answers are still looked at: they tell a slow host from a
    lossy network."""
    silent_s: float = 20.0
    """A host whose agent has not reported for longer is silent."""
    grace_s: float = 2.0
    """Wait after a window's end, beyond the timeout, for reports to arrive."""
    refresh_s: float = 5.0
    """How often an agent asks for its pinglist."""
    port: int = 47910
    """Destination port of UDP probes. A RoCE NIC consumes 4791, so kansoku uses its own; another
    destination port may hash onto another path than RoCE's."""
    tor_mesh_per_s: float = 10.0
    """Probes per second of an RNIC to the others under its ToR."""
    link_per_s: float = 20.0
    """Expected inter-ToR probes per second on every up-link and direction (the goal is above 10;
    twice that leaves room for uneven hashing)."""
    coverage: float = 0.99
    """Probability that the tuples of a ToR pair cover all its parallel paths."""
    rotation_s: float = 3600.0
    """A fifth of the inter-ToR tuples is renewed this often."""
    tuples_per_rnic: int = 400
    """Upper bound of inter-ToR tuples that one RNIC sends; peers are thinned beyond it."""
    probes_per_s: float = 2000.0
    """Upper bound of what one RNIC sends; rates are scaled down to it."""
    service_interval_s: float = 0.01
    """One service-tracing probe per RNIC in this time, over shuffled tuples."""
    traces_per_s: float = 20.0
    """Path traces per second of an RNIC."""
    max_hops: int = 6
    """Longest path that is traced (a three-tier Clos has 5 switches between ToRs at most)."""
    cpu_ratio: float = 0.5
    """An agent above this share of one core halves its rate."""
    background_loss: float = 1e-3
    """Loss that needs no explanation: the null hypothesis of the vote."""
    rnic_loss: float = 0.1
    """An RNIC is anomalous above this loss ratio."""
    link_loss: float = 0.01
    """A link or switch is anomalous above this loss ratio of the probes over it."""
    slow_rtt_ns: int = 2_000_000
    """A network RTT above this is slow: queues of milliseconds. Kernel stamps keep the hosts'
    scheduling out of it."""
    slow_ratio: float = 0.05
    """A link or switch is congested above this share of slow probes over it."""
    minimum_lost: int = 4
    """Fewer lost probes never make an anomaly."""
    evidence: float = 12.0
    """Log-likelihood gain over the background that an anomaly needs (12: odds of 160,000)."""
    strong_evidence: float = 24.0
    """From this gain one window is enough; weaker ones must be seen in two."""
    delay_ns: int = 20_000_000
    """Responder delay that, as a host's median, counts as starved (also 10 times the others')."""
    clear_after: int = 2
    """Windows without it after which an anomaly is closed."""
    seed: int = 1
    """Seed of tuples and ports; the same on every controller of a cluster."""

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, getattr(self, field.name), whole=field.type is int)
        if not 0 < self.coverage < 1:
            raise ConfigurationError(
                f"fabric setting coverage {self.coverage} must be between 0 and 1"
            )
        if not 1 <= self.port <= 65535 or self.port == 4791:
            raise ConfigurationError(
                f"fabric setting port {self.port}: 1-65535 and not 4791, which a RoCE NIC consumes"
            )

    @staticmethod
    def _check(name: str, value: object, *, whole: bool) -> None:
        kinds = (int,) if whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            kind = "a whole number" if whole else "a number"
            raise ConfigurationError(f"fabric setting {name} = {value!r} must be {kind}")
        least, most = _RANGES.get(name, (0.0, _HUGE))
        above = value > 0 if name in _ABOVE_ZERO else value >= least
        if not (above and value <= most):  # NaN is neither
            low = "above 0" if name in _ABOVE_ZERO else f"from {least:g}"
            raise ConfigurationError(f"fabric setting {name} = {value!r} must be {low} to {most:g}")
