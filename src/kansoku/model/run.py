"""Facts about one recorded run, as ``run.json`` and the ring headers give them."""

from dataclasses import dataclass, field

__all__ = ["ProcessEnd", "ProcessGroup", "RankFacts", "RunFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """One process group, as the ranks saw it."""

    name: str
    """Name inside torch, the same on every member."""
    description: str | None
    """Mesh axis or purpose where torch gives one (``dp``, ``tp``, ``pp`` …)."""
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    backend: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one process of the run said of itself."""

    rank: int | None
    """Global rank; None for a process that never joined a process group."""
    local_rank: int | None
    world_size: int | None
    node: str
    pid: int
    device: str | None
    """Such as ``NVIDIA H100 80GB HBM3`` or ``cpu``."""
    torch_version: str | None
    python_version: str | None
    parameters: int | None = None
    """Parameters held by this rank's modules, counted once."""
    layers: int | None = None
    hidden: int | None = None
    model_flops_per_step: float | None = None
    """FLOPs of this rank's own work in a step, forward and backward."""
    tokens_per_step: float | None = None
    groups: tuple[ProcessGroup, ...] = ()
    recorder: str | None = None
    """``in_process`` or ``attach`` (seen from outside)."""
    missing: tuple[str, ...] = ()
    """What could not be seen, in sentences."""
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a process of the run ended, as seen from outside."""

    node: str
    pid: int
    exit_code: int | None
    """As given to ``exit()``; None: it was ended by a signal, or nobody saw its end."""
    ended_ns: int | None
    """Unix time at which its end was noticed, some 50 ms late; None: it was still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One recorded execution."""

    run: str
    """Run id, shared by all nodes."""
    command: tuple[str, ...]
    start_ns: int
    end_ns: int | None
    exit_code: int | None
    """Exit code of the job, or 128 + signal; None while it runs or when nobody saw the end."""
    slurm_job: str | None
    nodes: tuple[str, ...]
    ranks: tuple[RankFacts, ...]
    missing: tuple[str, ...] = ()
    ends: tuple[ProcessEnd, ...] = ()
    """Ends of processes where somebody watched each: ``kansoku attach``."""

    @property
    def node_of_rank(self) -> dict[int, str]:
        """The node of each rank whose number is known."""
        return {rank.rank: rank.node for rank in self.ranks if rank.rank is not None}
