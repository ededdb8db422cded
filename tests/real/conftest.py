"""What is started once for all: a browser (Playwright allows one at a time), and one Slurm."""

import pytest
from tests.labs.browser import browser
from tests.labs.slurm import slurm

__all__ = ["slurm"]


@pytest.fixture(scope="session")
def show():
    """Return a function that opens an address and waits until everything is drawn."""
    with browser() as opened:
        yield opened
