"""The query API: tables, named queries, metrics, events, a stream of fresh rows."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import polars as pl
import pyarrow as pa
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kansoku.app.serve.access import Access, Principal, hide_inside, rows_of
from kansoku.app.serve.events import event_stream
from kansoku.app.serve.jobs import job_window
from kansoku.app.serve.openapi import openapi
from kansoku.errors import BusyError, InputError, KansokuError, StoreError
from kansoku.model import TABLES, Origin, table_schema
from kansoku.store import QUERIES, LocalStore, Matcher

__all__ = ["API_VERSION", "Api", "api_routes"]

API_VERSION = 1
ARROW = "application/vnd.apache.arrow.stream"
_DEFAULT_ROWS, _MOST_ROWS = 10_000, 1_000_000
_MOST_APPEND_BYTES = 64 << 20
_INT = {pl.Int32, pl.Int64}


class _RefusedError(KansokuError):
    """The principal may not do this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """What the handlers work with."""

    store: LocalStore
    access: Access
    statistics: Callable[[], dict[str, Any]]
    clock_ns: Callable[[], int] = time.time_ns

    def principal(self, request: Request) -> Principal | None:
        """Return who asks."""
        return self.access.identify(
            request.headers.get("authorization"), request.scope.get("kansoku.certificate")
        )


Handler = Callable[[Api, Principal, Request], Awaitable[Response]]


def api_routes(api: Api) -> list[Route]:
    """Return the routes of the API; everything but health and the description needs a reader."""
    get: dict[str, Handler] = {
        "/api/v1/tables": _tables,
        "/api/v1/tables/{table}": _table,
        "/api/v1/queries": _queries,
        "/api/v1/queries/{query}": _query,
        "/api/v1/metrics": _metrics,
        "/api/v1/metrics/series": _series,
        "/api/v1/metrics/range": _range,
        "/api/v1/metrics/latest": _latest,
        "/api/v1/events": _events,
        "/api/v1/statistics": _statistics,
        "/api/v1/stream": _stream,
    }
    routes = [
        Route("/api/health", _health, methods=["GET"]),
        Route("/api/openapi.json", _description, methods=["GET"]),
    ]
    routes += [Route(path, _guard(api, handler), methods=["GET"]) for path, handler in get.items()]
    append = _guard(api, _append, sends=True)
    return [*routes, Route("/api/v1/tables/{table}", append, methods=["POST"])]


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok", "version": API_VERSION})


async def _description(_: Request) -> Response:
    return Response(orjson.dumps(openapi()), media_type="application/json")


def _problem(status: int, text: str, after_s: int | None = None) -> Response:
    headers = {} if after_s is None else {"retry-after": str(after_s)}
    return JSONResponse({"version": API_VERSION, "error": text}, status, headers)


def _guard(
    api: Api, handler: Handler, *, sends: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """Identify who asks, refuse or answer, and turn errors into statuses."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        principal = api.principal(request)
        if principal is None:
            response = _problem(401, "a bearer token or client certificate is needed")
            response.headers["www-authenticate"] = "Bearer"
            return response
        if not (principal.may_send if sends else principal.may_read):
            return _problem(403, f"role {principal.role} may not do this")
        try:
            return await handler(api, principal, request)
        except _RefusedError as error:
            return _problem(403, str(error))
        except InputError as error:
            return _problem(400, str(error))
        except BusyError as error:
            return _problem(503, str(error), 1)
        except StoreError as error:
            return _problem(503, str(error), 5)

    return handle


# Parameters


def _params(request: Request, known: set[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for key, value in request.query_params.multi_items():
        if key not in known:
            raise InputError(f"no parameter {key!r}", remedy=f"known: {', '.join(sorted(known))}")
        if key in given:
            raise InputError(f"parameter {key} is given twice")
        if "\0" in value:
            raise InputError(f"parameter {key} holds a NUL character")
        given[key] = value
    return given


def _int(params: dict[str, str], name: str, default: int | None = None) -> int | None:
    text = params.get(name)
    if text is None:
        return default
    try:
        number = int(text) if len(text) <= 20 and text.isascii() else None
    except ValueError:
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise InputError(f"{name}={text[:40]!r} is not a 64-bit whole number")
    return number


def _limit(params: dict[str, str]) -> int:
    limit = _int(params, "limit", _DEFAULT_ROWS)
    assert limit is not None
    if not 1 <= limit <= _MOST_ROWS:
        raise InputError(f"limit must lie in 1-{_MOST_ROWS}")
    return limit


def _matchers(request: Request) -> tuple[Matcher, ...]:
    return tuple(Matcher.parse(text) for text in request.query_params.getlist("match"))


def _metric_params(request: Request, known: set[str]) -> tuple[dict[str, str], tuple[Matcher, ...]]:
    given: dict[str, str] = {}
    for key, value in request.query_params.multi_items():
        if key not in known | {"match"}:
            raise InputError(f"no parameter {key!r}", remedy=f"known: {', '.join(sorted(known))}")
        if "\0" in value:
            raise InputError(f"parameter {key} holds a NUL character")
        given[key] = value
    return given, _matchers(request)


# Answers


async def _rows(request: Request, frame: pl.DataFrame, limit: int = _MOST_ROWS) -> Response:
    """Return rows as an Arrow stream where asked, else as JSON."""
    truncated = len(frame) > limit
    frame = frame.tail(limit) if truncated else frame
    if ARROW in request.headers.get("accept", ""):
        return Response(await run_in_threadpool(_arrow, frame), media_type=ARROW)
    document = {
        "version": API_VERSION,
        "columns": [{"name": n, "type": str(t)} for n, t in frame.schema.items()],
        "truncated": truncated,
    }

    def encode() -> bytes:
        rows = frame.rows()
        return orjson.dumps(document | {"rows": rows})

    return Response(await run_in_threadpool(encode), media_type="application/json")


def _arrow(frame: pl.DataFrame) -> bytes:
    sink = pa.BufferOutputStream()
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    raw: bytes = sink.getvalue().to_pybytes()
    return raw


def _consents(api: Api, principal: Principal) -> dict[str, bool | None]:
    if principal.role != "operator":
        return {}
    consents: dict[str, bool | None] = {}
    for row in api.store.owners():
        consents[row[0]] = row[4] if row[4] is not None else consents.get(row[0])
    return consents


async def _tables(_api: Api, _principal: Principal, _request: Request) -> Response:
    tables = [
        {
            "name": table.name,
            "row": table.row,
            "time_column": table.time_column,
            "columns": [{"name": n, "type": str(t)} for n, t in table.columns.items()],
        }
        for table in TABLES.values()
    ]
    return JSONResponse({"version": API_VERSION, "tables": tables})


async def _table(api: Api, principal: Principal, request: Request) -> Response:
    name = request.path_params["table"]
    if name not in TABLES:
        return _problem(404, f"no table {name!r}")
    schema = table_schema(name)
    params = _params(request, {"since_ns", "until_ns", "limit"} | set(schema))
    filters: dict[str, Any] = {}
    for column, kind in schema.items():
        if column in params:
            filters[column] = _filter(params, column, kind)
    limit = _limit(params)
    since_ns, until_ns = _int(params, "since_ns"), _int(params, "until_ns")
    where = (rows_of(principal) or {}).get(name, "true")

    def ask() -> pl.DataFrame:
        frame = api.store.table(name, since_ns, until_ns, filters, limit=limit + 1, where=where)
        return hide_inside(frame, principal, _consents(api, principal))

    return await _rows(request, await run_in_threadpool(ask), limit)


def _filter(params: dict[str, str], column: str, kind: pl.DataType) -> Any:
    if type(kind) in _INT:
        return _int(params, column)
    text = params[column]
    if isinstance(kind, pl.Boolean):
        if text not in {"true", "false"}:
            raise InputError(f"{column} must be true or false")
        return text == "true"
    if isinstance(kind, pl.Float64):
        try:
            return float(text)
        except ValueError:
            raise InputError(f"{column}={text[:40]!r} is not a number") from None
    return text


async def _queries(_api: Api, _principal: Principal, _request: Request) -> Response:
    queries = [
        {
            "name": query.name,
            "answers": query.answers,
            "tables": list(query.tables),
            "parameters": [
                {"name": one.name, "type": one.kind.__name__, "meaning": one.meaning}
                for one in query.parameters
            ],
        }
        for query in QUERIES.values()
    ]
    return JSONResponse({"version": API_VERSION, "queries": queries})


async def _query(api: Api, principal: Principal, request: Request) -> Response:
    name = request.path_params["query"]
    if name not in QUERIES:
        return _problem(404, f"no query {name!r}")
    params = _params(request, {one.name for one in QUERIES[name].parameters})
    values = {
        one.name: _int(params, one.name) if one.kind is int else params[one.name]
        for one in QUERIES[name].parameters
        if one.name in params
    }

    def ask() -> pl.DataFrame:
        if name == "jobs":
            return _known_jobs(api, principal, values)
        frame = api.store.query(name, allowed=rows_of(principal), **values)
        return hide_inside(frame, principal, _consents(api, principal))

    return await _rows(request, await run_in_threadpool(ask))


def _known_jobs(api: Api, principal: Principal, values: Mapping[str, Any]) -> pl.DataFrame:
    """Return the jobs that the pages show: rows that were sent, and the imported history."""
    # The pages' reading stands on this package.
    from kansoku.app.web_reading import Reading

    asked = QUERIES["jobs"].values(values)
    reading = Reading(store=api.store, principal=principal, clock_ns=api.clock_ns)
    frame = reading.jobs(asked.get("since_ns"), asked.get("until_ns"))
    wanted = {name: asked[name] for name in ("user", "state") if asked.get(name) is not None}
    return frame.filter(**wanted)


def _need(params: dict[str, str], *names: str) -> None:
    for name in names:
        if not params.get(name):
            raise InputError(f"parameter {name} is needed")


def _window(
    api: Api, principal: Principal, params: dict[str, str]
) -> tuple[tuple[Matcher, ...], int, int] | None:
    """Return the bounds that a tenant's own job puts on metrics; None for who sees all."""
    job = params.get("job")
    if job is None:
        if principal.role == "tenant":
            raise _RefusedError("a tenant asks for metrics of a job of its own: give job=ID")
        return None
    where = (rows_of(principal) or {}).get("jobs", "true")
    window = job_window(api.store, job, where=where, now_ns=api.clock_ns())
    return window.matchers, window.start_ns, window.end_ns


async def _metrics(api: Api, principal: Principal, request: Request) -> Response:
    _params(request, set())
    frame = await run_in_threadpool(api.store.metrics)
    if principal.role == "tenant":
        frame = frame.drop("series")
    return await _rows(request, frame)


async def _series(api: Api, principal: Principal, request: Request) -> Response:
    params, matchers = _metric_params(request, {"metric", "job", "limit"})
    limit = _limit(params)

    def ask() -> pl.DataFrame:
        bounds = _window(api, principal, params)
        extra = bounds[0] if bounds else ()
        return api.store.series(params.get("metric"), (*matchers, *extra))

    return await _rows(request, await run_in_threadpool(ask), limit)


async def _range(api: Api, principal: Principal, request: Request) -> Response:
    known = {"metric", "job", "start_ns", "end_ns", "step_ns", "aggregate", "by", "across"}
    params, matchers = _metric_params(request, known)
    _need(params, "metric", "start_ns", "end_ns", "step_ns")
    start, end, step = (_int(params, name) for name in ("start_ns", "end_ns", "step_ns"))
    assert start is not None
    assert end is not None
    assert step is not None

    def ask() -> pl.DataFrame:
        bounds = _window(api, principal, params)
        since, until, every = start, end, matchers
        if bounds is not None:
            since, until = max(since, bounds[1]), min(until, bounds[2])
            every = (*matchers, *bounds[0])
            if since >= until:
                raise InputError("the job did not run in that range")
            if principal.role == "tenant" and step > 0:
                # Whole steps inside the job only: a step that began before shows others' load.
                since, until = -(-since // step) * step, until // step * step
                if since >= until:
                    raise InputError("no whole step lies inside the job: use a shorter one")
        by = params["by"].split(",") if "by" in params else None
        return api.store.metric_range(
            params["metric"],
            every,
            start_ns=since,
            end_ns=until,
            step_ns=step,
            aggregate=params.get("aggregate", "avg"),
            by=[one for one in by if one] if by is not None else None,
            across=params.get("across", "avg"),
        )

    return await _rows(request, await run_in_threadpool(ask))


async def _latest(api: Api, principal: Principal, request: Request) -> Response:
    params, matchers = _metric_params(request, {"metric", "job", "at_ns"})
    _need(params, "metric")
    at_ns = _int(params, "at_ns")
    if at_ns is not None and not -(2**62) < at_ns < 2**62:
        raise InputError("at_ns lies outside what a clock can say")

    def ask() -> pl.DataFrame:
        bounds = _window(api, principal, params)
        if bounds is None:
            return api.store.latest(params["metric"], matchers, at_ns=at_ns)
        extra, start_ns, end_ns = bounds
        at = min(end_ns, at_ns if at_ns is not None else end_ns)
        frame = api.store.latest(params["metric"], (*matchers, *extra), at_ns=at)
        return frame.filter(pl.col("time_ns") >= start_ns)

    return await _rows(request, await run_in_threadpool(ask))


async def _events(api: Api, principal: Principal, request: Request) -> Response:
    columns = ("subject", "source", "kind", "severity", "contains")
    params = _params(request, {"since_ns", "until_ns", "limit", *columns})
    limit = _limit(params)
    since_ns, until_ns = _int(params, "since_ns"), _int(params, "until_ns")
    chosen = {name: params[name] for name in columns if name in params}
    where = (rows_of(principal) or {}).get("events", "true")

    def ask() -> pl.DataFrame:
        return api.store.events(since_ns, until_ns, limit=limit + 1, where=where, **chosen)

    return await _rows(request, await run_in_threadpool(ask), limit)


async def _statistics(api: Api, principal: Principal, _request: Request) -> Response:
    if principal.role == "tenant":
        return _problem(403, "statistics are for operators")
    document = await run_in_threadpool(api.statistics)
    return Response(orjson.dumps({"version": API_VERSION, **document}),
                    media_type="application/json")  # fmt: skip


async def _append(api: Api, _principal: Principal, request: Request) -> Response:
    name = request.path_params["table"]
    if name not in TABLES:
        return _problem(404, f"no table {name!r}")
    params = _params(request, {"agent", "sequence"})
    origin = None
    if params:
        _need(params, "agent", "sequence")
        sequence = _int(params, "sequence")
        assert sequence is not None
        origin = Origin(agent=params["agent"], sequence=sequence)
    parts, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _MOST_APPEND_BYTES:
            return _problem(413, f"body exceeds {_MOST_APPEND_BYTES} bytes")
        parts.append(chunk)

    def keep() -> Any:
        try:
            with pa.ipc.open_stream(pa.py_buffer(b"".join(parts))) as reader:
                rows = reader.read_all()
                rows.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"the body is no Arrow stream: {error}") from None
        return api.store.submit({name: rows}, origin=origin)

    receipt = await asyncio.wrap_future(await run_in_threadpool(keep))
    document = {
        "version": API_VERSION,
        "rows": dict(receipt.rows),
        "rejected": dict(receipt.rejected),
        "duplicate": receipt.duplicate,
    }
    return Response(orjson.dumps(document), media_type="application/json")


async def _stream(api: Api, principal: Principal, request: Request) -> Response:
    params = _params(request, {"tables"})
    names = [one for one in params.get("tables", "").split(",") if one]
    if not names:
        raise InputError("parameter tables is needed: names joined by commas")
    if principal.role == "tenant":
        raise _RefusedError("the stream is for operators; a tenant asks for tables again")
    listener = api.store.subscribe(names)

    async def tell(table: str, frame: pl.DataFrame) -> dict[str, Any]:
        def seen() -> pl.DataFrame:
            return hide_inside(frame, principal, _consents(api, principal))

        shown = await run_in_threadpool(seen)
        return {
            "table": table,
            "columns": shown.columns,
            "rows": shown.rows(),
            "dropped_batches": listener.dropped_batches,
        }

    return event_stream(request, listener, "rows", tell, retry_ms=2000)
