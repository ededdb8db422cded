"""/proc/self/mountstats: what each NFS mount did."""

from dataclasses import dataclass, field

from kansoku.formats.procfs import whole_number

__all__ = ["NfsMount", "NfsOperation", "parse_mountstats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NfsOperation:
    """Counters of one NFS operation since mount."""

    operations: int
    transmissions: int
    timeouts: int
    sent_bytes: int
    received_bytes: int
    queue_ms: int
    response_ms: int
    total_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NfsMount:
    """One NFS mount."""

    device: str
    mountpoint: str
    read_bytes: int | None
    """Read from the server; None where the file has no ``bytes`` line."""
    written_bytes: int | None
    operations: dict[str, NfsOperation] = field(default_factory=dict)


def _operation(words: list[str]) -> NfsOperation | None:
    numbers = [whole_number(word) for word in words[:8]]
    known = [n for n in numbers if n is not None]
    if len(known) < 8:
        return None
    return NfsOperation(
        operations=known[0],
        transmissions=known[1],
        timeouts=known[2],
        sent_bytes=known[3],
        received_bytes=known[4],
        queue_ms=known[5],
        response_ms=known[6],
        total_ms=known[7],
    )


def parse_mountstats(text: str) -> tuple[list[NfsMount], int]:
    """Return the NFS mounts and how many of their lines made no sense."""
    mounts: list[NfsMount] = []
    bad = 0
    for block in ("\n" + text).split("\ndevice ")[1:]:
        lines = block.splitlines()
        head = lines[0].split() if lines else []
        # device SERVER:/PATH mounted on /MOUNT with fstype nfs4 statvers=1.1
        if len(head) < 7 or head[1:3] != ["mounted", "on"] or not head[6].startswith("nfs"):
            continue
        operations: dict[str, NfsOperation] = {}
        read = written = None
        per_op = False
        for line in lines[1:]:
            words = line.split()
            if words[:1] == ["bytes:"] and len(words) >= 7:
                read, written = whole_number(words[5]), whole_number(words[6])
            elif words[:2] == ["per-op", "statistics"]:
                per_op = True
            elif per_op and words:
                operation = _operation(words[1:])
                if operation is None or not words[0].endswith(":"):
                    bad += 1
                else:
                    operations[words[0][:-1]] = operation
        mounts.append(
            NfsMount(
                device=head[0],
                mountpoint=head[3],
                read_bytes=read,
                written_bytes=written,
                operations=operations,
            )
        )
    return mounts, bad
