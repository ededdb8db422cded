"""Start the recorder when torch is imported; do nothing and cost nothing otherwise."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["activate", "after_import", "arm", "warn"]

_started = False
_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
_finding: set[str] = set()


def warn(message: str) -> None:
    """Say one line on stderr where the user asked to hear us; never raise."""
    try:
        if os.environ.get("KANSOKU_DEBUG"):
            print(f"kansoku: {message}", file=sys.stderr)  # noqa: T201 - there is no logger here
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
    except Exception:
        pass


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs callbacks right after the execution of modules somebody waits for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        del path, target  # the interface names them
        if fullname not in _waiting or fullname in _finding:
            return None
        _finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        except Exception:
            return None
        finally:
            _finding.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _ran(fullname, module)

        try:
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        except Exception:
            warn(f"cannot wait for {fullname}")
        return spec


def _ran(name: str, module: ModuleType) -> None:
    for callback in _waiting.pop(name, []):
        try:
            callback(module)
        except Exception:
            warn(f"hook of {name} failed")


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback`` with the module once it is imported, at once if it is already."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        try:
            callback(module)
        except Exception:
            warn(f"hook of {name} failed")
        return
    _waiting.setdefault(name, []).append(callback)
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def arm() -> None:
    """Wait for torch where it will not call ``activate`` by itself (``sitecustomize`` calls)."""
    if os.environ.get("KANSOKU_DISABLE") == "1":
        return
    after_import("torch", lambda _: activate())


def activate() -> None:
    """Start the recorder; the entry point in the group ``torch.backends``. Never raises."""
    global _started  # noqa: PLW0603 - once a process
    try:
        if _started or os.environ.get("KANSOKU_DISABLE") == "1":
            return
        _started = True
        from kansoku.capture.payload.hooks import install

        install()
    except Exception:
        warn("the recorder could not start; the job runs without it")
