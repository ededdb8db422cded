"""Shared set-up: fast tests first, the corpus, what was skipped and why."""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Run unit tests before the tests that start real parts, keeping file order within."""
    items.sort(key=lambda item: "/tests/unit/" not in str(item.path))


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Return the folder with real files of other systems; skip with the reason elsewhere."""
    folder = os.environ.get("KANSOKU_CORPUS")
    if not folder:
        pytest.skip("KANSOKU_CORPUS is not set: the corpus of real files is not on this machine")
    path = Path(folder)
    assert path.is_dir(), f"KANSOKU_CORPUS={folder} is not a folder"
    return path
