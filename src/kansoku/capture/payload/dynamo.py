"""What dynamo compiles, and what it may look through: not at the wrappers in C."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from kansoku.capture.payload.recorder import RECORDER
from kansoku.capture.payload.wrapping import UNDO, Wrapper, replace
from kansoku.model import ring

__all__ = ["CODE", "SEEN", "hide", "watch_compile"]

_COMPILE = ring.KIND_CODES["compile"]
CODE: set[Any] = set()
"""The code of our wrapper of modules, which dynamo steps over."""


class _Seen:
    """What is known of dynamo in this process."""

    def __init__(self) -> None:
        self.used = False
        """It has to look through the wrapper of modules from now on."""
        self.modules: Wrapper | None = None
        """The wrapper of modules in place."""


SEEN = _Seen()


def watch_compile(module: ModuleType) -> None:
    """Record what dynamo compiles."""
    spans: list[int] = []

    def starts(*_: Any) -> None:
        try:
            _dynamo_is_used()
            spans.append(RECORDER.open(_COMPILE, "torch.compile"))
        except Exception:
            RECORDER.failed()

    def ends(*_: Any) -> None:
        try:
            if spans:
                RECORDER.close(spans.pop())
        except Exception:
            RECORDER.failed()

    handler = module.callback_handler
    handler.register_start_callback(starts)
    handler.register_end_callback(ends)
    UNDO.append(lambda: handler.remove_start_callback(starts))
    UNDO.append(lambda: handler.remove_end_callback(ends))


def _dynamo_is_used() -> None:
    """Put the wrapper of modules that dynamo can look through in its place again, for good."""
    SEEN.used = True
    if SEEN.modules is not None:
        SEEN.modules.slow_down()


def _compiles_plain(original: Any) -> Any:
    """Let ``torch.compile(model.__call__)`` have torch's own function: ours is stepped over."""

    @functools.wraps(original)
    def __call__(self: Any, fn: Any) -> Any:  # noqa: N807 - the one wrapped
        function = getattr(fn, "__func__", None)
        if function is not None and getattr(function, "__code__", None) in CODE:
            fn = function.__wrapped__.__get__(fn.__self__)
        return original(self, fn)

    return __call__


def hide(module: ModuleType) -> None:
    """Tell dynamo to step over our frames where it resumes in plain Python after a graph break."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the one wrapped
            try:
                _dynamo_is_used()
            except Exception:
                RECORDER.failed()
            original(self, *args, **kwargs)

        return __init__

    if hasattr(module, "OptimizeContext"):
        replace(module.OptimizeContext, "__init__", make)
    if hasattr(module, "_TorchDynamoContext"):
        replace(module._TorchDynamoContext, "__call__", _compiles_plain)  # noqa: SLF001 - the base
    skip = getattr(module, "skip_code", None)
    if skip is not None:
        for code in CODE:
            skip(code)
