"""Compile the native parts once, for this interpreter and this torch, and keep them per user."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

__all__ = ["against_torch", "built", "cache_folder", "compiler", "extension"]

_TIMEOUT_S = 180


def cache_folder() -> str:
    """Return the folder of what was built, made private to the user."""
    folder = os.environ.get("KANSOKU_CACHE_DIR")
    if not folder:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(base, "kansoku")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.stat(folder).st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def built(
    source: str,
    stem: str,
    facts: tuple[object, ...],
    commands: Callable[[str, str], list[list[str]]],
    note: str = "",
) -> str:
    """Return the path of a library built from ``source``, compiling it if it is not there yet.

    ``facts`` are what the result depends on besides the source. ``commands(path, target)`` are
    tried in turn. Raise OSError with the compiler's last words where none succeeds. ``note`` is
    said on stderr before a build that takes long.
    """
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), source)
    with open(path, "rb") as stream:
        text = stream.read()
    digest = hashlib.sha256(text + repr(facts).encode()).hexdigest()[:16]
    target = os.path.join(cache_folder(), f"{stem}-{digest}.so")
    if os.path.exists(target):
        return target
    with open(target + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the ranks compiles, the others wait
        if os.path.exists(target):
            return target
        partial = f"{target}.{os.getpid()}"
        if note:
            print(note, file=sys.stderr)  # noqa: T201 - there is no logger here
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LD_PRELOAD")}
        error = b""
        for command in commands(path, partial):
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_TIMEOUT_S,
                env=environment,
                check=False,
            )
            if done.returncode == 0:
                os.rename(partial, target)
                return target
            error = done.stderr
        raise OSError(error.decode("utf-8", "replace")[-400:])


def compiler(variable: str, *names: str) -> list[str]:
    """Return the compiler of an environment variable, else the first that is installed."""
    found = shlex.split(os.environ.get(variable, ""))
    found = found or [name for name in names if shutil.which(name)][:1]
    if not found:
        raise FileNotFoundError(f"no compiler ({', '.join(names)})")
    return found


def extension(source: str, module: str) -> Any:
    """Return the Python module built from one C file, for this very interpreter."""
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        raise FileNotFoundError("no Python.h")

    def commands(path: str, target: str) -> list[list[str]]:
        flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-w", "-I", include]
        return [[*compiler("CC", "cc", "gcc", "clang"), *flags, path, "-o", target]]

    facts = (sysconfig.get_config_var("SOABI"), sys.version)
    path = built(source, module.strip("_"), facts, commands)
    loader = importlib.machinery.ExtensionFileLoader(module, path)
    spec = importlib.util.spec_from_file_location(module, path, loader=loader)
    assert spec is not None  # noqa: S101 - a loader was given
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return made


def against_torch(torch: Any, source: str, stem: str, note: str) -> str:
    """Return the path of the library built from one C++ file against this very torch."""
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)  # noqa: SLF001 - the only place it is told
    version = str(torch.__version__)
    root = os.path.dirname(os.path.abspath(torch.__file__))
    # torch is built with NDEBUG, on which members of its classes depend.
    defined = (f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-DNDEBUG", "-DUSE_DISTRIBUTED", "-DUSE_C10D")

    def commands(path: str, target: str) -> list[list[str]]:
        command = [
            *compiler("CXX", "c++", "g++", "clang++"), "-O2", "-shared", "-fPIC", "-w", *defined,
            "-I", os.path.join(root, "include"),
            "-I", os.path.join(root, "include", "torch", "csrc", "api", "include"),
            path, "-o", target, "-L", os.path.join(root, "lib"), "-ltorch_cpu", "-lc10",
        ]  # fmt: skip
        return [[*command, standard] for standard in ("-std=c++20", "-std=c++17")]

    facts = (version, torch.version.git_version, defined, platform.machine())
    return built(source, f"{stem}-{version}", facts, commands, note)
