"""Routes of the site: pages, their JSON twins and columns, ticks, sign-in, static files."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import orjson
import polars as pl
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from kansoku.app.serve.access import Access, Principal
from kansoku.app.serve.events import event_stream
from kansoku.app.serve.session import COOKIE
from kansoku.app.web_columns import COLUMNS_TYPE, columns_bytes
from kansoku.app.web_memory import Memory
from kansoku.app.web_page import MissingError, Page, parse_query
from kansoku.app.web_pages import web_pages
from kansoku.app.web_reading import Reading, RefusedError
from kansoku.catalog import Cluster
from kansoku.errors import BusyError, InputError, KansokuError, StoreError
from kansoku.store import LocalStore
from kansoku.web._draw import Drawer, in_language
from kansoku.web._perfetto import PERFETTO_PATH, PerfettoFiles
from kansoku.web._settings import Settings, security_headers
from kansoku.web._static import bokeh_answer, static_answer

__all__ = ["routes"]

_TICK_S = 1.0
_YEAR_S = 365 * 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    store: LocalStore
    access: Access
    statistics: Callable[[], dict[str, Any]] | None
    cluster: Cluster | None
    clock_ns: Callable[[], int]
    drawer: Drawer
    memory: Memory

    def principal(self, request: Request) -> Principal | None:
        return self.access.identify(
            request.headers.get("authorization"), request.scope.get("kansoku.certificate")
        )

    def reading(self, principal: Principal) -> Reading:
        return Reading(
            store=self.store,
            principal=principal,
            clock_ns=self.clock_ns,
            statistics=self.statistics,
            cluster=self.cluster,
            memory=self.memory,
        )


def routes(
    *,
    store: LocalStore,
    access: Access,
    statistics: Callable[[], dict[str, Any]] | None = None,
    cluster: Cluster | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
    pages: Sequence[Page] | None = None,
) -> list[BaseRoute]:
    """Return every route of the site; ``pages`` are all there are unless told."""
    pages = web_pages() if pages is None else pages
    site = _Site(
        store=store,
        access=access,
        statistics=statistics,
        cluster=cluster,
        clock_ns=clock_ns,
        drawer=Drawer(pages),
        memory=Memory(),
    )
    found: list[BaseRoute] = [
        Route("/", _home, methods=["GET"]),
        Route("/settings", _settings, methods=["GET"]),
        Route("/sign-in", _bind(_sign_in, site), methods=["GET", "POST"]),
        Route("/sign-out", _sign_out, methods=["POST"]),
        Route("/live", _bind(_live, site), methods=["GET"]),
        Route("/static/bokeh/{version}/bokeh.min.js", bokeh_answer, methods=["GET"]),
        Mount(PERFETTO_PATH, PerfettoFiles()),
        Route("/static/{version}/{name}", static_answer, methods=["GET"]),
        Route("/static/{name}", static_answer, methods=["GET"]),
    ]
    for page in pages:
        # Columns before pages: a page's last parameter may take a whole path.
        found += [
            Route(
                f"/api/v1/pages{page.path}/columns/{name}",
                _columns(site, page, name),
                methods=["GET"],
            )
            for name in page.columns
        ]
        found += [
            Route(
                f"/api/v1/pages{page.path}/files/{name}", _file(site, page, name), methods=["GET"]
            )
            for name in page.files
        ]
    for page in pages:
        found.append(Route(f"/api/v1/pages{page.path}", _twin(site, page), methods=["GET"]))
        found.append(Route(page.path, _html(site, page), methods=["GET"]))
    found.append(Route("/{path:path}", _bind(_nothing, site), methods=["GET"]))
    return found


def _bind(handler: Callable[[_Site, Request], Any], site: _Site) -> Callable[[Request], Any]:
    async def handle(request: Request) -> Response:
        answer: Response = await handler(site, request)
        return answer

    return handle


# Pages


def _given(page: Page, request: Request) -> dict[str, str]:
    given: dict[str, str] = {k: str(v) for k, v in request.path_params.items()}
    for key, value in request.query_params.multi_items():
        if key in given:
            raise InputError(f"parameter {key} is given twice")
        given[key] = value
    return parse_query(page, given)


def _status(error: KansokuError) -> int:
    if isinstance(error, RefusedError):
        return 403
    if isinstance(error, MissingError):
        return 404
    if isinstance(error, InputError):
        return 400
    return 503 if isinstance(error, StoreError | BusyError) else 500


def _check(site: _Site, page: Page, request: Request) -> tuple[Reading, dict[str, str]]:
    principal = site.principal(request)
    if principal is None:
        raise _UnknownError("a bearer token or client certificate is needed")
    if not principal.may_read:
        raise RefusedError(f"role {principal.role} may not read")
    reading = site.reading(principal)
    if page.operators_only:
        reading.need_all()
    return reading, _given(page, request)


def _target(page: Page, request: Request) -> str:
    """Return where to go after the sign-in: the page with the parameters that it knows.

    What else was asked stays behind: people write ``?token=…`` by hand.
    """
    known = {one.name for one in page.parameters if not one.in_path}
    kept = [(key, value) for key, value in request.query_params.multi_items() if key in known]
    return request.url.path + (f"?{urlencode(kept)}" if kept else "")


class _UnknownError(KansokuError):
    """Nobody known asks: answered with 401, or with the sign-in page."""


def _html(site: _Site, page: Page) -> Callable[[Request], Any]:
    async def handle(request: Request) -> Response:
        settings = Settings.of(request)
        try:
            reading, values = _check(site, page, request)
        except _UnknownError:
            return RedirectResponse(f"/sign-in?next={quote(_target(page, request))}", 303)
        except KansokuError as error:
            return _error(site, settings, _status(error), error, None)

        def draw() -> tuple[str, int, dict[str, str]]:
            try:
                screen = page.build(reading, values)
            except KansokuError as error:
                text = site.drawer.error(_status(error), error, settings, reading.principal)
                return text, _status(error), security_headers()
            text, headers = site.drawer.page(page, screen, values, settings, reading.principal)
            return text, 200, headers

        # All of it before the first byte: what fails while it is drawn still gets its status.
        text, status, headers = await run_in_threadpool(draw)
        return Response(text, status, headers, media_type="text/html")

    return handle


def _problem(status: int, text: str) -> Response:
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return Response(
        orjson.dumps({"version": 1, "error": text}),
        status,
        headers,
        media_type="application/json",
    )


def _guarded(
    site: _Site, page: Page, answer: Callable[[Reading, Mapping[str, str], str], Response]
) -> Callable[[Request], Any]:
    async def handle(request: Request) -> Response:
        try:
            reading, values = _check(site, page, request)
            language = Settings.of(request).language
            return await run_in_threadpool(answer, reading, values, language)
        except _UnknownError as error:
            return _problem(401, str(error))
        except KansokuError as error:
            return _problem(_status(error), str(error))

    return handle


def _twin(site: _Site, page: Page) -> Callable[[Request], Any]:
    def answer(reading: Reading, values: Mapping[str, str], _: str) -> Response:
        screen = page.build(reading, values)
        raw = orjson.dumps(
            screen.answer, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        )
        return Response(raw, media_type="application/json")

    return _guarded(site, page, answer)


def _columns(site: _Site, page: Page, name: str) -> Callable[[Request], Any]:
    def answer(reading: Reading, values: Mapping[str, str], language: str) -> Response:
        columns = in_language(page.columns[name](reading, values), language)
        return Response(
            columns_bytes(columns), media_type=COLUMNS_TYPE, headers={"cache-control": "no-store"}
        )

    return _guarded(site, page, answer)


def _file(site: _Site, page: Page, name: str) -> Callable[[Request], Any]:
    def answer(reading: Reading, values: Mapping[str, str], _: str) -> Response:
        file = page.files[name](reading, values)
        kept = "".join(
            c if c.isascii() and (c.isalnum() or c in "._-+@") else "_" for c in file.name
        )
        headers = {
            "cache-control": "no-store",
            "content-disposition": f'attachment; filename="{kept}"',
            "x-content-type-options": "nosniff",
        }
        return Response(file.body, media_type=file.kind, headers=headers)

    return _guarded(site, page, answer)


def _error(
    site: _Site, settings: Settings, status: int, error: KansokuError, principal: Principal | None
) -> Response:
    text = site.drawer.error(status, error, settings, principal)
    return Response(text, status, security_headers(), media_type="text/html")


async def _nothing(site: _Site, request: Request) -> Response:
    path = request.url.path
    if path.startswith(("/api/", "/v1/")):
        return _problem(404, f"nothing is at {path}")
    error = MissingError(f"nothing is at {path}", remedy="choose a page from the menu")
    return _error(site, Settings.of(request), 404, error, site.principal(request))


# Ticks


async def _live(site: _Site, request: Request) -> Response:
    """Say at most once a second which tables have fresh rows; the page asks for them itself."""
    principal = site.principal(request)
    if principal is None:
        return _problem(401, "a bearer token or client certificate is needed")
    names = [one for one in request.query_params.get("tables", "").split(",") if one]
    try:
        if not names:
            raise InputError("parameter tables is needed: names joined by commas")
        if principal.role not in {"local", "operator"}:
            raise RefusedError("ticks are for operators; others ask for the page again")
        listener = site.store.subscribe(names, capacity=64)
    except KansokuError as error:
        return _problem(_status(error), str(error))

    async def tell(table: str, frame: pl.DataFrame) -> dict[str, Any]:
        rows = {table: len(frame)}
        await asyncio.sleep(_TICK_S)
        while (more := listener.get(0)) is not None:
            rows[more[0]] = rows.get(more[0], 0) + len(more[1])
        return {"rows": rows, "time_ms": site.clock_ns() // 1_000_000}

    return event_stream(request, listener, "fresh", tell, retry_ms=3000)


# Settings and sign-in


async def _home(_: Request) -> Response:
    return RedirectResponse(web_pages()[0].path, 307)


def _local(path: str | None) -> str:
    """Return a path of this site, never another's address."""
    safe = path is not None and path.startswith("/") and not path.startswith(("//", "/\\"))
    return path if safe and path is not None else "/"


async def _settings(request: Request) -> Response:
    """Keep language, theme or time zone in a cookie and go back."""
    response = RedirectResponse(_local(request.query_params.get("next")), 303)
    for name, known in Settings.CHOICES.items():
        value = request.query_params.get(name)
        if value in known:
            response.set_cookie(f"kansoku_{name}", value, max_age=_YEAR_S, samesite="lax", path="/")
    return response


_MOST_FORM_BYTES = 16_384


async def _sign_in(site: _Site, request: Request) -> Response:
    settings = Settings.of(request)
    target = _local(request.query_params.get("next"))
    wrong = False
    if request.method == "POST":
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_FORM_BYTES:
                return _problem(413, "the form is too big")
        from urllib.parse import parse_qs

        fields = parse_qs(body.decode("utf-8", "replace"))
        token = fields.get("token", [""])[0].strip()
        if token.isascii() and site.access.identify(f"Bearer {token}", None) is not None:
            response = RedirectResponse(target, 303)
            response.set_cookie(
                COOKIE, token, httponly=True, samesite="strict", path="/",
                secure=request.url.scheme == "https",
            )  # fmt: skip
            return response
        wrong = True
    query = urlencode({"next": target})
    text = site.drawer.sign_in(f"/sign-in?{query}", settings, wrong=wrong)
    return Response(text, 401 if wrong else 200, security_headers(), media_type="text/html")


async def _sign_out(_: Request) -> Response:
    response = RedirectResponse("/sign-in", 303)
    response.delete_cookie(COOKIE, path="/")
    return response
