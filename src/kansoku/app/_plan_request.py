"""What the user asks of the planner, and what is derived from it."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kansoku.catalog.cluster import load_cluster
from kansoku.catalog.models import ModelShape, model_shape, shape_from_config
from kansoku.errors import InputError
from kansoku.plan.hardware import Hardware, cluster_hardware, generic_hardware
from kansoku.plan.layout import RECOMPUTE, Layout, Training
from kansoku.plan.search import Space

__all__ = ["PlanRequest"]

_MAX_CONFIG_BYTES = 4 * 2**20
_LINK_KEYS = ("alpha_s", "beta_bytes_per_s")
_MOST = 1e15
_MOST_WHOLE = 2**31 - 1
"""Of any size given by flag: beyond it products of sizes leave 64 bits."""
_DEFAULT_PRECISION_NOTE = "bf16 by default (fp16 on A100)"


_SIZES = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "seq", "vocab", "experts",
    "experts_per_token", "expert_ffn", "shared_expert_ffn", "gpus", "global_batch", "micro_batch",
    "tp", "pp", "dp", "cp", "ep", "vp",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Model, hardware and layout as asked for; None is left to be derived."""

    model: str | None = None
    """Catalogue name, or a Hugging Face config.json."""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    seq: int | None = None
    vocab: int | None = None
    gated: bool | None = None
    tied: bool | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    expert_ffn: int | None = None
    shared_expert_ffn: int | None = None
    cluster: str | None = None
    links: Path | None = None
    """JSON with measured links, see :meth:`measured`."""
    gpu: str | None = None
    gpus: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    vp: int | None = None
    recompute: str | None = None
    zero: int | None = None
    precision: str | None = None
    attention: str | None = None
    sequence_parallel: bool = True
    schedule: str = "1f1b"
    grad_bytes: int | None = None
    notes: list[str] = field(default_factory=list)
    """Filled while deriving: what was not given and where it came from."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is not None and value < 1:
                raise InputError(f"{flag} must be at least 1, not {value}")
            # The number of GPUs has a bound of its own.
            if value is not None and name != "gpus" and value > _MOST_WHOLE:
                raise InputError(f"{flag} {value} is above {_MOST_WHOLE:,}")
        if self.recompute is not None and self.recompute not in RECOMPUTE:
            raise InputError(
                f"unknown --recompute {self.recompute!r}", remedy=f"one of {', '.join(RECOMPUTE)}"
            )

    def note(self, text: str) -> None:
        """Keep a sentence about something derived, once."""
        if text not in self.notes:
            self.notes.append(text)

    def shape(self) -> ModelShape:
        """Return the model's shape; refuse what cannot be derived."""
        names = (
            "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "seq", "vocab", "gated",
            "tied", "experts", "experts_per_token", "expert_ffn", "shared_expert_ffn",
        )  # fmt: skip
        given = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        if self.model is None:
            return self._shape_of_flags(given)
        if self.model.endswith(".json") or Path(self.model).is_file():
            found = shape_from_config(
                _json(Path(self.model), "config.json"), where=self.model, seq=self.seq
            )
        else:
            found = model_shape(self.model)
        for text in found.notes:
            self.note(text)
        changed = {k: v for k, v in given.items() if v != getattr(found, k)}
        if not changed:
            return found
        told = ", ".join(f"{k} {v}" for k, v in changed.items())
        self.note(f"{found.title} changed by flags: {told}; every other size is the model's own")
        return replace(found, **changed)

    def _shape_of_flags(self, given: dict[str, Any]) -> ModelShape:
        missing = [n for n in ("layers", "hidden", "heads", "seq", "vocab") if n not in given]
        if missing:
            raise InputError(
                "the model is not known: missing "
                + ", ".join(f"--{n.replace('_', '-')}" for n in missing),
                remedy="or give --model NAME or --model config.json",
            )
        hidden, heads = given["hidden"], given["heads"]
        if heads < 1 or (hidden % heads and "head_dim" not in given):
            raise InputError(
                f"{heads} heads do not divide a hidden width of {hidden}",
                remedy="other --heads, or --head-dim N",
            )
        values: dict[str, Any] = {
            "name": "flags",
            "title": f"{given['layers']} layers x {hidden}",
            "kv_heads": heads,
            "head_dim": hidden // heads,
            "ffn": 4 * hidden,
        } | given
        if values.get("experts"):
            values.setdefault("expert_ffn", values["ffn"])
            if "experts_per_token" not in values:
                raise InputError(
                    "--experts needs --experts-per-token", remedy="--experts-per-token N"
                )
        if "gated" not in given:
            width = values.get("expert_ffn") if values.get("experts") else values["ffn"]
            values["gated"] = width != 4 * hidden
            kind = (
                "SwiGLU (ffn is not 4 x hidden)" if values["gated"] else "two-matrix (4 x hidden)"
            )
            self.note(f"MLP taken as {kind}; say --gated or --no-gated")
        gpt = not values["gated"] and values["kv_heads"] == heads and not values.get("experts")
        if "tied" not in given:
            values["tied"] = gpt
            self.note(f"embeddings taken as {'tied' if gpt else 'untied'}; say --tied or --untied")
        if gpt:
            # Multi-head attention with a plain MLP is a GPT: biases, LayerNorm, dropout.
            values |= {
                "bias": True, "norm_bias": True, "dropout": True, "positions": values["seq"],
            }  # fmt: skip
        return ModelShape(**values)

    def machine(self, *, needed: bool = True) -> Hardware | None:
        """Return the hardware; without one None, or an error where it is needed."""
        if self.cluster is not None:
            if self.gpu is not None:
                raise InputError("give --cluster or --gpu, not both")
            hardware = cluster_hardware(load_cluster(self.cluster))
            wanted = self.gpus or self._product()
            if wanted is None:
                self.note(f"all {hardware.gpus} GPUs of {hardware.name}")
                return hardware
            return hardware.with_gpus(wanted)
        if self.gpu is None:
            if needed:
                raise InputError("no hardware given", remedy="--cluster NAME, or --gpu and --gpus")
            return None
        wanted = self.gpus or self._product()
        if wanted is None and not needed:
            wanted = (self.tp or 1) * (self.pp or 1) * (self.cp or 1) * (self.dp or 1)
        if wanted is None:
            raise InputError(
                "the number of GPUs is not given", remedy="--gpus N, or all of --tp --pp --dp --cp"
            )
        return generic_hardware(self.gpu, wanted)

    def need_machine(self) -> Hardware:
        """Return the hardware; refuse to go without."""
        hardware = self.machine()
        if hardware is None:
            raise InputError("no hardware given", remedy="--cluster NAME, or --gpu and --gpus")
        return hardware

    def measured(self, hardware: Hardware) -> Hardware:
        """Return the hardware with the links of ``--links``, if given.

        The file holds ``{"links": {"scale_up": {"alpha_s", "beta_bytes_per_s"}, "scale_out":
        {…}}}``: latency and bus bandwidth of one GPU, fitted to a sweep of collectives.
        """
        if self.links is None:
            return hardware
        data = _json(self.links, "links file")
        links = data.get("links")
        if not isinstance(links, dict) or not {"scale_up", "scale_out"} & set(links):
            raise InputError(
                'no "links" with "scale_up" or "scale_out"',
                where=str(self.links),
                remedy="see docs/planner.md",
            )
        found: dict[str, tuple[float, float]] = {}
        for name in {"scale_up", "scale_out"} & set(links):
            row = links[name]
            values = [row.get(k) if isinstance(row, dict) else None for k in _LINK_KEYS]
            numbers = [
                float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)
            ]
            if len(numbers) != len(values) or not all(0 < v < _MOST for v in numbers):
                raise InputError(
                    f"links.{name} needs positive {' and '.join(_LINK_KEYS)}",
                    where=str(self.links),
                    remedy="see docs/planner.md",
                )
            found[name] = (numbers[0], numbers[1])
        self.note(f"links measured: {self.links}")
        return hardware.with_links(scale_up=found.get("scale_up"), scale_out=found.get("scale_out"))

    def _product(self) -> int | None:
        sizes = (self.tp, self.pp, self.dp)
        if None in sizes:
            return None
        return int((self.tp or 1) * (self.pp or 1) * (self.dp or 1) * (self.cp or 1))

    def training(self, shape: ModelShape, hardware: Hardware | None, batch: int) -> Training:
        """Return what all layouts share."""
        calibration = hardware.calibration if hardware else None
        precision = self.precision
        if precision is None:
            is_a100 = hardware is not None and hardware.accelerator.name.startswith("a100")
            precision = "fp16" if is_a100 else "bf16"
            self.note(f"precision {precision}: {_DEFAULT_PRECISION_NOTE}")
        attention = self.attention
        if attention is None:
            attention = calibration.attention if calibration else "flash"
            why = "as in the points this GPU is calibrated with" if calibration else "the default"
            self.note(f"attention {attention}: {why}; say --attention flash or unfused")
        grad_bytes = self.grad_bytes
        if grad_bytes is None:
            grad_bytes = 4 if precision == "fp16" else 2
            why = "fp32 accumulation with fp16" if grad_bytes == 4 else "NeMo's bf16 recipes"
            self.note(f"gradients of {grad_bytes} bytes ({why}); say --grad-bytes")
        return Training(
            global_batch=batch,
            seq=shape.seq,
            precision=precision,
            attention=attention,
            sequence_parallel=self.sequence_parallel,
            schedule=self.schedule,
            grad_bytes=grad_bytes,
        )

    def need_batch(self) -> int:
        """Return the global batch; refuse to invent one."""
        if self.global_batch is None:
            raise InputError(
                "the global batch is not given and follows from nothing else",
                remedy="--global-batch SEQUENCES",
            )
        return self.global_batch

    def space(self, hardware: Hardware, *, searching: bool) -> Space:
        """Return the values to try: those given, and every other where nothing is given."""

        def only(value: Any) -> list[Any] | None:
            return None if value is None else [value]

        zero = only(self.zero)
        if zero is None and not searching:
            replicas = hardware.gpus > (self.tp or 1) * (self.pp or 1)
            zero = [1 if replicas else 0]
            self.note(f"ZeRO {zero[0]}: {'distributed optimizer' if zero[0] else 'one replica'}")
        return Space(
            tp=only(self.tp),
            pp=only(self.pp),
            dp=only(self.dp),
            cp=only(self.cp),
            ep=only(self.ep),
            vp=only(self.vp),
            micro_batch=only(self.micro_batch),
            recompute=only(self.recompute),
            zero=zero,
        )

    def plain_layout(self, hardware: Hardware | None) -> Layout:
        """Return the layout as given, with one for what is left out (no search)."""
        tp, pp, cp = self.tp or 1, self.pp or 1, self.cp or 1
        dp = self.dp
        if dp is None:
            total = self.gpus or (hardware.gpus if hardware else tp * pp * cp)
            dp, odd = divmod(total, tp * pp * cp)
            if odd or dp < 1:
                raise InputError(
                    f"tp x pp x cp = {tp * pp * cp} does not divide {total} GPUs",
                    remedy="change --tp, --pp, --cp or --gpus",
                )
        layout = Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=self.ep or 1,
            vp=self.vp or 1,
            micro_batch=self.micro_batch or 1,
            recompute=self.recompute or "none",
            zero=self.zero if self.zero is not None else int(dp * cp > 1),
        )
        if self.gpus is not None and layout.gpus != self.gpus:
            raise InputError(
                f"tp x pp x dp x cp = {layout.gpus}, but --gpus says {self.gpus}",
                remedy="leave --gpus or --dp out",
            )
        asked = ("tp", "pp", "dp", "cp", "ep", "vp", "micro_batch", "recompute", "zero")
        derived = [f"{n} {getattr(layout, n)}" for n in asked if getattr(self, n) is None]
        if derived:
            self.note("not given, taken as: " + ", ".join(derived))
        return layout


def _json(path: Path, what: str) -> dict[str, Any]:
    """Read an object from a small JSON file that somebody else may have written."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise InputError(f"larger than any {what}", where=str(path))
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"not a readable {what}: {error.strerror or error}",
            where=str(path),
            remedy="check the path",
        ) from None
    except RecursionError:
        raise InputError(
            f"not a readable {what}: nested too deeply", where=str(path), remedy="another file"
        ) from None
    except (UnicodeDecodeError, ValueError) as error:
        raise InputError(
            f"not a readable {what}: {error}", where=str(path), remedy="a JSON file in UTF-8"
        ) from None
    if not isinstance(data, dict):
        raise InputError(
            f"a {what} holds an object, not {type(data).__name__}",
            where=str(path),
            remedy="a JSON object: {…}",
        )
    return data
