"""Open the store that a command was told: a folder, or a running server."""

import os
from pathlib import Path

from kansoku.errors import StoreError
from kansoku.store import HttpStore, LocalStore, Store, StoreLimits

__all__ = ["default_store", "open_store"]


def default_store() -> Path:
    """Return the folder of the store when none is named: the XDG state folder."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "kansoku" / "store"


def open_store(
    folder_or_url: str | Path | None = None,
    *,
    limits: StoreLimits | None = None,
    token: str | None = None,
) -> Store:
    """Return the store; close it when done.

    A URL is a running server, asked with ``token`` (default: environment KANSOKU_TOKEN). A folder
    is opened in this process, or asked over HTTP where a server owns it. Raises StoreError naming
    the owner where it can be neither.
    """
    token = token or os.environ.get("KANSOKU_TOKEN")
    if str(folder_or_url or "").startswith(("http://", "https://")):
        return HttpStore(str(folder_or_url), token=token)
    folder = Path(folder_or_url or default_store())
    try:
        return LocalStore(folder, limits=limits)
    except StoreError:
        address = folder / "address"
        if not address.exists():
            raise
        return HttpStore(address.read_text(encoding="utf-8").strip(), token=token)
