"""The cheap places where torch passes by in every training, wrapped.

Nothing here touches a tensor's value or the graph: no backward hooks, no module hooks, nothing
inside compiled code. ``install`` and ``uninstall`` put the wrappers in and take them out again, so
that a job with recording off runs exactly what it would run without us.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kansoku.capture.payload import bootstrap, census, device, dynamo, groups
from kansoku.capture.payload.recorder import RECORDER
from kansoku.capture.payload.wrapping import QUICKENING, UNDO, replace
from kansoku.model import ring

__all__ = ["install", "switch", "uninstall"]

_KIND = ring.KIND_CODES
_FORWARD, _BACKWARD = _KIND["forward"], _KIND["backward"]
_DATA, _EVALUATION = _KIND["data_wait"], _KIND["evaluation"]
_CHECKPOINT, _GC = _KIND["checkpoint"], _KIND["gc"]
_GC_MIN_NS = 500_000
_SETTLING_UPDATES = 16
"""After so many updates, of all optimizers, the model's facts stand."""
_clock = time.monotonic_ns


class _State:
    """What the module wrapper looks at on every call."""

    __slots__ = ("counting", "depth", "eval_trains", "last_eval", "updates")

    def __init__(self) -> None:
        self.depth = 0
        """0 outside any module, 1 inside one, 2 inside one whose parts are being counted."""
        self.counting: Any = None
        self.eval_trains = False
        self.last_eval = 0
        self.updates = 0
        """Updates seen, as far as the settling ones."""


_state: Any = _State()
"""That of the wrappers in C once they are in place, with the same attributes."""


def install() -> None:
    """Wrap what torch offers; every part that fails is missing by itself."""
    import torch

    RECORDER.facts["torch"] = str(torch.__version__)
    for part in (
        _find_fake_mode,
        _wrap_modules,
        _wrap_engine,
        _wrap_optimizers,
        _wrap_loader,
        _wrap_checkpoints,
        _watch_gc,
        groups.install,
    ):
        try:
            part(torch)
        except Exception:
            RECORDER.failed()
            name = getattr(part, "__name__", "?").strip("_").replace("_", " ")
            RECORDER.miss(f"{name} failed on torch {torch.__version__}")
    if _is_quick():
        _put_in_c()
    bootstrap.after_import("torch._dynamo.callback", dynamo.watch_compile)
    bootstrap.after_import("torch._dynamo.eval_frame", dynamo.hide)
    bootstrap.after_import("torch.distributed.checkpoint", _wrap_distributed_checkpoint)
    bootstrap.after_import("safetensors.torch", _wrap_safetensors)


def uninstall() -> None:
    """Take the wrappers out again."""
    QUICKENING.clear()
    while UNDO:
        try:
            UNDO.pop()()
        except Exception:
            RECORDER.failed()


def switch(on: bool) -> None:  # noqa: FBT001 - it is a switch
    """Turn recording on or off inside the running process, best between two steps."""
    if on == RECORDER.on:
        return
    RECORDER.on = on
    if on:
        install()
    else:
        uninstall()
    if RECORDER.native is not None:
        RECORDER.native.enable(on=on)
    RECORDER.switched(on)


# -- the same in C ---------------------------------------------------------------------------------


def _is_quick() -> bool:
    return _state is RECORDER.calls


def _is_settled() -> bool:
    """Say whether a step is from now on as all others, and nothing of the next one has begun."""
    return (
        _state.updates >= _SETTLING_UPDATES
        and RECORDER.calls is not None
        and not _is_quick()
        and not RECORDER.on_device
        and RECORDER.phases.parent == RECORDER.phases.step_span
    )


def _take_over() -> None:
    if _is_settled():
        _quicken()
    elif dynamo.SEEN.modules is not None:
        dynamo.SEEN.modules.again()


def _quicken() -> None:
    """Let the wrappers in C take over what nearly every step does."""
    global _state  # noqa: PLW0603 - once a ring
    calls = RECORDER.calls
    try:
        for name in _State.__slots__:
            setattr(calls, name, getattr(_state, name))
        calls.begin(
            RECORDER.phases, importlib.import_module("torch").is_grad_enabled, _fake_mode, _tracing,
            _swallow, _Engine.broken, _update_begins, _update_ends,
        )  # fmt: skip
        calls.remember(*census.last())
        _state = calls
        _put_in_c()
    except Exception:
        RECORDER.failed()
        calls.stop()
        RECORDER.calls = None


def _put_in_c() -> None:
    for quicken in QUICKENING:
        try:
            quicken()
        except Exception:
            RECORDER.failed()


def _forget() -> None:
    """Begin anew in a forked child, whose recorder does so too."""
    global _state  # noqa: PLW0603 - once a process
    _state = _State()


os.register_at_fork(after_in_child=_forget)


def _swallow(error: Exception) -> None:
    """Count what failed in a wrapper in C."""
    try:
        raise error
    except Exception:
        RECORDER.failed()


# -- forward and evaluation ------------------------------------------------------------------------


def _wrap_modules(torch: ModuleType) -> None:
    module = torch.nn.Module
    # torch's own two lines of __call__ are repeated below, where nobody replaced them: a call less
    # in each of hundreds of inner modules, which is most of what a forward pays for us.
    own = module.__dict__["__call__"] is module.__dict__.get("_wrapped_call_impl") and all(
        hasattr(module, name) for name in ("_call_impl", "_compiled_call_impl")
    )

    def quick(_: Any, slowly: Any) -> Any:
        return RECORDER.calls.call(module, slowly) if own and not dynamo.SEEN.used else slowly

    dynamo.SEEN.modules = replace(
        module, "__call__", functools.partial(_module_call, torch, own), quick
    )


def _see(module: Any, args: Any) -> None:
    """Let the census look at an inner module of a forward that it counts."""
    try:
        _state.counting.see(module, args)
    except Exception:
        _failed()


def _module_call(torch: ModuleType, own: bool, original: Any) -> Any:  # noqa: FBT001 - bound once
    """Return the wrapper of ``Module.__call__``; ``own``: torch's own original."""
    is_compiling = torch.compiler.is_dynamo_compiling
    is_grad_enabled = torch.is_grad_enabled

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - the one wrapped
        # Compiled code sees a plain call: the first test folds to a constant there. Every
        # module of a model passes here at every step: the inner ones are let through next, with
        # no frame more than torch has, since a job may nest as deep as the interpreter lets it.
        if is_compiling():
            return original(self, *args, **kwargs)
        if own and _state.depth:
            if _state.depth > 1:
                _see(self, args)
            if self._compiled_call_impl is not None:
                return self._compiled_call_impl(*args, **kwargs)
            return self._call_impl(*args, **kwargs)
        return outer(self, args, kwargs)

    def outer(self: Any, args: Any, kwargs: Any) -> Any:
        if _state.depth or _is_unobserved():
            if _state.depth > 1:
                _see(self, args)
            return original(self, *args, **kwargs)
        _take_over()
        state = _state
        state.depth = 1
        span = 0
        try:
            span = _forward_begins(self, args, kwargs, is_grad_enabled())
        except Exception:
            _failed()
        try:
            return original(self, *args, **kwargs)
        finally:
            state.depth = 0
            if span:
                _forward_ends(span)

    __call__.__wrapped__ = original  # type: ignore[attr-defined]
    dynamo.CODE.update((__call__.__code__, outer.__code__, _see.__code__))
    return __call__


def _forward_begins(module: Any, args: Any, kwargs: Any, grad: bool) -> int:  # noqa: FBT001
    recorder, state = RECORDER, _state
    if _fake_mode() is not None or _tracing() is not None:
        return 0  # only finds out shapes or operations; a tracer sees who reads a shape
    if args and getattr(args[0], "is_meta", False):
        return 0
    name = type(module).__name__
    if not grad or not (module.training or state.eval_trains):
        if recorder.inside(_BACKWARD):
            return recorder.open(_FORWARD, name, ring.FLAG_RECOMPUTE)
        span = recorder.open(_EVALUATION, name)
        state.last_eval = span if grad else 0
        return span
    if recorder.inside(_BACKWARD):
        return recorder.open(_FORWARD, name, ring.FLAG_RECOMPUTE)
    if recorder.writer is None and _is_part(module):
        return 0
    span = recorder.open(_FORWARD, name)
    if span:
        if recorder.on_device:
            device.begins(span)
        try:
            state.counting = census.begin(module, args, kwargs)
        except Exception:  # of an input that cannot be looked at: the phase is open all the same
            state.counting = None
            recorder.failed()
        if state.counting is not None:
            state.depth = 2
    return span


def _fake_mode() -> Any:
    """Return the active fake tensor mode; torch's own question stands here once it is found."""


def _tracing() -> Any:
    """Return the state of the tracer that is at work; torch's own question stands here too."""


def _find_fake_mode(torch: ModuleType) -> None:
    """Find torch's cheap questions whether a fake tensor mode or a tracer is active."""
    global _fake_mode, _tracing  # noqa: PLW0603 - once a process
    key = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001 - no public question is as cheap
    found = functools.partial(torch._C._get_dispatch_mode, key)  # noqa: SLF001 - the same
    found()
    _fake_mode = found
    _tracing = torch._C._get_tracing_state  # noqa: SLF001 - the same


def _is_unobserved() -> bool:
    """Say whether another thread than the observed one calls: it must not change our state."""
    return RECORDER.writer is not None and threading.get_ident() != RECORDER.thread


def _failed() -> None:
    """Count an error, also where the job's recursion leaves no room for that."""
    try:
        RECORDER.failed()
    except Exception:
        pass


def _is_part(module: Any) -> bool:
    """Say whether a module by itself is no model: a loss or an activation, before any training."""
    return not any(True for _ in module.parameters())


def _forward_ends(span: int) -> None:
    state = _state
    try:
        if state.counting is not None:
            counting, state.counting = state.counting, None
            counting.end()
        if RECORDER.on_device:
            device.ends(span)
        RECORDER.close(span)
    except Exception:
        RECORDER.failed()


# -- backward --------------------------------------------------------------------------------------


class _Engine:
    """Stands for torch's autograd engine; every way to run a backward from Python passes here."""

    def __init__(self, engine: Any):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine inside a backward phase."""
        span, state = 0, _state
        if _fake_mode() is not None or _is_unobserved():
            return self._engine.run_backward(*args, **kwargs)
        try:
            if state.last_eval:  # a model in eval mode that is trained nevertheless
                if RECORDER.writer is not None:
                    RECORDER.writer.set_kind(state.last_eval, _FORWARD, 0)
                state.eval_trains, state.last_eval = True, 0
            span = RECORDER.open(_BACKWARD, "backward")
            if RECORDER.on_device:
                device.begins(span)
        except Exception:
            RECORDER.failed()
        # A forward repeated inside the backward is at depth 0 again: it is seen as recomputation.
        depth, state.depth = state.depth, 0
        try:
            return self._engine.run_backward(*args, **kwargs)
        except BaseException:
            self.broken()
            raise
        finally:
            state.depth = depth
            try:
                if RECORDER.on_device:
                    device.ends(span)
                RECORDER.close(span)
            except Exception:
                RECORDER.failed()

    @staticmethod
    def broken() -> None:
        """Close the wait that the engine's last callback would have closed."""
        try:
            if RECORDER.native is not None:
                RECORDER.native.backward_ended()
        except Exception:
            RECORDER.failed()


def _wrap_engine(torch: ModuleType) -> None:
    def quick(original: Any, slowly: Any) -> Any:
        return RECORDER.calls.engine(original, slowly.run_backward)

    replace(torch.autograd.Variable, "_execution_engine", _Engine, quick)


# -- optimizer -------------------------------------------------------------------------------------


def _update_begins(optimizer: Any, *_: Any) -> None:
    try:
        RECORDER.update_begins(optimizer)
    except Exception:
        RECORDER.failed()


def _update_ends(optimizer: Any, *_: Any) -> None:
    recorder, state = RECORDER, _state
    try:
        if state.updates < _SETTLING_UPDATES and recorder.writer is not None:
            state.updates += 1
            recorder.on_device = device.is_used()
            if census.settle():
                groups.name_axes()
                recorder.write_facts()
        recorder.update_ends(optimizer)
        if device.PENDING:
            device.collect()
    except Exception:
        recorder.failed()


def _wrap_optimizers(_: ModuleType) -> None:
    module = importlib.import_module("torch.optim.optimizer")
    before = module.register_optimizer_step_pre_hook(_update_begins)
    after = module.register_optimizer_step_post_hook(_update_ends)
    UNDO.extend((before.remove, after.remove))

    def quicken() -> None:
        # In their places: torch may be going through these hooks, where none may come or go.
        for handle, hook in ((before, "update_begins"), (after, "update_ends")):
            hooks = handle.hooks_dict_ref()
            if handle.id in hooks:
                hooks[handle.id] = getattr(RECORDER.calls, hook)

    QUICKENING.append(quicken)

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the one wrapped
            original(self, *args, **kwargs)
            try:
                RECORDER.optimizers.add(self)
            except Exception:
                RECORDER.failed()

        return __init__

    replace(module.Optimizer, "__init__", make)


# -- data, checkpoints, pauses ---------------------------------------------------------------------


def _phase(kind: int, name: str | None = None) -> Callable[[Any], Any]:
    """Return a maker of wrappers that record each call as one phase."""

    def make(original: Any) -> Any:
        label = str(name or getattr(original, "__name__", "?"))

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            span = 0
            try:
                span = RECORDER.open(kind, label)
            except Exception:
                RECORDER.failed()
            try:
                return original(*args, **kwargs)
            finally:
                try:
                    RECORDER.close(span)
                except Exception:
                    RECORDER.failed()

        return wrapper

    return make


def _wrap_loader(torch: ModuleType) -> None:
    import torch.utils.data.dataloader as loader

    is_grad_enabled = torch.is_grad_enabled
    iterator = loader._BaseDataLoaderIter  # noqa: SLF001 - the only place all pass

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def __next__(self: Any) -> Any:  # noqa: N807 - the one wrapped
            span = 0
            try:
                flags = 0 if is_grad_enabled() else ring.FLAG_EVALUATES
                span = RECORDER.open(_DATA, "DataLoader", flags)
            except Exception:
                RECORDER.failed()
            try:
                return original(self)
            finally:
                try:
                    RECORDER.close(span)
                except Exception:
                    RECORDER.failed()

        return __next__

    def quick(original: Any, slowly: Any) -> Any:
        return RECORDER.calls.next(iterator, original, slowly)

    replace(iterator, "__next__", make, quick)


def _wrap_checkpoints(torch: ModuleType) -> None:
    replace(torch, "save", _phase(_CHECKPOINT, "torch.save"))
    replace(torch, "load", _phase(_CHECKPOINT, "torch.load"))


def _wrap_distributed_checkpoint(module: ModuleType) -> None:
    for name in ("save", "load", "async_save"):
        if hasattr(module, name):
            replace(module, name, _phase(_CHECKPOINT, f"distributed.checkpoint.{name}"))


def _wrap_safetensors(module: ModuleType) -> None:
    for name in ("save_file", "load_file"):
        replace(module, name, _phase(_CHECKPOINT, f"safetensors.{name}"))


def _watch_gc(_: ModuleType) -> None:
    began = 0

    def pause(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = _clock()
            return
        now = _clock()
        if now - began >= _GC_MIN_NS:
            try:
                RECORDER.add_closed(_GC, f"generation {info['generation']}", began, now)
            except Exception:
                RECORDER.failed()

    gc.callbacks.append(pause)
    UNDO.append(lambda: gc.callbacks.remove(pause))
