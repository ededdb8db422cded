"""Where responses are kept: state files, circuit breakers, audit log, the nodes' lives.

Everything is written so that a crash at any point leaves the old or the new state: files by rename,
the logs by append and fsync, one line a record.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kansoku.diagnose.response import FINAL, BreakerState, Response
from kansoku.errors import ConfigurationError, InputError, PlatformError

__all__ = ["Journal"]


class Journal:
    """A folder that one driver at a time works in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            (folder / "responses").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlatformError(
                f"{folder}: {error.strerror}", remedy="choose --state DIR"
            ) from None

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the folder; a second driver is refused. The kernel frees it if we die."""
        with (self._folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PlatformError(
                    f"another respond works in {self._folder}", remedy="wait for it to end"
                ) from None
            yield

    def _write(self, path: Path, data: object) -> None:
        draft = path.with_suffix(".tmp")
        with draft.open("w", encoding="utf-8") as file:
            json.dump(data, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    def save(self, response: Response) -> None:
        """Keep a response's state."""
        self._write(self._folder / "responses" / f"{response.id}.json", response.to_json())

    def responses(self) -> list[Response]:
        """Return every response, oldest first."""
        found = []
        for path in (self._folder / "responses").glob("*.json"):
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise InputError(f"not JSON: {error}", where=str(path)) from None
            found.append(Response.from_json(data, str(path)))
        return sorted(found, key=lambda response: response.begun_ns)

    def unfinished(self) -> list[Response]:
        """Return responses that somebody began and nobody ended."""
        return [response for response in self.responses() if response.state not in FINAL]

    def breaker(self) -> BreakerState:
        """Return what the circuit breakers remember."""
        path = self._folder / "breaker.json"
        if not path.exists():
            return BreakerState(restarts={})
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return BreakerState(
                open_reason=data["open_reason"],
                begun_ns=tuple(data["begun_ns"]),
                restarts=dict(data["restarts"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"damaged: {error}", where=str(path), remedy="look at audit.jsonl, then remove it"
            ) from None

    def save_breaker(self, breaker: BreakerState) -> None:
        """Keep the circuit breakers."""
        self._write(
            self._folder / "breaker.json",
            {
                "open_reason": breaker.open_reason,
                "begun_ns": list(breaker.begun_ns),
                "restarts": breaker.restarts,
            },
        )

    def audit(self, record: dict[str, Any]) -> None:
        """Append one line that nobody rewrites."""
        self._append("audit.jsonl", record)

    def life(self, record: dict[str, Any]) -> None:
        """Append one event of a node's life: serviced out, repaired, validated, returned."""
        self._append("nodes.jsonl", record)

    def lives(self) -> list[dict[str, Any]]:
        """Return all events of all nodes, oldest first."""
        return self._read("nodes.jsonl")

    def audits(self) -> list[dict[str, Any]]:
        """Return the audit log."""
        return self._read("audit.jsonl")

    def _append(self, name: str, record: dict[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False, sort_keys=True) + "\n"
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _read(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / name
        if not path.exists():
            return []
        records = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the last line of a process that died while writing it
            if isinstance(record, dict):
                records.append(record)
        return records
