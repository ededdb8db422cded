"""MFU of an MLPerf run: the planner's FLOPs over the peak of the described system."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kansoku.bench.score import RunScore
from kansoku.catalog import accelerator, accelerators
from kansoku.catalog.mlperf import benchmark_rule
from kansoku.catalog.models import model_shape
from kansoku.errors import InputError
from kansoku.model import Mfu, StepWindow
from kansoku.plan.flops import CONVENTIONS, step_flops, utilisation

__all__ = ["Hardware", "mfu_of_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the user says of the machine; what is None is read from ``system.json``."""

    gpu: str | None = None
    gpus: int | None = None
    precision: str = "bf16"
    """Precision of the peak that MFU divides by."""
    convention: str = "full_attention"


def _count(system: dict[str, Any]) -> int | None:
    try:
        count = int(system["number_of_nodes"]) * int(system["accelerators_per_node"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return count if count > 0 else None


def mfu_of_run(hardware: Hardware) -> Callable[[RunScore, dict[str, Any]], tuple[Mfu | None, str]]:
    """Return a function from a run and its system description to its MFU and the reason.

    MFU is over the whole run, evaluation included. Where model, sequence length, GPUs or their
    peak are unknown there is none, and the reason says which. Raises InputError for a precision or
    convention that nobody knows, and for an MFU above 100 % from GPUs given by the user.
    """
    precisions = sorted({name for gpu in accelerators().values() for name in gpu.peak_flops})
    for what, value, known in (
        ("precision", hardware.precision, precisions),
        ("FLOPs convention", hardware.convention, CONVENTIONS),
    ):
        if value not in known:
            raise InputError(f"unknown {what} {value!r}", remedy=f"one of {', '.join(known)}")

    def of(run: RunScore, system: dict[str, Any]) -> tuple[Mfu | None, str]:
        gpus = hardware.gpus or _count(system)
        name = hardware.gpu or system.get("accelerator_model_name")
        if not gpus or not name:
            return None, "GPUs unknown: no system.json beside the logs; give --gpu and --gpus"
        if run.tokens_per_s is None or not run.sequence_length or not run.global_batch_size:
            return None, "the log gives no tokens, sequence length or batch size"
        try:
            rule = benchmark_rule(run.benchmark or "")
            peak = accelerator(str(name)).peak(hardware.precision)
        except InputError as error:
            return None, str(error)
        if rule.model is None:
            return None, f"no model shape on file for {rule.name}"
        flops = step_flops(
            model_shape(rule.model), global_batch=run.global_batch_size, seq=run.sequence_length
        )
        step_tokens = run.global_batch_size * run.sequence_length
        seconds = (run.minutes or 0) * 60
        try:
            steps = round(run.tokens_per_s * seconds / step_tokens)
            value = utilisation(
                flops,
                step_s=step_tokens / run.tokens_per_s,
                peak_flops=peak * gpus,
                peak_source=f"{gpus} × {name}, dense {hardware.precision}",
                convention=hardware.convention,
                window=StepWindow(from_step=1, to_step=max(steps, 1)),
            )
        except (InputError, OverflowError) as error:
            if hardware.gpus is not None:
                raise InputError(
                    str(error), where=run.file, remedy=f"is --gpus {hardware.gpus} right?"
                ) from None
            # The log or system.json is wrong: that costs the MFU, not the score.
            return None, f"no MFU: {error}"
        return value, (
            "over the whole run, evaluation included; the log does not say the precision: "
            f"the peak is that of {hardware.precision}"
        )

    return of
