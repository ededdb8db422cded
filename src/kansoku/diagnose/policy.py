"""Thresholds of the diagnosis, in one frozen policy that results carry."""

from dataclasses import dataclass, fields
from pathlib import Path

from kansoku.errors import ConfigurationError

__all__ = ["Policy", "policy_from"]

_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What counts as near, late, weak and enough. Times in nanoseconds, weights 0-1."""

    clock_slack_ns: int = 30 * _SECOND
    """Clocks of hosts and log buffers may differ by this much."""
    cluster_gap_ns: int = 45 * 60 * _SECOND
    """Complaints further apart belong to different incidents; collective timeouts are 10 to 30
    minutes by default (torch, NCCL), so one incident can be silent that long."""
    survived_ns: int = 120 * _SECOND
    """Progress this long after an event shows that the event did not stop the job."""
    other_programs: int = 3
    """So many programs that meet the same error on one device speak against the device."""
    before_slow_ns: int = 180 * _SECOND
    after_slow_ns: int = 600 * _SECOND
    """What began so near to a slow-down may be why, though the job goes on."""
    many_retries: int = 8
    """So many retries of one thing that began with a slow-down may be why it is slow."""
    flaps: int = 4
    """Recoveries of one thing that returns so often heal nothing."""
    healed_gap_ns: int = 60 * _SECOND
    """Trouble this long after a recovery is another trouble."""
    old_ns: int = 3600 * _SECOND
    """An event this long before the trouble is background unless it recurs."""
    root_weight: float = 1.0
    either_weight: float = 0.75
    symptom_weight: float = 0.45
    cascade_weight: float = 0.08
    survived_weight: float = 0.23
    """Of an event after which the job went on."""
    healed_weight: float = 0.15
    """Of an event that was over before the trouble began."""
    late_weight: float = 0.35
    """Of an event after the first complaint."""
    old_weight: float = 0.15
    elsewhere_weight: float = 0.15
    """Of an event on a node that is not the job's."""
    enough: float = 0.2
    """Below this score the answer is unknown."""
    enough_unnoticed: float = 0.5
    """The same where the job itself complained of nothing and nothing is slow."""
    ended_well_weight: float = 0.15
    """Of complaints of a job that said in the end that it is done."""
    locates_weight: float = 0.6
    """Of evidence that says where, added to causes known for that rank or node."""
    leaf_together_ns: int = 60 * _SECOND
    """NICs that lose their link within this time lose it together."""
    leaf_share: float = 0.6
    """Share of the known NICs under a leaf that must, for the leaf to be what failed."""
    alternatives: int = 5
    """Hypotheses shown."""

    def role_weight(self, role: str) -> float:
        """Return the weight of a role; 0 for info and noise."""
        return {
            "root": self.root_weight,
            "either": self.either_weight,
            "symptom": self.symptom_weight,
            "cascade": self.cascade_weight,
        }.get(role, 0.0)


def policy_from(table: dict[str, object], where: Path | str) -> Policy:
    """Return the default policy with an operator's changes; refuse unknown keys and types."""
    kinds = {field.name: type(getattr(Policy(), field.name)) for field in fields(Policy)}
    for key, value in table.items():
        if key not in kinds:
            raise ConfigurationError(
                f"unknown key {key!r}", where=str(where), remedy=f"known: {', '.join(kinds)}"
            )
        if isinstance(value, bool) or not isinstance(value, kinds[key] | int):
            raise ConfigurationError(
                f"{key} must be {kinds[key].__name__}, not {value!r}", where=str(where)
            )
        if not isinstance(value, int | float) or value < 0:
            raise ConfigurationError(f"{key} must not be negative", where=str(where))
    return Policy(**table)  # type: ignore[arg-type]
