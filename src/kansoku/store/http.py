"""The store of a running server, over its query API."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import httpx
import orjson
import polars as pl
import pyarrow as pa

from kansoku.errors import BusyError, InputError, StoreError
from kansoku.model import Origin, Receipt, table_schema
from kansoku.store._interface import Filters, Matchers, Rows, matcher_list
from kansoku.store._schema import conform
from kansoku.store.broadcast import Waiting
from kansoku.store.queries import named_query

__all__ = ["HttpStore"]

_ARROW = "application/vnd.apache.arrow.stream"
_MOST_ROWS = 1_000_000


class HttpStore:
    """A client; rows and answers travel as Arrow."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"accept": _ARROW}
        if token:
            headers["authorization"] = f"Bearer {token}"
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, transport=transport
        )

    def _ask(self, path: str, params: Sequence[tuple[str, str]]) -> pl.DataFrame:
        response = self._request("GET", path, params=params)
        try:
            with pa.ipc.open_stream(response.content) as reader:
                frame = pl.from_arrow(reader.read_all())
        except pa.ArrowException as error:
            raise StoreError(
                f"the answer is not a kansoku server's: {error}", where=self.url
            ) from None
        assert isinstance(frame, pl.DataFrame)
        return frame

    def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            response = self._client.request(method, path, **more)
        except httpx.HTTPError as error:
            raise StoreError(
                f"{type(error).__name__}: {error}", where=self.url,
                remedy="is kansoku serve running there?",
            ) from None  # fmt: skip
        if response.status_code == 200:
            return response
        try:
            text = str(orjson.loads(response.content)["error"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = f"HTTP {response.status_code}: {response.text[:200]}"
        if response.status_code in {400, 404, 413, 422}:
            raise InputError(text, where=self.url)
        if response.status_code == 503 and "wait" in text:
            raise BusyError(text, where=self.url)
        remedy = "set KANSOKU_TOKEN" if response.status_code in {401, 403} else None
        raise StoreError(text, where=self.url, remedy=remedy)

    def append(self, table: str, rows: Rows) -> Receipt:
        """Keep rows; return when they are durable."""
        return self._post(table, rows, [])

    def _post(self, table: str, rows: Rows, params: list[tuple[str, str]]) -> Receipt:
        arrow = conform(table, rows)
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, arrow.schema, options=options) as writer:
            writer.write_table(arrow)
        response = self._request(
            "POST",
            f"/api/v1/tables/{table}",
            params=params,
            content=sink.getvalue().to_pybytes(),
            headers={"content-type": _ARROW},
        )
        answer = orjson.loads(response.content)
        return Receipt(
            rows=answer["rows"], rejected=answer["rejected"], duplicate=answer["duplicate"]
        )

    def commit(self, batches: Mapping[str, Rows], *, origin: Origin | None = None) -> Receipt:
        """Keep rows table by table, each once per origin."""
        rows: dict[str, int] = {}
        rejected: dict[str, int] = {}
        duplicate = bool(batches)
        for table, frame in batches.items():
            params = []
            if origin is not None:
                # A request a table: each has a number of its own under the same agent.
                params = [("agent", f"{origin.agent}/{table}"), ("sequence", str(origin.sequence))]
            receipt = self._post(table, frame, params)
            rows |= receipt.rows
            for reason, count in receipt.rejected.items():
                rejected[reason] = rejected.get(reason, 0) + count
            duplicate &= receipt.duplicate
        return Receipt(rows=rows, rejected=rejected, duplicate=duplicate)

    def table(
        self,
        name: str,
        since_ns: int | None = None,
        until_ns: int | None = None,
        filters: Filters | None = None,
        *,
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return rows of a table in time order; with a limit, the newest.

        Conditions that the API does not know (lists, null) are applied here.
        """
        schema = table_schema(name)
        if unknown := set(filters or {}) - set(schema):
            raise InputError(
                f"table {name} has no column {', '.join(sorted(unknown))} to filter by"
            )
        params = _params(since_ns=since_ns, until_ns=until_ns)
        later = []
        for column, value in (filters or {}).items():
            if isinstance(value, bool):
                params.append((column, str(value).lower()))
            elif isinstance(value, str | int | float):
                params.append((column, str(value)))
            elif value is None:
                later.append(pl.col(column).is_null())
            else:
                later.append(pl.col(column).is_in(list(value)))
        most = limit if limit is not None and not later else _MOST_ROWS
        frame = self._ask(f"/api/v1/tables/{name}", [*params, ("limit", str(most))])
        if later:
            frame = frame.filter(*later)
        elif limit is None and len(frame) >= _MOST_ROWS:
            raise InputError(
                f"table {name}: more than {_MOST_ROWS} rows in one answer",
                remedy="narrow it with since, until or filters",
            )
        return frame if limit is None else frame.tail(limit)

    def query(self, name: str, **params: Any) -> pl.DataFrame:
        """Return the answer of a named query."""
        values = named_query(name).values(params)
        return self._ask(f"/api/v1/queries/{name}", _params(**values))

    def metric_range(
        self,
        metric: str,
        matchers: Matchers = None,
        *,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        aggregate: str = "avg",
        by: Sequence[str] | None = None,
        across: str = "avg",
    ) -> pl.DataFrame:
        """Return ``labels, time_ns, value``, one value per series and step."""
        params = _params(
            metric=metric, start_ns=start_ns, end_ns=end_ns, step_ns=step_ns,
            aggregate=aggregate, across=across,
            by=None if by is None else ",".join(by),
        )  # fmt: skip
        return self._ask("/api/v1/metrics/range", params + _matches(matchers))

    def latest(
        self, metric: str, matchers: Matchers = None, *, at_ns: int | None = None
    ) -> pl.DataFrame:
        """Return ``metric, labels, time_ns, value``: each series' last sample."""
        params = _params(metric=metric, at_ns=at_ns)
        return self._ask("/api/v1/metrics/latest", params + _matches(matchers))

    def series(self, metric: str | None = None, matchers: Matchers = None) -> pl.DataFrame:
        """Return ``metric, labels`` of known series."""
        params = _params(metric=metric, limit=_MOST_ROWS)
        return self._ask("/api/v1/metrics/series", params + _matches(matchers))

    def metrics(self) -> pl.DataFrame:
        """Return ``metric, unit, kind, description, series`` of every metric."""
        return self._ask("/api/v1/metrics", [])

    def events(
        self,
        since_ns: int | None = None,
        until_ns: int | None = None,
        *,
        subject: str | None = None,
        source: str | None = None,
        kind: str | None = None,
        severity: str | None = None,
        contains: str | None = None,
        limit: int | None = None,
    ) -> pl.DataFrame:
        """Return events in time order; with a limit, the newest."""
        params = _params(
            since_ns=since_ns, until_ns=until_ns, subject=subject, source=source, kind=kind,
            severity=severity, contains=contains, limit=_MOST_ROWS if limit is None else limit,
        )  # fmt: skip
        return self._ask("/api/v1/events", params)

    def subscribe(self, tables: Sequence[str], *, capacity: int = 256) -> "StreamListener":
        """Return freshly kept rows of those tables from now on."""
        return StreamListener(self._client, tables, capacity)

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StreamListener(Waiting):
    """A subscription over server-sent events; ends when the server goes."""

    def __init__(self, client: httpx.Client, tables: Sequence[str], capacity: int) -> None:
        super().__init__(capacity)
        self._client = client
        self._tables = tuple(tables)
        self._lost_there = 0
        self._ready = threading.Event()
        self._error: str | None = None
        thread = threading.Thread(target=self._read, name="store-stream", daemon=True)
        thread.start()
        self._ready.wait(30)
        if self._error is not None:
            raise StoreError(self._error, where=str(client.base_url))

    @property
    def dropped_batches(self) -> int:
        """Batches lost because the reader was too slow, here or at the server."""
        return self._dropped + self._lost_there

    def _read(self) -> None:
        params = {"tables": ",".join(self._tables)}
        try:
            with self._client.stream("GET", "/api/v1/stream", params=params, timeout=30) as answer:
                if answer.status_code != 200:
                    self._error = f"HTTP {answer.status_code}: {answer.read()[:200].decode()}"
                    return
                for line in answer.iter_lines():
                    self._ready.set()
                    if self._closed:
                        return
                    if line.startswith("data: "):
                        self._take(orjson.loads(line[6:]))
        except (httpx.HTTPError, orjson.JSONDecodeError, RuntimeError) as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self.close()
            self._ready.set()

    def _take(self, document: dict[str, Any]) -> None:
        table = document["table"]
        schema = table_schema(table)
        frame = pl.DataFrame(
            document["rows"],
            schema={name: schema.get(name, pl.String()) for name in document["columns"]},
            orient="row",
        )
        self._lost_there = document["dropped_batches"]
        self.put(table, frame)


def _params(**values: Any) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in values.items() if value is not None]


def _matches(matchers: Matchers) -> list[tuple[str, str]]:
    return [("match", f"{m.label}{m.operator}{m.value}") for m in matcher_list(matchers)]
