"""Debian's Chromium under Playwright: open a page, wait until it is drawn, see what it asked for."""

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field

ARGUMENTS = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]


@dataclass
class Watched:
    """A page with its errors and the addresses it asked for."""

    page: object
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def browser():
    """Start Chromium once; yield a function that opens an address and waits for ``data-ready``."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program, "chromium is not installed: run `make setup` as root"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)

        def show(address, *, dark=False, width=1200, height=900):
            page = chromium.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if dark else "light",
            )
            watched = Watched(page)
            page.on("pageerror", lambda error: watched.errors.append(str(error)))
            page.on(
                "console", lambda m: watched.errors.append(m.text) if m.type == "error" else None
            )
            page.on("request", lambda request: watched.requests.append(request.url))
            page.goto(address)
            page.wait_for_selector("html[data-ready]", state="attached", timeout=30_000)
            return watched

        yield show
        chromium.close()
