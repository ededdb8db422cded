"""The flags that the plan commands share, and how they become a request."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kansoku.app.plan import PlanRequest
from kansoku.errors import InputError

__all__ = [
    "AttentionFlag",
    "CpFlag",
    "DpFlag",
    "EpFlag",
    "ExpertFfnFlag",
    "ExpertsFlag",
    "ExpertsPerTokenFlag",
    "FfnFlag",
    "GatedFlag",
    "GlobalBatchFlag",
    "GpuFlag",
    "GpusFlag",
    "GradBytesFlag",
    "HeadDimFlag",
    "HeadsFlag",
    "HiddenFlag",
    "KvHeadsFlag",
    "LayersFlag",
    "LinksFlag",
    "MicroBatchFlag",
    "ModelFlag",
    "PpFlag",
    "PrecisionFlag",
    "RecomputeFlag",
    "ScheduleFlag",
    "SeqFlag",
    "SequenceParallelFlag",
    "SharedExpertFfnFlag",
    "TiedFlag",
    "TokensFlag",
    "TpFlag",
    "VocabFlag",
    "VpFlag",
    "ZeroFlag",
    "as_tokens",
    "request_of",
]  # fmt: skip


def _integer(flag: str, help_text: str, metavar: str = "N") -> Any:
    return Annotated[int | None, typer.Option(flag, metavar=metavar, min=1, help=help_text)]


ModelFlag = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME|config.json", help="Catalogue model or HF config."),
]
LayersFlag = _integer("--layers", "Layers.")
HiddenFlag = _integer("--hidden", "Hidden width.")
HeadsFlag = _integer("--heads", "Attention heads.")
KvHeadsFlag = _integer("--kv-heads", "Key/value heads; default: all heads.")
HeadDimFlag = _integer("--head-dim", "Width of a head; default hidden / heads.")
FfnFlag = _integer("--ffn", "Feed-forward width; default 4 x hidden.")
SeqFlag = _integer("--seq", "Sequence length, tokens.")
VocabFlag = _integer("--vocab", "Rows of the embedding.")
ExpertsFlag = _integer("--experts", "Routed experts a layer.")
ExpertsPerTokenFlag = _integer("--experts-per-token", "Experts a token visits.")
ExpertFfnFlag = _integer("--expert-ffn", "Width of an expert; default --ffn.")
SharedExpertFfnFlag = _integer("--shared-expert-ffn", "Width of all shared experts together.")
GatedFlag = Annotated[
    bool | None, typer.Option("--gated/--no-gated", help="SwiGLU; default: ffn is not 4 x hidden.")
]
TiedFlag = Annotated[
    bool | None, typer.Option("--tied/--untied", help="Input and output embedding are one.")
]
GpuFlag = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="GPU on the maker's nodes: h100-sxm, a100-80gb …"),
]
GpusFlag = _integer("--gpus", "GPUs of the job.")
GlobalBatchFlag = _integer("--global-batch", "Sequences of a step.")
MicroBatchFlag = _integer("--micro-batch", "Sequences of a micro-batch.")
TpFlag = _integer("--tp", "Tensor-parallel size.")
PpFlag = _integer("--pp", "Pipeline stages.")
DpFlag = _integer("--dp", "Data-parallel replicas.")
CpFlag = _integer("--cp", "Context-parallel size.")
EpFlag = _integer("--ep", "Expert-parallel size, within dp x cp.")
VpFlag = _integer("--vp", "Interleaved chunks a stage.")
RecomputeFlag = Annotated[
    str | None, typer.Option("--recompute", metavar="none|selective|full", help="Recomputation.")
]
ZeroFlag = Annotated[
    int | None, typer.Option("--zero", metavar="0|1|2|3", help="Sharding over replicas.")
]
PrecisionFlag = Annotated[
    str | None,
    typer.Option("--precision", metavar="bf16|fp8|fp16", help="Default bf16; fp16 on A100."),
]
AttentionFlag = Annotated[
    str | None,
    typer.Option(
        "--attention", metavar="flash|unfused", help="Attention kernel; default the calibration's."
    ),
]
SequenceParallelFlag = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel", help="Split norms over the tensor group."
    ),
]
ScheduleFlag = Annotated[
    str, typer.Option("--schedule", metavar="1f1b|zero_bubble", help="Pipeline schedule.")
]
GradBytesFlag = Annotated[
    int | None,
    typer.Option("--grad-bytes", metavar="2|4", help="Gradient buffer; default 4 fp16, else 2."),
]
LinksFlag = Annotated[
    Path | None,
    typer.Option("--links", metavar="FILE", help="Measured links (JSON) for the calibration's."),
]
TokensFlag = Annotated[
    str | None,
    typer.Option("--tokens", metavar="N", help="Token budget, such as 300e9, 15T or 300B."),
]

_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def as_tokens(text: str | None) -> float | None:
    """Read a token budget: a number, perhaps with K, M, B or T behind it."""
    if text is None:
        return None
    unit = _UNITS.get(text[-1:].upper())
    try:
        value = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise InputError(f"--tokens {text!r} is no token budget", remedy="such as 300e9 or 15T")
    return value


def request_of(values: dict[str, Any]) -> PlanRequest:
    """Build the request from a command's arguments; those it does not know are left aside."""
    known = PlanRequest.__dataclass_fields__
    given = {k: v for k, v in values.items() if k in known and v is not None}
    return PlanRequest(**given)
