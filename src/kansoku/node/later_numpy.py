"""NumPy's functions, loaded at the first use: an agent whose node has no job never needs them.

Import it as ``np`` beside the real one for the type checker; annotations stay text.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Return NumPy's attribute."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("numpy"), name)
