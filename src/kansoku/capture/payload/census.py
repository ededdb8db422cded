"""What the model is: parameters, layers, width, tokens, and model FLOPs of the forwards that run.

Model FLOPs are those of PaLM (arXiv:2204.02311, appendix B): 2 a multiply-add of every matrix
product, convolution and attention of a forward, attention whole also where it is causal; forward
and backward together count three forwards; recomputation, evaluation and the optimizer count
nothing. Each rank counts its own part, so that the sum over ranks is the job's.

Convention ``operators``: the products that torch's dispatcher saw, whatever called them. Convention
``modules``, where there is no compiler: the modules that were called, as ``module_rules`` knows.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

from kansoku.capture.payload import products
from kansoku.capture.payload.module_rules import (
    ModuleRules,
    from_weights,
    is_attention,
    is_compiled,
    is_linear,
)
from kansoku.capture.payload.recorder import RECORDER
from kansoku.capture.payload.split import Split, find_split

__all__ = ["CONVENTIONS", "begin", "last", "settle"]

CONVENTIONS = {
    "operators": "operators: 3 × (2 × multiply-adds of the forward's products, attention full)",
    "modules": "modules: 3 × (2 × weights × rows + 4 × batch × sequence² × width)",
}
_BACKWARD_FACTOR = 3
_SETTLING_STEPS = 4
_MAX_TRIES = 3
"""So often a forward is counted anew where a compiler traced in it."""
_known: dict[tuple[Any, ...], tuple[float, float]] = {}
_tries: dict[tuple[Any, ...], int] = {}
_roots: dict[int, weakref.ref[Any]] = {}
"""The models that have been counted; a job may drop its models."""
_settled = False


def _first_tensor(args: Any, kwargs: Any) -> Any:
    for value in (*args, *kwargs.values()):
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return value
        if isinstance(value, dict):
            found = _first_tensor((), value)
            if found is not None:
                return found
        if isinstance(value, (list, tuple)):
            found = _first_tensor(value, {})
            if found is not None:
                return found
    return None


def _token_ids(args: Any, kwargs: Any) -> Any:
    """Return the input that holds the tokens: ids by name, else the first tensor."""
    if not kwargs and args and hasattr(args[0], "dtype"):  # nearly always, every step
        return args[0] if hasattr(args[0], "shape") else _first_tensor(args, kwargs)
    named = kwargs.get("input_ids")
    return named if hasattr(named, "shape") else _first_tensor(args, kwargs)


def _tokens(tensor: Any) -> float:
    """Return the tokens of ids (batch, sequence) or activations (batch, sequence, width)."""
    if tensor is None:
        return 0.0
    shape = tensor.shape
    if not tensor.dtype.is_floating_point and len(shape) == 2:
        return float(shape[0] * shape[1])
    if tensor.dtype.is_floating_point and len(shape) == 3:
        return float(shape[0] * shape[1])
    return 0.0


def begin(module: Any, args: Any, kwargs: Any) -> Any:
    """Start counting a training forward, or add what is known of one with the same shapes."""
    model, shape, flops, tokens = _last
    first = args[0] if args and not kwargs else kwargs.get("input_ids")
    # Nearly always: the model of before, with the shape of before.
    if id(module) == model and shape is not None and getattr(first, "shape", None) == shape:
        RECORDER.phases.work(flops, tokens)
        return None
    tensor = _token_ids(args, kwargs)
    key = (id(module), None if tensor is None else tensor.shape)
    known = _known.get(key)
    if known is None and len(_known) < 256:
        return _Count(module, key, tensor)
    if known is not None:
        _remember(id(module), key[1], *known)
        RECORDER.phases.work(*known)
    return None


_last: tuple[int, Any, float, float] = (0, None, 0.0, 0.0)


def _remember(model: int, shape: Any, flops: float, tokens: float) -> None:
    global _last  # noqa: PLW0603 - the last one
    _last = (model, shape, flops, tokens)
    if RECORDER.calls is not None:
        RECORDER.calls.remember(*_last)


def last() -> tuple[int, Any, float, float]:
    """Return model (id), shape of its input, FLOPs and tokens of the forward before."""
    return _last


def _forget(model: int, _: Any) -> None:
    """Drop what is known of a model that is gone: another may get its id."""
    _roots.pop(model, None)
    for known in (_known, _tries):
        for key in [key for key in known if key[0] == model]:
            del known[key]
    if _last[0] == model:
        _remember(0, None, 0.0, 0.0)


def _models() -> list[Any]:
    return [root for reference in list(_roots.values()) if (root := reference()) is not None]


class _Count:
    """Counts one forward of one root module."""

    def __init__(self, root: Any, key: tuple[Any, ...], tensor: Any):
        self.root = root
        self.key = key
        self.tokens = _tokens(tensor)
        self.rows = self.tokens or float(
            tensor.shape[0] if tensor is not None and tensor.shape else 0
        )
        if id(root) not in _roots:
            _roots[id(root)] = weakref.ref(root, functools.partial(_forget, id(root)))
        self.split = find_split(root)
        self._raised = sys.exc_info()[1]
        observer = products.observe()
        self._by: _Operators | ModuleRules
        if observer is not None and observer.begin(self.split.share, self.split.parts):
            self._by = _Operators(observer, self.split, self.tokens, key[1])
        else:
            self._by = ModuleRules(self.tokens, key[1], self.split)
            self._by.watch(root)
        self.see(root, (tensor,))

    def see(self, module: Any, args: Any) -> None:
        """Look at one module call, before it."""
        self._by.see(module, args)

    def end(self) -> None:
        """Keep the count for forwards of the same shapes."""
        flops = self._by.end()
        if sys.exc_info()[1] is not self._raised:  # it ended by an exception: a part of a forward
            return
        if not flops or is_compiled(self.root):
            flops = self._with_hidden(flops)
        entry = (flops * _BACKWARD_FACTOR, self.tokens)
        # While a compiler traces, it also tries out kernels: the next forward is as all others.
        tries = _tries.get(self.key, 0)
        if self._by.traced and tries < _MAX_TRIES:
            _tries[self.key] = tries + 1
        else:
            _known[self.key] = entry
        RECORDER.phases.work(*entry)

    def _with_hidden(self, flops: float) -> float:
        """Return the FLOPs where a compiler's own kernels may hide most products, or attention."""
        attention = 0.0
        if not self._by.saw_attention:
            named = ModuleRules(self.tokens, self.key[1], self.split)
            named.see_attention(self.root)
            attention = named.end()
        linear = from_weights(self.root, self.rows, self.split)
        return (linear if 2 * flops < linear else flops) + attention


class _Operators:
    """The products that the dispatcher saw, and what modules with kernels of their own hide."""

    def __init__(self, observer: Any, split: Split, tokens: float, shape: Any):
        self.traced = self.saw_attention = False
        self._observer = observer
        self._hidden = ModuleRules(tokens, shape, split)
        self._linear: tuple[Any, Any, float] | None = None
        self._attention: tuple[Any, Any, float] | None = None
        self._inside: set[int] = set()

    def see(self, module: Any, args: Any) -> None:
        """Note a module in which products are expected, and look into the one before."""
        if is_linear(module) and not any(True for _ in module.children()):
            self._linear_ends(self._observer.read())
            self._linear = (module, args, self._observer.read().matrixes)
        elif self._linear is not None:
            self._linear_ends(self._observer.read())
        if is_attention(module) and id(module) not in self._inside:
            self._attention_ends(self._observer.read())
            self._inside = {id(part) for part in module.modules()}
            self._attention = (module, args, self._observer.read().attentions)

    def end(self) -> float:
        """Stop, and return the FLOPs of the forward."""
        seen = self._observer.read()
        self._observer.end()
        self._linear_ends(seen)
        self._attention_ends(seen)
        self.traced, self.saw_attention = seen.traced > 0, seen.attentions > 0
        return float(seen.matrix + seen.attention + self._hidden.end())

    def _linear_ends(self, seen: Any) -> None:
        pending, self._linear = self._linear, None
        if pending is not None and seen.matrixes == pending[2] and not seen.traced:
            self._hidden.see(pending[0], pending[1])

    def _attention_ends(self, seen: Any) -> None:
        pending, self._attention = self._attention, None
        if pending is not None and seen.attentions == pending[2] and not seen.traced:
            self._hidden.see(pending[0], pending[1])


def settle() -> bool:
    """Note the model's facts at the first update; say whether they are new."""
    global _settled  # noqa: PLW0603 - once a process
    facts = RECORDER.facts
    changed = False
    # The first step may hold more than a step (pipelining runs a trial to find shapes), so the
    # first few may correct it.
    if RECORDER.phases.flops and RECORDER.phases.step < _SETTLING_STEPS:
        for name, value in (
            ("model_flops_per_step", RECORDER.phases.flops),
            ("tokens_per_step", RECORDER.phases.tokens or None),
        ):
            if value is not None and facts.get(name) != value:
                facts[name] = value
                changed = True
    if _settled or not _roots:
        return changed
    _settled = True
    facts["parameters"] = _parameters()
    facts["layers"], facts["hidden"] = _shape()
    by = "modules" if products.observe() is None else "operators"
    facts["extra"]["flops_convention"] = CONVENTIONS[by]
    facts["extra"]["model"] = " + ".join(sorted({type(_bare(r)).__name__ for r in _models()}))
    facts["device"], facts["extra"]["precision"] = _device()
    if not RECORDER.phases.tokens:
        RECORDER.miss("tokens per step: the model's input is neither token ids nor a sequence")
    return True


def _bare(module: Any) -> Any:
    """Return the model inside the wrappers of data parallelism and compilation."""
    for _ in range(4):
        inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__.endswith("DataParallel"):
            inner = getattr(module, "module", None)
        if inner is None:
            return module
        module = inner
    return module


def _parameters() -> int:
    """Count parameters once: whole where FSDP shards them, this rank's part where others do."""
    seen: set[int] = set()
    total = 0
    for root in _models():
        sharded = _fsdp_axes(root)
        for parameter in root.parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            total += _held(parameter, sharded)
    return total


def _held(parameter: Any, sharded: Any) -> int:
    count = int(parameter.numel())
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return count
    names = mesh.mesh_dim_names or ()
    for axis, placement in enumerate(parameter.placements):
        name = names[axis] if axis < len(names) else None
        if placement.is_shard() and not (sharded is not None and (name in sharded or name is None)):
            count = -(-count // mesh.size(axis))
    return count


def _fsdp_axes(root: Any) -> Any:
    """Return the names of the mesh axes over which FSDP2 shards, None without it."""
    found: set[str] = set()
    is_sharded = False
    for module in root.modules():
        get_state = getattr(module, "_get_fsdp_state", None)
        if get_state is None:
            continue
        is_sharded = True
        group = getattr(get_state(), "_fsdp_param_group", None)
        mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
        found.update(getattr(mesh, "mesh_dim_names", None) or ())
    return found if is_sharded else None


def _shape() -> tuple[int | None, int | None]:
    """Return (layers, hidden): the longest list of alike blocks, and the width they share."""
    layers = 0
    widths: dict[int, int] = {}
    for root in _models():
        best = 0
        for module in root.modules():
            if type(module).__name__ in ("ModuleList", "Sequential", "ModuleDict"):
                kinds: dict[str, int] = {}
                for child in module.children():
                    if any(True for _ in child.children()):
                        kinds[type(child).__name__] = kinds.get(type(child).__name__, 0) + 1
                best = max(best, *kinds.values(), 0) if kinds else best
            weight = getattr(module, "weight", None)
            if weight is not None and len(getattr(weight, "shape", ())) == 2:
                width = int(weight.shape[-1])
                widths[width] = widths.get(width, 0) + 1
        layers += best
    hidden = max(widths, key=lambda width: widths[width]) if widths else None
    return layers or None, hidden


def _device() -> tuple[str, str]:
    for root in _models():
        for parameter in root.parameters():
            precision = str(parameter.dtype).replace("torch.", "")
            if parameter.device.type == "cuda":
                import torch

                name = torch.cuda.get_device_name(parameter.device)
                if torch.is_autocast_enabled():
                    precision = str(torch.get_autocast_gpu_dtype()).replace("torch.", "")
                return name, precision
            return str(parameter.device.type), precision
    return "cpu", "float32"
