"""The planner's Python functions: ``search``, ``explain``, ``memory``, ``flops``.

Each takes a :class:`PlanRequest` and returns a result with Polars DataFrames as attributes,
``to_json()`` and ``view()``.
"""

from dataclasses import replace
from pathlib import Path

from kansoku.app._plan_compare import compare_run
from kansoku.app._plan_numbers import FlopsResult, MemoryResult
from kansoku.app._plan_request import PlanRequest
from kansoku.app._plan_results import ExplainResult, SearchAnswer, Sweep
from kansoku.catalog.models import ModelShape
from kansoku.errors import InputError
from kansoku.model import Mfu
from kansoku.plan.budget import Budget, Cadence, train_budget
from kansoku.plan.flops import step_flops, utilisation
from kansoku.plan.hardware import Hardware
from kansoku.plan.layout import LayoutColumns, Training
from kansoku.plan.memory import memory_columns
from kansoku.plan.rules import reject
from kansoku.plan.search import Candidate, best_of
from kansoku.plan.search import search as search_layouts
from kansoku.plan.timing import step_time
from kansoku.plan.whatif import changes, resources

__all__ = [
    "Cadence",
    "ExplainResult",
    "FlopsResult",
    "MemoryResult",
    "PlanRequest",
    "SearchAnswer",
    "explain",
    "flops",
    "memory",
    "search",
]


def _setting(request: PlanRequest) -> tuple[ModelShape, Hardware, Training]:
    shape = request.shape()
    hardware = request.measured(request.need_machine())
    training = request.training(shape, hardware, request.need_batch())
    for text in hardware.notes:
        request.note(text)
    calibration = hardware.need_calibration()
    if not calibration.measured:
        request.note(f"{hardware.accelerator.title}: {calibration.source}")
    return shape, hardware, training


def _check_cadence(tokens: float | None, cadence: Cadence | None) -> None:
    """Refuse what would be left aside in silence."""
    if cadence is None:
        return
    every, each = cadence.evaluate_every, cadence.evaluation_sequences
    if (every is None) != (each is None):
        raise InputError(
            "evaluation time needs how often and how much",
            remedy="--evaluate-every STEPS and --evaluation-sequences N together",
        )
    if tokens is None and (every is not None or cadence.checkpoint_every is not None):
        raise InputError(
            "evaluation and checkpoint time are parts of a whole training",
            remedy="--tokens N, such as 15T",
        )


def search(
    request: PlanRequest,
    *,
    top: int = 10,
    tokens: float | None = None,
    cadence: Cadence | None = None,
    batch_sweep: bool = False,
) -> SearchAnswer:
    """Rank every layout of a model on a machine by predicted step time.

    Raises InputError for a wrong request and ConfigurationError for unknown hardware figures.
    """
    _check_cadence(tokens, cadence)
    shape, hardware, training = _setting(request)
    space = request.space(hardware, searching=True)
    result = search_layouts(shape, training, hardware, space=space, top=top)
    budget = None
    if tokens is not None and result.candidates:
        budget = _budget(shape, training, hardware, result.candidates[0], tokens, cadence)
    sweep = _sweep(request, shape, hardware, training) if batch_sweep else ()
    return SearchAnswer(
        shape=shape,
        hardware=hardware,
        training=training,
        result=result,
        budget=budget,
        sweep=sweep,
        notes=tuple(request.notes),
    )


def _sweep(
    request: PlanRequest, shape: ModelShape, hardware: Hardware, training: Training
) -> tuple[Sweep, ...]:
    """Find the best layout at a quarter to four times the global batch."""
    found = []
    for factor in (0.25, 0.5, 1, 2, 4):
        batch = round(training.global_batch * factor)
        if batch < 1:
            continue
        space = request.space(hardware, searching=True)
        recipe = replace(training, global_batch=batch)
        best = search_layouts(shape, recipe, hardware, space=space, top=1).candidates
        found.append(Sweep(global_batch=batch, best=best[0] if best else None))
    return tuple(found)


def _budget(
    shape: ModelShape,
    training: Training,
    hardware: Hardware,
    candidate: Candidate,
    tokens: float,
    cadence: Cadence | None,
) -> Budget:
    if tokens <= 0:
        raise InputError(f"--tokens must be more than 0, not {tokens}")
    spent = candidate.breakdown
    # Forward is a third of the products, and of everything else but the optimizer and exposed
    # gradient traffic, as bytes and transfers split the same way within a few percent.
    forward = sum(v for k, v in spent.items() if k not in {"dp", "optimizer", "recompute"}) / 3
    return train_budget(
        shape,
        training,
        candidate.layout,
        hardware,
        step_s=candidate.step_s,
        forward_share=forward / candidate.step_s,
        tokens=tokens,
        cadence=cadence,
    )


def explain(
    request: PlanRequest,
    *,
    run: Path | None = None,
    tokens: float | None = None,
    cadence: Cadence | None = None,
) -> ExplainResult:
    """Say where the time of a layout goes, what limits it, and what would change it.

    Layout values left out are searched over: the fastest that fits in memory is explained. With
    ``run`` the plan is laid beside that recorded run.
    """
    _check_cadence(tokens, cadence)
    shape, hardware, training = _setting(request)
    space = request.space(hardware, searching=False)
    candidate = best_of(shape, training, hardware, space)
    layout = candidate.layout
    names = ("tp", "pp", "dp", "cp", "ep", "vp", "micro_batch", "recompute")
    chosen = [f"{n} {getattr(layout, n)}" for n in names if getattr(request, n) is None]
    if chosen:
        request.note("not given, the fastest that fits: " + ", ".join(chosen))
    _, traffic = step_time(shape, training, LayoutColumns.of([layout]), hardware)
    budget = None
    if tokens is not None:
        budget = _budget(shape, training, hardware, candidate, tokens, cadence)
    return ExplainResult(
        shape=shape,
        hardware=hardware,
        training=training,
        candidate=candidate,
        traffic=traffic,
        resources=resources(candidate),
        changes=changes(shape, training, hardware, candidate),
        budget=budget,
        comparison=None if run is None else compare_run(run, candidate, traffic, training),
        notes=tuple(request.notes),
    )


def memory(request: PlanRequest) -> MemoryResult:
    """Return the memory of the fullest rank of a layout, part by part."""
    shape = request.shape()
    hardware = request.machine(needed=False)
    layout = request.plain_layout(hardware)
    batch = request.global_batch
    if batch is None:
        batch = layout.dp * layout.micro_batch * layout.pp * (2 if layout.vp > 1 else 1)
        request.note(f"global batch {batch}: enough micro-batches to fill the pipeline")
    training = request.training(shape, hardware, batch)
    columns = LayoutColumns.of([layout])
    valid, reasons = reject(
        shape,
        training,
        columns,
        domain=hardware.scale_up_domain if hardware else None,
        searching=False,
    )
    if not valid[0]:
        raise InputError(
            f"this layout is impossible: {', '.join(reasons)}", remedy="change the sizes named"
        )
    for text in hardware.notes if hardware else ():
        request.note(text)
    return MemoryResult(
        shape=shape,
        hardware=hardware,
        training=training,
        layout=layout,
        columns=memory_columns(shape, training, columns),
        notes=tuple(request.notes),
    )


def flops(
    request: PlanRequest, *, step_s: float | None = None, peak_flops: float | None = None
) -> FlopsResult:
    """Return a step's FLOPs under every convention; with ``step_s`` also MFU and HFU.

    ``peak_flops`` is the dense peak of one GPU in FLOP/s, where the catalogue's is not wanted.
    Above 100 % raises InputError.
    """
    shape = request.shape()
    batch = request.global_batch
    if batch is None:
        batch = 1
        request.note("global batch not given: FLOPs of one sequence")
    result = step_flops(shape, global_batch=batch, recompute=request.recompute or "none")
    mfu: dict[str, Mfu] = {}
    if step_s is not None:
        hardware = request.need_machine()
        precision = request.training(shape, hardware, batch).precision
        one = peak_flops or hardware.accelerator.peak(precision)
        source = "given by flag" if peak_flops else hardware.accelerator.source
        try:
            mfu = {
                name: utilisation(
                    result,
                    step_s=step_s,
                    peak_flops=one * hardware.gpus,
                    peak_source=f"{precision} dense x {hardware.gpus}: {source}",
                    convention=name,
                )
                for name in result.conventions
            }
        except InputError as error:
            raise InputError(
                error.message,
                remedy=f"or --step-s {step_s:g}, --global-batch {batch} or --gpus "
                f"{hardware.gpus} are not those of the step",
            ) from None
    return FlopsResult(
        shape=shape,
        global_batch=batch,
        recompute=request.recompute or "none",
        flops=result,
        utilisation=mfu,
        notes=tuple(request.notes),
    )
