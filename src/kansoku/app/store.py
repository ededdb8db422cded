"""Open the store that a command was told: a folder, or a running server."""

import os
from pathlib import Path

from kansoku.store import LocalStore, Store, StoreLimits

__all__ = ["default_store", "open_store"]


def default_store() -> Path:
    """Return the folder of the store when none is named: the XDG state folder."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "kansoku" / "store"


def open_store(
    folder_or_url: str | Path | None = None, *, limits: StoreLimits | None = None
) -> Store:
    """Return the store; close it when done.

    A folder that no server owns is opened in this process; raises StoreError naming the owner
    otherwise.
    """
    return LocalStore(Path(folder_or_url or default_store()), limits=limits)
