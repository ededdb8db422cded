"""Parts of readers written in C, compiled by this machine; libraries are loaded by ctypes.

A reader works without them, only slower: a library that fails is logged and answered with None.
"""

import contextlib
import ctypes
import logging
import os
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

__all__ = ["compile_c", "kept_library", "temporary_library"]

_log = logging.getLogger(__name__)
_COMPILERS = ("cc", "gcc", "clang")
_LIBRARY = ("-O3", "-shared", "-fPIC")
_LONGEST_S = 30
_MACHINE = f"{sys.platform}-{os.uname().machine}"


def compile_c(source: Path, target: Path, *flags: str) -> None:
    """Compile one C file; raise OSError where that cannot be."""
    # Here, not above: a library that is found needs neither, and they take 2 MB and 5 ms.
    import shlex
    import shutil
    import subprocess

    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:  # such as a quote that is never closed
        raise OSError(f"CC is no command ({error})") from error
    found = (shutil.which(name) for name in given[:1] or _COMPILERS)
    compiler = next((path for path in found if path), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    try:
        subprocess.run(
            [compiler, *given[1:], "-w", *flags, "-o", str(target), str(source)],
            check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_LONGEST_S,
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error


def _compile_library(source: Path, target: Path) -> None:
    if sys.byteorder != "little":
        raise OSError("a big-endian machine")
    compile_c(source, target, *_LIBRARY)


def temporary_library(source: Path) -> Any:
    """Return the library compiled anew, for this process alone; None where it cannot be made.

    Its folder is gone once it is loaded: no cache that somebody else could write to.
    """
    import tempfile

    try:
        with tempfile.TemporaryDirectory(prefix="kansoku-compiled-") as folder:
            target = Path(folder) / f"{source.stem}.so"
            _compile_library(source, target)
            return ctypes.CDLL(str(target))
    except OSError as error:
        _log.info("%s is not compiled: %s", source.name, error)
        return None


def kept_library(source: Path, *, build: bool) -> Any:
    """Return the library from the user's cache; None where it is not there and not to be built.

    For commands, which may end before a compiler would have. Whoever asks for it while another
    process builds it builds it too; the last one's file stays.
    """
    if os.environ.get("KANSOKU_NATIVE") == "0":
        return None
    try:
        # A checksum tells versions apart; it guards nothing. hashlib would load OpenSSL (4 MB).
        text = source.read_bytes()
        version = crc32(repr(_LIBRARY).encode(), crc32(text))
        name = f"{source.stem}-{len(text)}-{version:08x}-{_MACHINE}.so"
        target = _private_folder() / name
        if not target.exists():
            if not build:
                return None
            partial = target.with_suffix(f".{os.getpid()}")
            try:
                _compile_library(source, partial)
                partial.rename(target)
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink()
        _refuse_foreign(target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        _log.info("%s is not used: %s", source.name, error)
        return None


def _private_folder() -> Path:
    """Return the user's cache folder, which nobody else may write to: code is loaded from it."""
    folder = os.environ.get("KANSOKU_CACHE_DIR")
    if not folder:
        base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        folder = str(Path(base) / "kansoku")
    path = Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(path)
    return path


def _refuse_foreign(path: Path) -> None:
    state = path.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{path} belongs to, or may be written by, somebody else")
