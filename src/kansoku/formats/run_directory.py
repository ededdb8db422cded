"""Read a run directory: ``run.json``, drained records, and rings still in place.

Everything is read in whole columns; one core turns more than five million records a second into
the ``spans`` table. A torn record, a truncated file, a newer format or a missing part becomes a
sentence in ``missing``, never an exception and never an invented row.
"""

import json
import mmap
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from kansoku.errors import InputError
from kansoku.formats import _ring_facts as facts_of
from kansoku.formats._ring_attributes import attributes
from kansoku.formats._ring_columns import Strings, nullable, same
from kansoku.formats._ring_file import open_ring, plausible
from kansoku.formats._ring_lives import lives, numbered_on, strangers
from kansoku.formats._ring_newest import newest_stretches, since_all_lanes
from kansoku.model import ring
from kansoku.model.run import RankFacts, RunFacts
from kansoku.model.tables import PROCESS_SHIFT, table_schema

__all__ = ["RECORD", "ProcessState", "RunData", "open_ring", "read_run"]

_CODES = {"Q": "<u8", "q": "<i8", "i": "<i4", "H": "<u2", "I": "<u4", "d": "<f8"}
RECORD = np.dtype(
    {
        "names": [name for name, _, _ in ring.RECORD_FIELDS],
        "formats": [_CODES[code] for _, _, code in ring.RECORD_FIELDS],
        "offsets": [offset for _, offset, _ in ring.RECORD_FIELDS],
        "itemsize": ring.RECORD_BYTES,
    }
)
_PHASES = ("data_wait", "forward", "backward", "optimizer", "checkpoint", "evaluation")
_PHASE_CODES = [ring.KIND_CODES[name] for name in _PHASES]
_COUNT_MASK = np.uint64((1 << ring.LANE_SHIFT) - 1)
_STATES = {ring.OFF: "off", ring.RECORDING: "recording", ring.CLOSED: "closed"}
_LONG = pl.Int64()
COUNTERS_SCHEMA = {"rank": pl.Int32(), "kind": pl.String(), "count": _LONG, "bytes": _LONG}
RESOURCES_SCHEMA = {
    "rank": pl.Int32(),
    "step": pl.Int32(),
    "kind": pl.String(),
    "id": pl.Int64(),
    "peak_rss_bytes": pl.Int64(),  # high-water mark of the process when the span closed
    "device_ns": pl.Int64(),
    "tokens": pl.Float64(),  # of a step
    "flops": pl.Float64(),  # model FLOPs of a step, this rank's own work
    # Of a phase: how long its thread had stood in a run queue since its start, when it closed.
    "queued_ns": pl.Int64(),
}

_MOST_NAMED = 4
_CHUNK = 2048
"""Records taken into columns at a time: 256 KiB stay in the cache while 23 fields are copied."""


_Key = tuple[str, int, int, tuple[int, int]]


class _Records:
    """Records as one contiguous array a field.

    A strided pass over rows of 128 bytes costs a cache line each, and there are twenty passes.
    """

    __slots__ = ("_columns",)

    def __init__(self, columns: dict[str, npt.NDArray[Any]]):
        self._columns = columns

    @classmethod
    def from_areas(cls, buffer: mmap.mmap, areas: Sequence[tuple[int, int]]) -> "_Records":
        """Copy ``(offset, count)`` areas of the file."""
        total = sum(count for _, count in areas)
        columns = {name: np.empty(total, RECORD[name].base) for name in RECORD.names or ()}
        at = 0
        for offset, count in areas:
            rows = np.frombuffer(buffer, RECORD, count, offset)
            for first in range(0, count, _CHUNK):
                chunk = rows[first : first + _CHUNK]
                target = slice(at + first, at + first + len(chunk))
                for name, column in columns.items():
                    column[target] = chunk[name]
            at += count
        return cls(columns)

    @classmethod
    def joined(cls, parts: Sequence["_Records"]) -> "_Records":
        """Return all parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        names = RECORD.names or ()
        return cls({name: np.concatenate([part[name] for part in parts]) for name in names})

    def __len__(self) -> int:
        return len(self._columns["id"])

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name]

    def add(self, name: str, base: int) -> None:
        """Count a column's numbers on from a base; none (negative) stays none."""
        values = self._columns[name]
        self._columns[name] = np.where(values >= 0, values + base, values)

    def take(self, rows: npt.NDArray[Any]) -> "_Records":
        """Return the rows with these indices, or where a mask is true."""
        return _Records({name: column[rows] for name, column in self._columns.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What the header of one process's ring says: the last word of a dead or hanging process."""

    rank: int
    node: str
    pid: int
    process_start: int
    """Start of the process in clock ticks since boot, to tell a reused pid."""
    state: str
    """``recording``, ``off`` (switched off) or ``closed`` (ended in order)."""
    step: int | None
    """The step it was in."""
    alive_ns: int | None
    """Unix time of its last sign of life (end of a step or a change of facts)."""
    live_ring: bool
    """A ring was read that nobody has removed: the process runs, or was not drained to its end."""
    lost: int
    """Records that were overwritten before anybody kept them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run in columns."""

    facts: RunFacts
    spans: pl.DataFrame
    """The ``spans`` table; an open span has a null duration. In order of opening per rank."""
    counters: pl.DataFrame
    """``rank, kind, count, bytes``: spans closed since the start, as the process itself counted,
    whatever was overwritten or not drained."""
    resources: pl.DataFrame
    """Per phase and step: ``rank, step, kind, id, peak_rss_bytes, device_ns, tokens, flops``."""
    processes: tuple[ProcessState, ...] = ()
    peak: Mapping[str, Any] = field(default_factory=dict)
    """``{"flops", "source", "precision"}`` of one node's CPUs where ``run`` measured it."""
    missing: tuple[str, ...] = ()
    """What could not be read or seen, in sentences."""


@dataclass(slots=True, kw_only=True)
class _Process:
    """The files of one process, merged."""

    file: Path
    node: str
    header: ring.Header
    strings: list[str]
    facts: dict[str, Any]
    parts: list[_Records]
    live_ring: bool
    lost: int = 0
    step_base: int = 0
    """What its steps are numbered on from: those of earlier lives of the job."""
    sequence_base: int = 0

    @property
    def rank(self) -> int:
        return self.header.rank if self.header.rank is not None else 0

    @property
    def offset(self) -> int:
        return self.header.anchor[1] - self.header.anchor[0]

    def highest(self, name: str) -> int:
        """Return the highest number of its records, -1 without any."""
        return max((int(part[name].max()) for part in self.parts if len(part)), default=-1)

    def times(self) -> tuple[int, int]:
        """Return the Unix times of its first word and its last."""
        begun = self.header.first_anchor[1]
        alive = self.header.alive_ns + self.offset if self.header.alive_ns else 0
        return begun, max(self.highest("start_ns") + self.offset, alive, begun)


def read_run(path: Path | str, *, follow_rings: bool = True, newest: int | None = None) -> RunData:
    """Read a run directory (or a folder of rings, or one ring file).

    With ``follow_rings`` the rings that ``run.json`` names on this machine are read too: they hold
    what was not drained. With ``newest``, at most so many records of each lane of a ring, no older
    than what is left of its other lanes: what changes each second need not be read whole.
    Raise InputError where there is nothing of a run at all.
    """
    path = Path(path)
    missing: list[str] = []
    run_json = _read_run_json(path, missing)
    processes: dict[_Key, _Process] = {}
    for file in _ring_files(path, run_json if follow_rings else {}):
        _add_file(file, processes, missing, newest)
    if not processes and not run_json:
        unread = [text for text in missing if not text.startswith("run.json is missing")]
        raise InputError(
            f"no run here: {'; '.join(unread[:3]) or 'neither run.json nor a ring file'}",
            where=str(path), remedy="name the --out folder of kansoku run",
        )  # fmt: skip
    ordered = sorted(processes.values(), key=lambda p: (p.rank, p.header.first_anchor[1]))
    run = (
        facts_of.text(run_json.get("run"))
        or _first(p.facts.get("run") for p in ordered)
        or path.name
    )
    ordered = _without_strangers(ordered, missing)
    _number_on(ordered, missing)
    frames, resources, incarnations = [], [], dict[int, int]()
    for process in ordered:
        shift = incarnations.get(process.rank, 0)
        incarnations[process.rank] = shift + 1
        spans, extra = _columns(process, run, shift, [] if newest else missing)
        frames.append(spans)
        resources.append(extra)
    facts = _run_facts(run, run_json, ordered)
    missing += facts.missing
    for rank_facts in facts.ranks:
        missing += [f"rank {rank_facts.rank}: {text}" for text in rank_facts.missing]
    return RunData(
        facts=facts,
        spans=pl.concat(frames) if frames else pl.DataFrame(schema=table_schema("spans")),
        counters=_counters(ordered),
        resources=pl.concat(resources) if resources else pl.DataFrame(schema=RESOURCES_SCHEMA),
        processes=tuple(_state(process) for process in ordered),
        peak=run_json.get("peak") if isinstance(run_json.get("peak"), dict) else {},  # type: ignore[arg-type]
        missing=_unique(missing),
    )


def _without_strangers(processes: Sequence[_Process], missing: list[str]) -> list[_Process]:
    """Leave out unrelated processes that named themselves a rank while another was it."""
    spans = [(process.rank, *process.times()) for process in processes]
    joined = [bool(process.facts.get("groups")) for process in processes]
    left_out = set[int]()
    for chosen, others in strangers(spans, joined).items():
        left_out.update(others)
        one = processes[chosen]
        missing.append(
            f"{len(others) + 1} unrelated processes named themselves rank {one.rank} at the same "
            f"time: shown is pid {one.header.pid}, "
            f"{'which is in a process group' if joined[chosen] else 'which ran longest'}; "
            "of another one: kansoku report "
            + ", ".join(shlex.quote(str(processes[n].file)) for n in others[:_MOST_NAMED])
            + (" …" if len(others) > _MOST_NAMED else "")
        )
    return [process for n, process in enumerate(processes) if n not in left_out]


def _number_on(processes: Sequence[_Process], missing: list[str]) -> None:
    """Give ranks that were started again steps and collectives of their own."""
    times = [process.times() for process in processes]
    life = lives([(p.rank, *time) for p, time in zip(processes, times, strict=True)])
    steps = numbered_on(life, [max(p.highest("step"), p.header.step or -1) for p in processes])
    sequences = numbered_on(life, [p.highest("sequence") for p in processes])
    seen: dict[int, list[int]] = {}
    for process, one, step, sequence in zip(processes, life, steps, sequences, strict=True):
        process.step_base, process.sequence_base = step, sequence
        seen.setdefault(process.rank, []).append(one)
    for rank, mine in seen.items():
        if len(set(mine)) > 1:
            missing.append(
                f"rank {rank} was started {len(set(mine))} times in this run; its steps and "
                "collectives are numbered on"
            )
        if len(mine) > len(set(mine)):
            missing.append(
                f"{len(mine) - len(set(mine)) + 1} processes call themselves rank {rank} at the "
                "same time; their spans cannot be told apart"
            )


def _unique(sentences: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentences))


def _first(values: Iterator[Any]) -> str | None:
    return next((value for value in values if isinstance(value, str) and value), None)


def _read_run_json(path: Path, missing: list[str]) -> dict[str, Any]:
    file = path / "run.json"
    if not file.is_file():
        if path.is_dir():
            missing.append("run.json is missing: command, start, end and exit code are unknown")
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        missing.append(f"run.json cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        missing.append("run.json is not an object")
        return {}
    schema = value.get("schema")
    if schema != "kansoku.run/1":
        missing.append(f"run.json has schema {schema!r}, expected 'kansoku.run/1'")
    return value


def _ring_files(path: Path, run_json: Mapping[str, Any]) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.ring")) + sorted(path.glob("*/*.ring"))
    ring_dir = facts_of.text(run_json.get("ring_dir"))
    if ring_dir and facts_of.text(run_json.get("ring_node")) == os.uname().nodename:
        files += sorted(Path(ring_dir).glob("*.ring"))
    return files


def _add_file(
    file: Path,
    processes: dict[_Key, _Process],
    missing: list[str],
    newest: int | None,
) -> None:
    try:
        buffer, header = open_ring(file)
    except (OSError, ValueError, ring.RingError) as error:
        missing.append(f"{file.name} cannot be read: {error}")
        return
    facts = ring.read_facts(buffer, header)
    strings = ring.read_strings(buffer, header)
    is_log = header.file_kind == ring.LOG
    records = _records(buffer, header, file, missing, None if is_log else newest)
    node = facts_of.text(facts.get("node")) or file.stem.rpartition("-")[0] or "unknown"
    # A program that replaces itself (exec) keeps pid and start; its ring has its own first anchor.
    key = (node, header.pid, header.process_start, header.first_anchor)
    known = processes.get(key)
    if known is None:
        processes[key] = _Process(
            file=file,
            node=node,
            header=header,
            strings=strings,
            facts=facts,
            parts=[records],
            live_ring=not is_log,
        )
        return
    known.parts.append(records)
    if not is_log:  # the ring itself is newer than any copy of its header
        known.header, known.strings, known.facts = header, strings, facts or known.facts
        known.live_ring = True


def _records(
    buffer: mmap.mmap, header: ring.Header, file: Path, missing: list[str], newest: int | None
) -> _Records:
    """Return the records whose first and last word agree; of a ring, the newest of each lane."""
    areas: list[tuple[int, int | None]]
    if header.file_kind == ring.LOG:
        areas = [(header.records_offset, None)]
    else:
        areas = [(lane.offset, lane.capacity) for lane in header.lanes]
    whole_areas, cut = [], 0
    for offset, capacity in areas:
        room = max(len(buffer) - offset, 0) // ring.RECORD_BYTES
        count = room if capacity is None else min(room, capacity)
        if capacity is not None and count < capacity:
            cut += capacity - count
        if capacity is None and len(buffer) < offset:
            missing.append(f"{file.name} is truncated: it ends before its records begin")
        elif capacity is None and (len(buffer) - offset) % ring.RECORD_BYTES:
            missing.append(f"{file.name}: the last record was cut while being written")
        if count > 0:
            whole_areas.append((offset, count))
    if cut:
        missing.append(f"{file.name} is truncated: room for {cut} records is missing")
    if newest is not None:
        heads = {lane.offset: lane.head for lane in header.lanes}
        whole_areas = [
            (offset + first * ring.RECORD_BYTES, size)
            for offset, count in whole_areas
            for first, size in newest_stretches(
                np.frombuffer(buffer, RECORD, count, offset)["id"], newest, heads[offset]
            )
        ]
    records = _Records.from_areas(buffer, whole_areas)
    whole = (records["id"] == records["id_again"]) & (records["id"] != 0)
    whole &= records["kind"] < len(ring.KINDS)
    torn = int(np.count_nonzero((records["id"] != 0) & ~whole))
    if torn:
        missing.append(f"{file.name}: {torn} records were torn while being written; left out")
    can = plausible(
        header, *(records[name] for name in ("start_ns", "duration_ns", "step", "sequence"))
    )
    if wrong := int(np.count_nonzero(whole & ~can)):
        missing.append(f"{file.name}: {wrong} records with impossible times or numbers; left out")
        whole &= can
    if newest is not None:
        whole &= since_all_lanes(records["id"], records["start_ns"], newest)
    return records if bool(whole.all()) else records.take(whole)


def _merge(process: _Process) -> tuple[_Records, npt.NDArray[np.uint64], int]:
    """Join the parts: one row a span, closed before open, in the order of opening."""
    records = _Records.joined(process.parts)
    if len(records) == 0:
        return records, np.empty(0, np.uint64), 0
    ids = records["id"]
    late = records["origin"] != 0
    effective = np.where(late, records["origin"], ids) if late.any() else ids
    lanes = ids >> np.uint64(ring.LANE_SHIFT)
    picks, lost = [], 0
    closed = records["duration_ns"] >= 0
    for lane in np.flatnonzero(np.bincount(lanes.astype(np.int64) & 255)):
        rows = np.flatnonzero(lanes == lane)
        numbers = (ids[rows] & _COUNT_MASK).astype(np.int64)
        newest = int(numbers.max())
        targets = (effective[rows] & _COUNT_MASK).astype(np.int64)
        if newest > 64 * len(rows) + 4096 or int(targets.max()) > newest:
            # Sparse or damaged numbering: sorting costs more but not memory by the largest number.
            order = np.lexsort((closed[rows], targets))
            last = np.append(np.diff(targets[order]) != 0, True)
            picks.append(rows[order[last]])
            lost += max(newest - len(np.unique(numbers)), 0)
            continue
        slot = np.full(newest + 1, -1, np.int64)
        seen = np.zeros(newest + 1, np.bool_)
        seen[numbers] = True
        done = closed[rows]
        slot[targets[~done]] = rows[~done]
        slot[targets[done]] = rows[done]
        seen |= slot >= 0
        lost += newest - int(np.count_nonzero(seen[1:]))
        picks.append(slot[slot >= 0])
    rows = np.concatenate(picks)
    if len(rows) == len(records) and bool((np.diff(rows) == 1).all()):
        return records, effective, lost
    return records.take(rows), effective[rows], lost


def _columns(
    process: _Process, run: str, incarnation: int, missing: list[str]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    records, effective, lost = _merge(process)
    process.lost = lost
    if lost:
        missing.append(
            f"rank {process.rank}: {lost} records were overwritten or cut before they were kept"
        )
    offset = process.offset
    for name, base in (("step", process.step_base), ("sequence", process.sequence_base)):
        if base:
            records.add(name, base)
    shift = incarnation << PROCESS_SHIFT
    ids = effective.astype(np.int64) + shift
    count = len(records)
    parent = records["parent"].astype(np.int64)
    strings = Strings(process.strings)
    kinds = pl.Series(ring.KINDS, dtype=pl.String)[
        np.minimum(records["kind"], len(ring.KINDS) - 1).astype(np.uint32)
    ]
    columns = {
        "run": same(run, pl.String(), count),
        "rank": same(process.rank, pl.Int32(), count),
        "step": nullable(records["step"]),
        "kind": kinds,
        "name": strings.take(records["name"]),
        "start_ns": pl.Series(records["start_ns"] + offset),
        "duration_ns": nullable(records["duration_ns"]),
        "id": pl.Series(ids),
        "parent": nullable(np.where(parent > 0, parent + shift, -1)),
        "group": strings.take(records["group"]),
        "sequence": nullable(records["sequence"]),
        "bytes": nullable(records["bytes"]),
        "dtype": strings.take(records["dtype"]),
        "device": strings.take(records["device"]),
        "thread": pl.Series(records["thread"].astype(np.int64)),
        "cpu_ns": nullable(records["cpu_ns"]),
        "attributes": attributes(records, process.strings),
    }
    spans = pl.DataFrame({name: columns[name].alias(name) for name in table_schema("spans")})
    return spans, _resources(records, ids, kinds, process.rank)


def _resources(
    records: _Records, ids: npt.NDArray[np.int64], kinds: pl.Series, rank: int
) -> pl.DataFrame:
    is_step = records["kind"] == ring.KIND_CODES["step"]
    # Every phase holds its run-queue wait, but the peak memory only now and then.
    queued = np.isin(records["kind"], _PHASE_CODES) & (records["value_a"] > 0)
    noted = (records["peak_rss_bytes"] >= 0) | (records["device_ns"] >= 0)
    rows = np.flatnonzero(is_step | queued | noted)
    part, steps = records.take(rows), is_step[rows]
    values = {}
    for name, column in (("tokens", "value_a"), ("flops", "value_b")):
        known = steps & np.isfinite(part[column]) & (part[column] > 0)
        values[name] = pl.Series(pa.array(part[column], mask=~known))
    columns = {
        "rank": same(rank, pl.Int32(), len(rows)),
        "step": nullable(part["step"]),
        "kind": kinds[rows],
        "id": pl.Series(ids[rows]),
        "peak_rss_bytes": nullable(part["peak_rss_bytes"]),
        "device_ns": nullable(part["device_ns"]),
        **values,
        "queued_ns": nullable(_queued(part, steps)),
    }
    return pl.DataFrame({name: columns[name].cast(kind) for name, kind in RESOURCES_SCHEMA.items()})


def _queued(records: _Records, steps: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    known = ~steps & np.isfinite(records["value_a"]) & (records["value_a"] > 0)
    known &= records["value_a"] < float(1 << 62)
    return np.where(known, records["value_a"], -1.0).astype(np.int64)


def _counters(processes: Sequence[_Process]) -> pl.DataFrame:
    rows = [
        (process.rank, kind, count, bytes_)
        for process in processes
        for kind, (count, bytes_) in process.header.counts.items()
        if max(count, bytes_) < 1 << 53  # sums stay within 64 bits
    ]
    frame = pl.DataFrame(rows, schema=COUNTERS_SCHEMA, orient="row")
    return frame.group_by("rank", "kind").agg(pl.col("count", "bytes").sum()).sort("rank", "kind")


def _state(process: _Process) -> ProcessState:
    header, alive = process.header, process.header.alive_ns
    sane = 0 < alive < 1 << 60
    return ProcessState(
        rank=process.rank,
        node=process.node,
        pid=header.pid,
        process_start=header.process_start,
        state=_STATES.get(header.state, "recording"),
        step=None if header.step is None else header.step + process.step_base,
        alive_ns=alive + process.offset if sane else None,
        live_ring=process.live_ring,
        lost=process.lost,
    )


def _rank_facts(process: _Process) -> RankFacts:
    facts, header = process.facts, process.header
    missing = list(facts_of.texts(facts.get("missing")))
    if header.not_written:
        missing.append(f"{header.not_written} records could not be written")
    if header.errors:
        missing.append(f"{header.errors} errors inside the recorder were swallowed")
    if header.strings_dropped:
        missing.append(f"{header.strings_dropped} names did not fit into the string table")
    extra = facts.get("extra")
    return RankFacts(
        rank=process.rank,
        local_rank=header.local_rank,
        world_size=header.world_size,
        node=process.node,
        pid=header.pid,
        device=facts_of.text(facts.get("device")),
        torch_version=facts_of.text(facts.get("torch")),
        python_version=facts_of.text(facts.get("python")),
        parameters=facts_of.integer(facts.get("parameters")),
        layers=facts_of.integer(facts.get("layers")),
        hidden=facts_of.integer(facts.get("hidden")),
        model_flops_per_step=facts_of.number(facts.get("model_flops_per_step")),
        tokens_per_step=facts_of.number(facts.get("tokens_per_step")),
        groups=facts_of.groups(facts.get("groups")),
        recorder=facts_of.text(facts.get("recorder")),
        missing=tuple(missing),
        extra={str(k): str(v) for k, v in extra.items()} if isinstance(extra, dict) else {},
    )


def _run_facts(run: str, run_json: Mapping[str, Any], processes: Sequence[_Process]) -> RunFacts:
    starts = [p.header.first_anchor[1] for p in processes]
    nodes = facts_of.texts(run_json.get("nodes"))
    return RunFacts(
        run=run,
        command=facts_of.texts(run_json.get("command")),
        start_ns=facts_of.stamp(run_json.get("start_ns")) or min(starts, default=0),
        end_ns=facts_of.stamp(run_json.get("end_ns")),
        exit_code=facts_of.integer(run_json.get("exit_code")),
        slurm_job=facts_of.text(run_json.get("slurm_job")),
        nodes=tuple(dict.fromkeys([*nodes, *(p.node for p in processes)])),
        ranks=tuple(_rank_facts(process) for process in processes),
        missing=facts_of.texts(run_json.get("missing")),
        ends=facts_of.ends(run_json.get("processes")),
    )
