"""What the model is, from the modules that run: parameters, layers, width, tokens, model FLOPs.

Convention ``modules``: every matrix product of a linear, convolution or embedding-free projection
counts 2 FLOPs a multiply-add from its weight's shape and the rows that enter it; every attention
module adds 4 · batch · sequence² · width (full attention, scores and values); forward and backward
together count three forwards; recomputation, evaluation and the optimizer count nothing.
"""

from __future__ import annotations

from typing import Any

from kansoku.capture.payload.recorder import RECORDER

__all__ = ["CONVENTION", "begin", "settle"]

CONVENTION = "modules: 3 × (2 × weights × rows + 4 × batch × sequence² × width)"
_BACKWARD_FACTOR = 3
_SETTLING_STEPS = 4
_known: dict[tuple[Any, ...], tuple[float, float]] = {}
_roots: dict[int, Any] = {}
_settled = False


def _local(tensor: Any) -> Any:
    """Return what this rank holds of a distributed tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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
    tensor = _token_ids(args, kwargs)
    key = (id(module), None if tensor is None else tensor.shape)
    known = _known.get(key)
    if known is None and len(_known) < 256:
        return _Count(module, key, tensor)
    if known is not None:
        RECORDER.phases.flops += known[0]
        RECORDER.phases.tokens = max(RECORDER.phases.tokens, 0.0) + known[1]
    return None


class _Count:
    """Counts one forward of one root module as its parts are called."""

    def __init__(self, root: Any, key: tuple[Any, ...], tensor: Any):
        self.root = root
        self.key = key
        self.tokens = _tokens(tensor)
        self.rows = self.tokens or float(
            tensor.shape[0] if tensor is not None and tensor.shape else 0
        )
        self.flops = 0.0
        self.attention_in: set[int] = set()
        _roots.setdefault(id(root), root)
        self.see(root, (tensor,))

    def see(self, module: Any, args: Any) -> None:
        """Add the FLOPs of one module call."""
        name = type(module).__name__
        weight = getattr(module, "weight", None)
        if "Linear" in name or name == "Conv1D":
            self._linear(weight, args)
        elif name in ("Conv1d", "Conv2d", "Conv3d"):
            self._convolution(module, weight, args)
        if "attention" in name.lower() and id(module) not in self.attention_in:
            self._attention(module, args)

    def _linear(self, weight: Any, args: Any) -> None:
        if weight is None or not args or not hasattr(args[0], "shape") or len(weight.shape) != 2:
            return
        entering = _local(args[0])
        rows = entering.numel() / max(entering.shape[-1], 1)
        shape = _local(weight).shape
        self.flops += 2.0 * rows * shape[0] * shape[1]

    def _convolution(self, module: Any, weight: Any, args: Any) -> None:
        if not args or not hasattr(args[0], "shape"):
            return
        entering = args[0]
        places = float(entering.shape[0])
        sizes = zip(  # noqa: B905 - 3.9
            entering.shape[-len(module.kernel_size) :],
            module.kernel_size, module.stride, module.padding, module.dilation,
        )  # fmt: skip
        for size, kernel, stride, padding, dilation in sizes:
            pad = padding if isinstance(padding, int) else 0
            places *= (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        self.flops += 2.0 * places * _local(weight).numel()

    def _attention(self, module: Any, args: Any) -> None:
        self.attention_in.update(id(part) for part in module.modules())
        entering = args[0] if args and hasattr(args[0], "shape") else None
        if entering is not None and len(entering.shape) == 3:
            batch, sequence, width = entering.shape
        elif self.tokens and self.key[1] is not None and len(self.key[1]) >= 2:
            batch, sequence = self.key[1][:2]
            width = _width(module)
        else:
            return
        self.flops += 4.0 * batch * sequence * sequence * width * _share(module)

    def end(self) -> None:
        """Keep the count for forwards of the same shapes."""
        if not self.flops:  # compiled, or products outside any module: from the weights instead
            self.flops = _from_weights(self.root, self.rows)
        entry = (self.flops * _BACKWARD_FACTOR, self.tokens)
        _known[self.key] = entry
        RECORDER.phases.flops += entry[0]
        RECORDER.phases.tokens += entry[1]


def _share(module: Any) -> float:
    """Return the part of the heads that this rank computes: local over whole weights."""
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if weight is not None and hasattr(weight, "to_local") and weight.numel():
            return float(weight.to_local().numel() / weight.numel())
    return 1.0


def _width(module: Any) -> int:
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if weight is not None and len(weight.shape) == 2:
            return int(weight.shape[1])
    return 0


def _from_weights(root: Any, rows: float) -> float:
    total = 0.0
    counted: set[int] = set()
    for module in root.modules():
        weight = getattr(module, "weight", None)
        if "Linear" in type(module).__name__ and weight is not None and id(module) not in counted:
            counted.add(id(module))
            total += 2.0 * rows * _local(weight).numel()
    return total


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
    facts["extra"]["flops_convention"] = CONVENTION
    facts["extra"]["model"] = " + ".join(sorted({type(_bare(r)).__name__ for r in _roots.values()}))
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
    for root in _roots.values():
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
    for root in _roots.values():
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
    for root in _roots.values():
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
