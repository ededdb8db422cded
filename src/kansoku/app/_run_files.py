"""Folders and ``run.json`` of a run that is recorded, also where the disk is full."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["make_ring_dir", "refusal", "write_facts", "write_in_place"]

_PROBE_BYTES = 64 << 10


def make_ring_dir(folder: Path) -> None:
    """Make the folder for rings, beside those of other users. Raise OSError where it cannot be."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.parent.stat().st_uid == os.getuid():
        folder.parent.chmod(0o1777)  # several users of one node, as in /tmp
    folder.mkdir(mode=0o700, exist_ok=True)


def refusal(folder: Path) -> str | None:
    """Say why nothing can be written to a folder now; None where it can."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        return error.strerror
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def write_facts(out: Path, facts: Mapping[str, Any]) -> None:
    """Write ``run.json``. Raise OSError where it cannot be; nothing partial is left."""
    partial = out / f".run.json.{os.getpid()}"
    try:
        partial.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        partial.replace(out / "run.json")
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_in_place(file: Path, facts: Mapping[str, Any]) -> bool:
    """Write over the file that is there, within the room it has; say whether it was done.

    On a full disk this needs no new block. Ranks are left out where they would not fit: the rings
    say them too.
    """
    try:
        with file.open("r+b", buffering=0) as stream:
            room = max(os.fstat(stream.fileno()).st_blocks * 512, os.fstat(stream.fileno()).st_size)
            texts = (json.dumps(f, indent=1).encode() for f in (facts, {**facts, "ranks": []}))
            text = next((text for text in texts if len(text) <= room), None)
            if text is None or stream.write(text) != len(text):
                return False
            stream.truncate()
    except OSError:
        return False
    return True
