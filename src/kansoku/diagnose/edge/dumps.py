"""Fetch Flight Recorder dumps of live processes, from outside and within seconds.

A rank that runs torch's worker server (``torch.distributed.elastic.control_plane.worker_main``)
answers on the UNIX socket that its environment names; the newest dump that it wrote itself lies
under the prefix that its environment names.
"""

import http.client
import os
import socket
import stat
from pathlib import Path

__all__ = ["fetch_dump"]

_TIMEOUT_S = 5.0
_LARGEST_BYTES = 256 << 20
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


class _Unix(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in text.split("\0") if "=" in word)


def _asked(path: str) -> bytes | None:
    """Ask a worker server for its dump; None where it does not answer."""
    connection = _Unix(path)
    try:
        connection.request("POST", "/handler/fr_trace_json", body=b"")
        answer = connection.getresponse()
        data = answer.read(_LARGEST_BYTES)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return data if answer.status == 200 and data else None


def _written(prefix: str, rank: int, pid: int) -> bytes | None:
    """Return the dump that a process wrote itself since it began; None without one.

    Its environment is the user's word: only a plain file of the same user is read.
    """
    try:
        process = Path(f"/proc/{pid}").stat()
        handle = os.open(f"{prefix}{rank}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        mine = stat.S_ISREG(facts.st_mode) and facts.st_uid == process.st_uid
        if not mine or facts.st_mtime < process.st_mtime or facts.st_size > _LARGEST_BYTES:
            return None
        return file.read(_LARGEST_BYTES)


def fetch_dump(pid: int, rank: int, folder: Path) -> Path | None:
    """Keep a live process's Flight Recorder dump in a folder; None where there is none to have."""
    known = _environment(pid)
    served = known.get("TORCH_WORKER_SERVER_SOCKET")
    data = _asked(served) if served else None
    for name in _PREFIXES:
        if data is None and name in known:
            data = _written(known[name], rank, pid)
    if data is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flight_recorder_rank_{rank}{'.json' if data[:1] == b'{' else ''}"
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_bytes(data)
    return draft.replace(path)
