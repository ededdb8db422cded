"""One browser for every test that looks at a page: Playwright allows one at a time."""

import pytest
from tests.labs.browser import browser


@pytest.fixture(scope="session")
def show():
    """Return a function that opens an address and waits until everything is drawn."""
    with browser() as opened:
        yield opened
