"""The planner as a form: ranked layouts, the front of time against memory, where the time goes."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock

from kansoku.app.plan import PlanRequest, SearchAnswer, search
from kansoku.app.web_jobs._view import drawable
from kansoku.app.web_page import (
    Card,
    Cards,
    Choice,
    Choices,
    Page,
    Parameter,
    Screen,
    ScreenBlock,
)
from kansoku.app.web_reading import Reading
from kansoku.catalog.accelerators import accelerators
from kansoku.catalog.cluster import shipped_clusters
from kansoku.catalog.models import model_shapes
from kansoku.errors import InputError, KansokuError
from kansoku.view import Heading, Line, Sentence, Series, Tone

__all__ = ["PLANNER"]

_INTEGER = r"[1-9]\d{0,5}"
_INTEGERS = ("gpus", "global_batch", "seq", "tp", "pp", "dp", "cp", "ep", "vp", "micro_batch")
_MOST_GPUS = 16_384
_MOST_BATCH = 262_144
_MOST_SEQ = 1_048_576
_PARTS = {
    "gemm": "matrix products", "attention": "attention core", "elementwise": "elementwise",
    "gaps": "gaps between kernels", "recompute": "recomputation", "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed", "ep": "expert parallel, exposed",
    "pp": "pipeline transfers, exposed", "dp": "data parallel, exposed",
    "bubble": "pipeline bubble", "optimizer": "optimizer update",
}  # fmt: skip
_GIB = 2**30
_kept: OrderedDict[tuple[tuple[str, str], ...], SearchAnswer] = OrderedDict()
_lock = Lock()
_CACHED = 16


def _request(values: Mapping[str, str]) -> PlanRequest:
    """Return the request; files are never read: models and machines are those of the catalogue."""
    numbers = {name: int(values[name]) for name in _INTEGERS if name in values}
    for name, most in (
        ("gpus", _MOST_GPUS),
        ("global_batch", _MOST_BATCH),
        ("seq", _MOST_SEQ),
    ):
        if numbers.get(name, 0) > most:
            raise InputError(f"{name} may be at most {most:,}")
    texts = {
        name: values[name]
        for name in ("model", "precision", "recompute")
        if values.get(name, "any") != "any"
    }
    machine = values["machine"]
    where = {"cluster": machine} if machine in shipped_clusters() else {"gpu": machine}
    return PlanRequest(**numbers, **texts, **where)  # type: ignore[arg-type]


def _search(values: Mapping[str, str]) -> SearchAnswer:
    key = tuple(sorted(values.items()))
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    answer = search(_request(values), top=20)
    with _lock:
        _kept[key] = answer
        while len(_kept) > _CACHED:
            _kept.popitem(last=False)
    return answer


def _plan(reading: Reading, values: Mapping[str, str]) -> Screen:
    del reading
    blocks: list[ScreenBlock] = [_form(values)]
    try:
        answer = _search(values)
    except KansokuError as error:
        blocks.append(
            Sentence(
                text=error.message,
                tone=Tone.BAD,
                detail=error.remedy,
            )
        )
        return Screen(
            title="Planner",
            blocks=blocks,
            answer={
                "schema": "kansoku.plan/1", "verdict": "none", "reason": str(error),
                "candidates": [],
            },
        )  # fmt: skip
    blocks += _cards(answer)
    blocks += _split(answer)
    for block in drawable(answer.view().blocks):
        if isinstance(block, Series) and block.title == "Pareto front":
            blocks.append(_front(answer, block))
        else:
            blocks.append(block)
    return Screen(title="Planner", blocks=blocks, answer=answer.to_json())


def _form(values: Mapping[str, str]) -> Choices:
    def field(name: str, label: str) -> Choice:
        return Choice(name=name, label=label, value=values.get(name, ""))

    models = tuple((name, shape.title) for name, shape in model_shapes().items())
    machines = tuple((name, name) for name in _machines())
    return Choices(
        choices=(
            Choice(name="model", label="Model", options=models, value=values["model"]),
            Choice(name="machine", label="Machine", options=machines, value=values["machine"]),
            field("gpus", "GPUs"),
            field("global_batch", "Global batch, sequences"),
            field("seq", "Sequence length"),
            Choice(
                name="precision", label="Precision", value=values["precision"],
                options=(("any", "the GPU's usual"), ("bf16", "bf16"), ("fp8", "fp8"),
                         ("fp16", "fp16")),
            ),
            Choice(
                name="recompute", label="Recomputation", value=values["recompute"],
                options=(("any", "any"), ("none", "none"), ("selective", "selective"),
                         ("full", "full")),
            ),
            field("tp", "Tensor parallel"), field("pp", "Pipeline stages"),
            field("dp", "Replicas"), field("cp", "Context parallel"),
            field("ep", "Expert parallel"), field("vp", "Chunks a stage"),
            field("micro_batch", "Micro-batch"),
        ),
        submit="Search",
    )  # fmt: skip


def _machines() -> Sequence[str]:
    return [*shipped_clusters(), *accelerators()]


def _cards(answer: SearchAnswer) -> list[ScreenBlock]:
    if not answer.result.candidates:
        return []
    best = answer.result.candidates[0]
    layout = best.layout
    return [
        Cards(
            cards=(
                Card(
                    label="Fastest layout",
                    value=f"tp {layout.tp} · pp {layout.pp} · dp {layout.dp}",
                    note=f"cp {layout.cp}, ep {layout.ep}, micro-batch {layout.micro_batch}, "
                    f"recompute {layout.recompute}",
                ),
                Card(label="Step time", value=f"{best.step_s:.3f} s", note="predicted"),
                Card(
                    label="MFU",
                    value=f"{best.mfu.value:.1%}",
                    note=f"{best.mfu.convention}; {best.mfu.peak_source}",
                ),
                Card(label="Tokens/s/GPU", value=f"{best.tokens_per_s_per_gpu:,.0f}"),
                Card(
                    label="Memory of the fullest GPU",
                    value=f"{best.memory_bytes / _GIB:.1f} GiB",
                    note=f"{answer.result.feasible:,} of {answer.result.tried:,} layouts are "
                    "feasible",
                ),
            )
        )
    ]


def _split(answer: SearchAnswer) -> list[ScreenBlock]:
    """Return where the time of the fastest layouts goes, stacked."""
    shown = answer.result.candidates[:10]
    if not shown:
        return []
    parts = [p for p in shown[0].breakdown if any(c.breakdown[p] > 0 for c in shown)]
    x = [float(n) for n in range(len(shown))]
    labels = [
        f"{n + 1}: {c.layout.tp}·{c.layout.pp}·{c.layout.dp}·{c.layout.cp}"
        for n, c in enumerate(shown)
    ]
    return [
        Heading(text="Where the time of a step goes"),
        Series(
            title="Time split of the fastest layouts",
            x_title="rank: tp·pp·dp·cp",
            y_title="ms a step",
            style="stacked_bar",
            x_labels=labels,
            lines=[
                Line(name=_PARTS.get(part, part), x=x, y=[1e3 * c.breakdown[part] for c in shown])
                for part in parts
            ],
        ),
    ]


def _front(answer: SearchAnswer, block: Series) -> Series:
    """Return the front with the ranked layouts around it."""
    others = [c for c in answer.result.candidates if not c.pareto]
    line = Line(
        name="other fast layouts",
        x=[c.memory_bytes / _GIB for c in others],
        y=[c.step_s for c in others],
    )
    return replace(block, lines=[*block.lines, line]) if others else block


def _parameters() -> tuple[Parameter, ...]:
    models, machines = list(model_shapes()), list(_machines())
    first = next((m for m in models if "70b" in m), models[0])
    return (
        Parameter(name="model", meaning="model of the catalogue", default=first,
                  choices=tuple(models)),
        Parameter(name="machine", meaning="cluster or GPU of the catalogue", default=machines[0],
                  choices=tuple(machines)),
        Parameter(name="gpus", meaning="number of GPUs", default="256", pattern=_INTEGER),
        Parameter(name="global_batch", meaning="sequences a step", default="1024",
                  pattern=_INTEGER),
        Parameter(name="seq", meaning="sequence length, tokens", pattern=_INTEGER),
        Parameter(name="precision", meaning="number format", default="any",
                  choices=("any", "bf16", "fp8", "fp16")),
        Parameter(name="recompute", meaning="recomputation", default="any",
                  choices=("any", "none", "selective", "full")),
        *(
            Parameter(name=name, meaning="size of a parallel axis, a whole number",
                      pattern=r"[1-9]\d{0,4}")
            for name in ("tp", "pp", "dp", "cp", "ep", "vp", "micro_batch")
        ),
    )  # fmt: skip


PLANNER = Page(
    path="/planner",
    title="Planner",
    build=_plan,
    parameters=_parameters(),
    navigation=80,
)
