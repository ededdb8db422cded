"""Values of JSON that a process wrote of itself: what has the wrong type or size is absent."""

import math

from kansoku.model.run import ProcessEnd, ProcessGroup

__all__ = ["ends", "groups", "integer", "number", "stamp", "text", "texts"]

_MOST = 1 << 62


def text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def integer(value: object) -> int | None:
    known = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST
    return value if known else None  # type: ignore[return-value]


def stamp(value: object) -> int | None:
    """Return a Unix time in ns, none before 1970."""
    known = integer(value)
    return known if known is not None and known > 0 else None


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MOST**4:
        return None
    return float(value) if math.isfinite(value) else None


def texts(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def groups(value: object) -> tuple[ProcessGroup, ...]:
    found = []
    for item in value if isinstance(value, list) else []:
        if not isinstance(item, dict) or not text(item.get("name")):
            continue
        ranks = item.get("ranks")
        members = ranks if isinstance(ranks, list) else []
        found.append(
            ProcessGroup(
                name=str(item["name"]),
                description=text(item.get("description")),
                ranks=tuple(rank for rank in members if integer(rank) is not None),
                backend=text(item.get("backend")),
            )
        )
    return tuple(found)


def ends(value: object) -> tuple[ProcessEnd, ...]:
    found = []
    for item in value if isinstance(value, list) else []:
        if not isinstance(item, dict):
            continue
        node, pid = text(item.get("node")), integer(item.get("pid"))
        if node is None or pid is None:
            continue
        code = integer(item.get("exit_code"))
        found.append(
            ProcessEnd(
                node=node,
                pid=pid,
                exit_code=code if code is not None and 0 <= code <= 255 else None,
                ended_ns=stamp(item.get("ended_ns")),
            )
        )
    return tuple(found)
