"""The products of a forward from its modules: what counts where there is no compiled part.

Less is seen so: products that pass by every module are not, and how attention is split is guessed.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from kansoku.capture.payload.split import Split

__all__ = ["ModuleRules", "from_weights", "is_attention", "is_compiled", "is_linear"]


def is_linear(module: Any) -> bool:
    """Say whether a module multiplies rows by its weight."""
    name = type(module).__name__
    return "Linear" in name or name == "Conv1D"


def is_attention(module: Any) -> bool:
    """Say whether a module is named as one of full attention."""
    name = type(module).__name__.lower()
    return "attention" in name and "linear" not in name


def is_compiled(root: Any) -> bool:
    """Say whether torch.compile has a part of the model."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in root.modules()
    )


def from_weights(root: Any, rows: float, split: Split) -> float:
    """Return the FLOPs of one pass of ``rows`` through every linear layer, this rank's share."""
    total = 0.0
    parts = {id(part) for part in split.parts}
    for module in root.modules():
        weight: Any = getattr(module, "weight", None)
        if is_linear(module) and len(getattr(weight, "shape", ())) == 2:
            share = 1.0 if id(weight) in parts else split.share
            total += 2.0 * rows * weight.numel() * share
        inner = getattr(module, "in_proj_weight", None)
        if inner is not None:
            total += 2.0 * rows * inner.numel() * split.share
    return total


class ModuleRules:
    """Counts one forward as its modules are called."""

    traced = False
    """Whether a compiler traced in it: not seen from the modules."""

    def __init__(self, tokens: float, shape: Any, split: Split):
        self.flops = 0.0
        self._tokens = tokens
        self._shape = shape
        self._split = split
        self._parts = {id(part) for part in split.parts}
        self._inside: set[int] = set()
        self._named = 0.0
        self._called: float | None = None
        self._last_is_split = False
        self._in_whole = False
        self._undo = _nothing

    def see(self, module: Any, args: Any) -> None:
        """Add the FLOPs of one module call."""
        self._in_whole = False
        name = type(module).__name__
        if name == "MultiheadAttention":
            self._multihead(module, args)
        elif is_linear(module):
            self._linear(getattr(module, "weight", None), args)
        elif name in ("Conv1d", "Conv2d", "Conv3d"):
            self._convolution(module, args)
        elif is_attention(module) and id(module) not in self._inside:
            self._inside.update(id(part) for part in module.modules())
            self._attention(module, args)

    def see_attention(self, root: Any) -> None:
        """Add the attention of a model whose modules are not called one by one."""
        for module in root.modules():
            if is_attention(module) and id(module) not in self._inside:
                self._inside.update(id(part) for part in module.modules())
                self._attention(module, ())

    def end(self) -> float:
        """Return the FLOPs of the forward; attention by its calls where any was seen."""
        self._undo()
        return self.flops + (self._named if self._called is None else self._called)

    def _linear(self, weight: Any, args: Any) -> None:
        if weight is None or not args or not hasattr(args[0], "shape") or len(weight.shape) != 2:
            return
        rows = args[0].numel() / max(args[0].shape[-1], 1)
        if rows * self._split.ranks == self._tokens:  # a part of the sequence, to be gathered
            rows = self._tokens
        share = 1.0 if id(weight) in self._parts else self._split.share
        self._last_is_split = any(p.is_shard() for p in getattr(weight, "placements", ()))
        self.flops += 2.0 * rows * weight.shape[0] * weight.shape[1] * share

    def _convolution(self, module: Any, args: Any) -> None:
        if not args or not hasattr(args[0], "shape"):
            return
        entering = args[0]
        places = float(entering.shape[0])
        sizes = zip(  # noqa: B905 - 3.9
            entering.shape[-len(module.kernel_size) :],
            module.kernel_size, module.stride, module.padding, module.dilation,
        )  # fmt: skip
        for size, kernel, stride, padding, dilation in sizes:
            if padding == "same":
                places *= size
                continue
            pad = padding if isinstance(padding, int) else 0
            places *= (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        self.flops += 2.0 * places * module.weight.numel() * self._split.share

    def _multihead(self, module: Any, args: Any) -> None:
        """Torch's own attention multiplies by its weights without calling a module."""
        self._inside.update(id(part) for part in module.modules())
        if len(args) < 3:
            return
        query, key, value = args[:3]
        width = module.embed_dim
        rows, keys = (tensor.numel() / tensor.shape[-1] for tensor in (query, key))
        entering = rows * width + keys * (key.shape[-1] + value.shape[-1])
        sequence = -2 if module.batch_first or len(key.shape) == 2 else 0
        share = self._split.share
        self.flops += 2.0 * (entering + rows * width) * width * share
        self.flops += 4.0 * rows * key.shape[sequence] * width * share
        self._in_whole = True

    def _attention(self, module: Any, args: Any) -> None:
        entering = args[0] if args and hasattr(args[0], "shape") else None
        if entering is not None and len(entering.shape) == 3:
            batch, sequence, width = entering.shape
        elif self._tokens and self._shape is not None and len(self._shape) >= 2:
            batch, sequence = self._shape[:2]
            width = _width(module)
        else:
            return
        self._named += 4.0 * batch * sequence * sequence * width * self._split.share

    def _called_with(self, query: Any, key: Any, value: Any) -> None:
        if self._in_whole:
            return
        share = 1.0 if self._last_is_split else self._split.share
        pairs = query.numel() / query.shape[-1] * key.shape[-2]
        flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1]) * share
        self._called = (self._called or 0.0) + flops

    @property
    def saw_attention(self) -> bool:
        """Whether attention was called or is in a module that was."""
        return self._called is not None or bool(self._inside)

    def watch(self, root: Any) -> None:
        """Watch torch's attention during this forward, where no compiler looks at the function."""
        if _may_compile(root):
            return
        from torch.nn import functional

        original = functional.scaled_dot_product_attention

        @functools.wraps(original)
        def scaled_dot_product_attention(
            query: Any, key: Any, value: Any, *a: Any, **k: Any
        ) -> Any:
            try:
                self._called_with(query, key, value)
            except Exception:
                self._called = self._called or None
            return original(query, key, value, *a, **k)

        functional.scaled_dot_product_attention = scaled_dot_product_attention

        def undo() -> None:
            if functional.scaled_dot_product_attention is scaled_dot_product_attention:
                functional.scaled_dot_product_attention = original

        self._undo = undo


def _nothing() -> None:
    """Stand for the undoing of nothing."""


def _may_compile(root: Any) -> bool:
    """Say whether a compiler may look at this forward: its guards hold the functions it saw."""
    if is_compiled(root):
        return True
    frame = sys.modules.get("torch._dynamo.eval_frame")
    if frame is None:
        return False
    backends = getattr(frame, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())


def _width(module: Any) -> int:
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if weight is not None and len(weight.shape) == 2:
            return int(weight.shape[1])
    return 0
