"""Build NCCL's profiler plugin where a C compiler is, once a source text."""

from __future__ import annotations

import hashlib
import os
import subprocess

from kansoku.capture.payload import building

__all__ = ["BuildError", "build_plugin"]

_HERE = os.path.dirname(os.path.abspath(__file__))
_SOURCES = ("nccl_profiler.c", "nccl_profiler.h")
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
_NAME = "libnccl-profiler-kansoku.so"


class BuildError(Exception):
    """There is no compiler, or it refused."""


def build_plugin(folder: str, *, compiler: str | None = None) -> str:
    """Return the path of the plugin in ``folder``, built if it is not there yet.

    The compiler is the environment's CC, else cc, gcc or clang. Raise BuildError where there is
    none or it fails; the message is the compiler's.
    """
    try:
        found = [compiler] if compiler else building.compiler(*building.C)
    except FileNotFoundError as error:
        raise BuildError(str(error)) from error
    digest = hashlib.sha256()
    for name in _SOURCES:
        with open(os.path.join(_HERE, name), "rb") as stream:
            digest.update(stream.read())
    target = os.path.join(folder, digest.hexdigest()[:16], _NAME)
    if os.path.exists(target):
        return target
    os.makedirs(os.path.dirname(target), exist_ok=True)
    partial = f"{target}.{os.getpid()}"
    command = [*found, *_FLAGS, "-o", partial, os.path.join(_HERE, _SOURCES[0]), "-lpthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{found[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{found[0]}: {done.stderr.strip()[-2000:]}")
    os.replace(partial, target)
    return target
