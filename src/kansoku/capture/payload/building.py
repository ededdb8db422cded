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
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CXX", "C", "against_torch", "built", "cache_folder", "compiler", "extension"]

C = ("CC", "cc", "gcc", "clang")
CXX = ("CXX", "c++", "g++", "clang++")
"""For ``compiler``: the variable that names one, and what it is called otherwise."""
_TIMEOUT_S = 180

# A compiler starts others, which outlive it; and nothing of a killed process runs, so that it could
# end them. A shell leads them as a group, and kills it when the pipe that we hold is closed. It
# waits for what it started: a job that adopts orphans (PID 1 of a container) would keep a zombie of
# each. By KILL, for what a job that ignores TERM starts ignores it too.
_LED = """exec 3<&0 </dev/null
{ read -r _; kill -9 0; } <&3 >/dev/null 2>&1 &
"$@" 3<&-
code=$?
kill -9 $!
wait $! 2>/dev/null
exit $code
"""


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
        ways = commands(path, partial)  # raises where there is no compiler: nothing to be said then
        if note:
            print(note, file=sys.stderr)  # noqa: T201 - there is no logger here
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LD_PRELOAD")}
        error = b"no command"
        for command in ways:
            code, error = _compile(command, environment)
            if code == 0:
                os.rename(partial, target)
                return target
        raise OSError(error.decode("utf-8", "replace")[-400:])


def _compile(command: list[str], environment: Mapping[str, str]) -> tuple[int, bytes]:
    """Return exit code and complaints of a compiler that ends with us, however we end."""
    read_end, held = os.pipe()
    try:
        process = subprocess.Popen(
            ["sh", "-c", _LED, "sh", *command],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError:
        os.close(held)
        raise
    finally:
        os.close(read_end)
    with process:
        try:
            error = process.communicate(timeout=_TIMEOUT_S)[1]
        except subprocess.TimeoutExpired as late:
            raise OSError(f"{command[0]} did not end within {_TIMEOUT_S} s") from late
        finally:
            os.close(held)
    return process.returncode, error


def compiler(
    variable: str,
    *names: str,
    environment: Mapping[str, str] | None = None,
    find: Callable[[str], str | None] = shutil.which,
) -> list[str]:
    """Return the command of a compiler: an environment variable's, else the first installed.

    Its first word is where ``find`` found it. Raise FileNotFoundError where there is none, or the
    variable is no command.
    """
    value = (os.environ if environment is None else environment).get(variable, "")
    try:
        given = shlex.split(value)
    except ValueError as error:  # such as a quote that is never closed
        raise FileNotFoundError(f"no compiler: {variable} is no command ({error})") from error
    for name in given[:1] or names:
        if path := find(name):
            return [path, *given[1:]]
    raise FileNotFoundError(f"no compiler ({', '.join(given[:1] or names)})")


def extension(source: str, module: str, *parts: str) -> Any:
    """Return the Python module built from a C file, for this very interpreter.

    ``parts`` are further files beside it, headers among them.
    """
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        raise FileNotFoundError("no Python.h")

    def commands(path: str, target: str) -> list[list[str]]:
        flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-w", "-I", include]
        beside = (os.path.join(folder, part) for part in parts if part.endswith(".c"))
        return [[*compiler(*C), *flags, path, *beside, "-o", target]]

    folder = os.path.dirname(os.path.abspath(__file__))
    texts = []
    for part in parts:
        with open(os.path.join(folder, part), "rb") as stream:
            texts.append(stream.read())
    facts = (sysconfig.get_config_var("SOABI"), sys.version, *texts)
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
            *compiler(*CXX), "-O2", "-shared", "-fPIC", "-w", *defined,
            "-I", os.path.join(root, "include"),
            "-I", os.path.join(root, "include", "torch", "csrc", "api", "include"),
            path, "-o", target, "-L", os.path.join(root, "lib"), "-ltorch_cpu", "-lc10",
        ]  # fmt: skip
        return [[*command, standard] for standard in ("-std=c++20", "-std=c++17")]

    facts = (version, torch.version.git_version, defined, platform.machine())
    return built(source, f"{stem}-{version}", facts, commands, note)
