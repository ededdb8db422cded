"""From a Flight Recorder dump to a rank's state, for every dump version."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from kansoku.trace.hang.record import Group, Operation, RankState, Status

__all__ = ["state_of_dump"]

_BACKEND = re.compile(r"^(?:nccl|gloo|xccl|mpi|ucc|hccl)[:_]", re.IGNORECASE)
_LARGEST = 1 << 63
_P2P = re.compile(r"^(send|recv)\w*\s*(\d{1,9})\s*(->|<-)\s*(\d{1,9})(?!\d)", re.IGNORECASE)


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@lru_cache(maxsize=4096)
def _ranks_in_text(text: str) -> tuple[int, ...]:
    """Read a list written as text; thousands of ranks repeat the same long lists."""
    try:
        value = json.loads(text)
    except ValueError:
        return ()
    return _ranks(value) if isinstance(value, list) else ()


def _ranks(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        return _ranks_in_text(value)
    if not isinstance(value, Sequence):
        return ()
    return tuple(rank for rank in value if isinstance(rank, int))


def _text(value: object) -> str:
    """Return a text or number as text, nothing for the rest.

    A dump of some hundred bytes can nest one list in itself 2**40 times: writing it out never ends.
    """
    if isinstance(value, int) and not -_LARGEST < value < _LARGEST:
        return ""
    return str(value) if isinstance(value, (str, int, float)) else ""


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    return tuple(_ranks(size) for size in value if isinstance(size, Sequence))


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(_text(item) for item in value) if isinstance(value, Sequence) else ()


def _groups(dump: Mapping[str, Any]) -> dict[str, Group]:
    config = dump.get("pg_config")
    if not isinstance(config, Mapping):
        return {}
    found = {}
    for key, row in config.items():
        if isinstance(row, Mapping):
            name = _text(row.get("name", key))
            found[name] = Group(
                name=name,
                description=_text(row["desc"]) if row.get("desc") else None,
                ranks=_ranks(row.get("ranks")),
            )
    return found


def _operation(entry: Mapping[str, Any]) -> Operation | None:
    group = entry.get("process_group")
    if isinstance(group, Sequence) and not isinstance(group, str) and group:
        group = group[0]
    elif group is None:
        group = entry.get("pg_name", entry.get("pg_id", "0"))
    name = _BACKEND.sub("", _text(entry.get("profiling_name", "")))
    match = _P2P.match(name)
    peer = None
    if match is not None:
        name = match[1].lower()
        peer = int(match[4])
        if match[3] == "<-":
            peer = int(match[4])
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    is_p2p = bool(entry.get("is_p2p", match is not None))
    return Operation(
        group=_text(group),
        sequence=None if is_p2p else _integer(sequence),
        p2p_sequence=_integer(entry.get("p2p_seq_id")) if is_p2p else None,
        name=name,
        peer=peer,
        input_sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        dtypes=_texts(entry.get("input_dtypes", entry.get("dtype", ()))),
        state=_state(entry),
        created_ns=_integer(entry.get("time_created_ns")),
    )


def _state(entry: Mapping[str, Any]) -> str:
    state = _text(entry.get("state", ""))
    if state in {"scheduled", "started", "completed"}:
        return state
    # Early dumps have only the two times that the watchdog found.
    if entry.get("retired") or entry.get("time_discovered_completed_ns"):
        return "completed"
    return "started" if entry.get("time_discovered_started_ns") else "scheduled"


def _local_ids(dump: Mapping[str, Any], groups: Mapping[str, Group]) -> dict[str, str]:
    """Map the rank's own group numbers, which pg_status uses, to group names.

    Entries name both. For groups without entries: numbers are given in order of creation, and
    names that are numbers are too, so equal counts pair off in order.
    """
    known: dict[str, str] = {}
    for entry in dump.get("entries") or ():
        group = entry.get("process_group") if isinstance(entry, Mapping) else None
        if isinstance(group, Sequence) and group and entry.get("pg_id") is not None:
            known[_text(entry["pg_id"])] = _text(group[0])
    status = dump.get("pg_status")
    if not isinstance(status, Mapping):
        return known
    ids = sorted((_text(key) for key in status), key=lambda text: (len(text), text))
    names = sorted(groups, key=lambda text: (len(text), text))
    if len(ids) == len(names) and all(name.isdigit() for name in names):
        paired = dict(zip(ids, names, strict=True))
        if all(paired.get(key) == name for key, name in known.items()):
            return paired
    for key in ids:
        if key not in known and key in groups:
            known[key] = key
    return known


def _status(
    dump: Mapping[str, Any], groups: Mapping[str, Group], operations: Sequence[Operation]
) -> dict[str, Status]:
    found: dict[str, Status] = {}
    for operation in operations:
        if operation.sequence is None:
            continue
        known = found.get(operation.group, Status(enqueued=-1, completed=-1))
        done = operation.sequence if operation.state == "completed" else -1
        begun = operation.sequence if operation.state != "scheduled" else -1
        found[operation.group] = Status(
            enqueued=max(known.enqueued, operation.sequence),
            completed=max(known.completed, done),
            started=max(known.started or -1, begun),
        )
    table = dump.get("pg_status")
    if not isinstance(table, Mapping):
        return found
    names = _local_ids(dump, groups)
    for key, row in table.items():
        name = names.get(_text(key))
        if name is None or not isinstance(row, Mapping):
            continue
        enqueued = _integer(row.get("last_enqueued_collective"))
        completed = _integer(row.get("last_completed_collective"))
        started = _integer(row.get("last_started_collective"))
        if enqueued is None or completed is None or enqueued < 0:
            continue
        found[name] = Status(enqueued=enqueued, completed=completed, started=started)
    return found


def state_of_dump(dump: Mapping[str, Any], *, rank: int, file: str) -> RankState:
    """Return the rank's state; entries that are not understood are counted in its notes."""
    groups = _groups(dump)
    operations = []
    odd = 0
    for entry in dump.get("entries") or ():
        operation = _operation(entry) if isinstance(entry, Mapping) else None
        if operation is None:
            odd += 1
        else:
            operations.append(operation)
    notes = (f"{odd} entries were not understood",) if odd else ()
    return RankState(
        rank=rank,
        file=file,
        groups=groups,
        status=_status(dump, groups, operations),
        operations=tuple(operations),
        notes=notes,
    )
