"""PyTorch Flight Recorder dumps: pickles of every torch version since 2.2, and their JSON form.

A dump is untrusted input. The unpickler refuses every global, so a pickle can hold numbers, text,
lists and dictionaries and nothing else; size and depth are bounded.
"""

import io
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from kansoku.errors import InputError

__all__ = ["rank_in_name", "read_dump"]

# A dump of 2,000 entries with stacks is about 3 MB; the largest buffers in use hold 20,000.
_LARGEST_BYTES = 256 << 20
_RANK_IN_NAME = re.compile(r"(?:rank|dump|trace)[_-]?(?:rank[_-]?)?(\d{1,7})(?!.*\d)|(\d{1,7})$")


class _Locked(pickle.Unpickler):
    """Reads plain data; any class, function or persistent object is refused."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"refused the global {module_name}.{global_name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError(f"refused the persistent object {pid!r}")


def rank_in_name(path: Path) -> int | None:
    """Return the rank that a dump's file name ends in (``nccl_trace_rank_3``, ``_dump_3``)."""
    match = _RANK_IN_NAME.search(path.name.removesuffix(".json").removesuffix(".pickle"))
    return int(match[1] or match[2]) if match else None


def read_dump(path: Path) -> Mapping[str, Any]:
    """Return a dump's dictionary; raise InputError for anything that is not one."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError("larger than 256 MiB: not a Flight Recorder dump", where=str(path))
        data = path.read_bytes()
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
    if not data:
        raise InputError("empty dump: the rank died while writing it", where=str(path))
    try:
        is_json = data.lstrip()[:1] == b"{"
        dump = json.loads(data) if is_json else _Locked(io.BytesIO(data)).load()
    except (
        pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError,
        AttributeError, MemoryError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise InputError(
            f"not a Flight Recorder dump, or cut off: {error}", where=str(path)
        ) from None
    if not isinstance(dump, dict) or not {"entries", "pg_status", "pg_config"} & dump.keys():
        raise InputError("no entries, pg_config or pg_status in it", where=str(path))
    return dump
