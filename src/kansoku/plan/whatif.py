"""Which resource limits a step, and what more of it would change."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kansoku.catalog.models import ModelShape
from kansoku.plan.hardware import Hardware
from kansoku.plan.layout import LayoutColumns, Training
from kansoku.plan.search import Candidate, Space, search

__all__ = ["Change", "Resource", "changes", "resources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Seconds of a step that one resource accounts for."""

    name: str
    """``tensor_cores``, ``memory_bandwidth``, ``nvlink``, ``fabric``, ``pipeline``, ``launch``."""
    seconds: float
    share: float
    """Of the step, 0-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a change would do; the layout may be re-tuned where ``retuned`` says so."""

    change: str
    step_s: float
    tokens_per_s_per_gpu: float
    gain_ratio: float
    """Throughput per GPU over the present one; 1 is no gain."""
    retuned: str | None
    """Layout values that a re-tuned plan would use."""


def resources(candidate: Candidate) -> tuple[Resource, ...]:
    """Split a step over its resources, largest first."""
    spent: Mapping[str, float] = candidate.breakdown
    tiers = {group.axis: group.tier for group in candidate.placement.groups}
    # The data-parallel collectives run over dp x cp ranks.
    inside = {axis for axis, tier in tiers.items() if tier in {"nvlink", "single"}}
    if "dp" in inside and "cp" not in inside:
        inside.discard("dp")
    amounts = {
        "tensor_cores": spent["gemm"] + spent["attention"] + spent["recompute"],
        "memory_bandwidth": spent["elementwise"] + spent["optimizer"],
        "launch": spent["gaps"],
        "pipeline": spent["bubble"],
        "nvlink": sum(spent[axis] for axis in ("tp", "cp", "ep", "pp", "dp") if axis in inside),
        "fabric": sum(spent[axis] for axis in ("tp", "cp", "ep", "pp", "dp") if axis not in inside),
    }
    found = [
        Resource(name=name, seconds=seconds, share=seconds / candidate.step_s)
        for name, seconds in amounts.items()
    ]
    return tuple(sorted(found, key=lambda r: -r.seconds))


def _space(candidate: Candidate, *, tune: bool) -> Space:
    x = candidate.layout
    fixed = Space(
        tp=[x.tp], pp=[x.pp], dp=[x.dp], cp=[x.cp], ep=[x.ep], vp=[x.vp],
        micro_batch=[x.micro_batch], recompute=[x.recompute], zero=[x.zero],
    )  # fmt: skip
    return replace(fixed, micro_batch=None, recompute=None) if tune else fixed


def _describe(before: LayoutColumns, candidate: Candidate) -> str | None:
    old, new = before.row(0), candidate.layout
    parts = [
        f"{name} {getattr(old, name)} → {getattr(new, name)}"
        for name in ("micro_batch", "recompute")
        if getattr(old, name) != getattr(new, name)
    ]
    return ", ".join(parts) or None


def changes(
    shape: ModelShape, training: Training, hardware: Hardware, present: Candidate
) -> tuple[Change, ...]:
    """Return what one more NIC, more HBM, faster links and a bigger batch would change."""
    gpu = hardware.accelerator
    nics = hardware.gpus_per_node
    rate = hardware.nic_bytes_per_s
    options: list[tuple[str, Training, Hardware, bool]] = []
    if rate is not None:
        more = replace(hardware, nic_bytes_per_s=rate * (nics + 1) / nics)
        options.append((f"one more NIC a node ({nics} → {nics + 1})", training, more, False))
        options.append(
            ("fabric twice as fast", training, replace(hardware, nic_bytes_per_s=2 * rate), False)
        )
    options += [
        (
            "HBM of 1.5 times the size",
            training,
            replace(hardware, memory_bytes=hardware.memory_bytes * 3 // 2),
            True,
        ),
        (
            "HBM of 1.5 times the bandwidth",
            training,
            replace(
                hardware, accelerator=replace(gpu, memory_bytes_per_s=gpu.memory_bytes_per_s * 1.5)
            ),
            False,
        ),
        (
            "NVLink twice as fast",
            training,
            replace(
                hardware,
                accelerator=replace(gpu, scale_up_bytes_per_s=gpu.scale_up_bytes_per_s * 2),
            ),
            False,
        ),
        (
            "global batch twice as big",
            replace(training, global_batch=2 * training.global_batch),
            hardware,
            False,
        ),
        ("micro-batch and recomputation re-tuned", training, hardware, True),
    ]
    before = LayoutColumns.of([present.layout])
    found = []
    for name, recipe, machine, tune in options:
        # A present layout that does not fit is still compared with itself.
        roomy = machine if tune or present.fits else replace(machine, memory_bytes=2**62)
        best = search(shape, recipe, roomy, space=_space(present, tune=tune), top=1).candidates
        if not best:
            continue
        found.append(
            Change(
                change=name,
                step_s=best[0].step_s,
                tokens_per_s_per_gpu=best[0].tokens_per_s_per_gpu,
                gain_ratio=best[0].tokens_per_s_per_gpu / present.tokens_per_s_per_gpu,
                retuned=_describe(before, best[0]),
            )
        )
    return tuple(sorted(found, key=lambda c: -c.gain_ratio))
