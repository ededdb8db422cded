"""Read ``sacct --parsable2`` (or ``-p``) of any column set and delimiter, in bounded memory."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import polars as pl

from kansoku.errors import InputError
from kansoku.formats.slurm._columns import KNOWN, XDMOD, known_name
from kansoku.formats.slurm._convert import Converter
from kansoku.formats.slurm._repair import Repairer
from kansoku.formats.slurm.records import Parsed, Quarantined

__all__ = ["Layout", "detect_layout", "read_sacct_text"]

# 48 MB of text become about 300 MB while they are typed.
_BLOCK_BYTES = 48 << 20
_LINE = "\u0085row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the lines of a file are cut."""

    columns: tuple[str, ...]
    delimiter: str
    header: bool
    trailing: bool
    """Every line ends with a delimiter (``--parsable``)."""


def detect_layout(
    first_line: str, *, delimiter: str | None = None, file: str | None = None
) -> Layout:
    """Find the columns and the delimiter from the first line.

    A line without known column names is taken as an Open XDMoD log if it has its 26 cells; any
    other raises InputError saying what to give.
    """
    line = first_line.rstrip("\r\n").removeprefix("\ufeff")
    found = delimiter or _guess_delimiter(line)
    if found is not None:
        words = line.split(found)
        trailing = len(words) > 1 and words[-1] == ""
        words = words[:-1] if trailing else words
        names = tuple(known_name(word) for word in words)
        if sum(word.strip().lower() in KNOWN for word in words) * 2 > len(words):
            return Layout(columns=names, delimiter=found, header=True, trailing=trailing)
    cut = delimiter or "|"
    if line.count(cut) + 1 >= len(XDMOD) and re.match(r"\d+[_+.\d\[\]%-]*" + re.escape(cut), line):
        return Layout(columns=XDMOD, delimiter=cut, header=False, trailing=False)
    raise InputError(
        f"the first line holds no sacct column names: {line[:120]!r}",
        where=file,
        remedy="export with sacct --parsable2 and without --noheader, or use --json",
    )


def _guess_delimiter(line: str) -> str | None:
    match = re.match(r"[A-Za-z]+([^A-Za-z]+)[A-Za-z]", line)
    return match[1] if match and match[1] else None


def read_sacct_text(
    data: bytes | memoryview,
    *,
    file: str,
    zone: str = "UTC",
    cluster: str | None = None,
    delimiter: str | None = None,
) -> Iterator[Parsed]:
    """Yield the file in parts. ``zone`` is the time zone of its naive local times.

    ``cluster`` fills rows of a file that has no Cluster column.
    """
    # Released at the end, also on an error: a mapped file cannot be closed under a view.
    with memoryview(data) as view:
        yield from _read_view(view, file=file, zone=zone, cluster=cluster, delimiter=delimiter)


def _read_view(
    view: memoryview, *, file: str, zone: str, cluster: str | None, delimiter: str | None
) -> Iterator[Parsed]:
    first_end = _find(view, b"\n", 0)
    first = bytes(view[:first_end]).decode("utf-8", "replace")
    layout = detect_layout(first, delimiter=delimiter, file=file)
    if not layout.header:
        zone = "UTC"  # XDMoD's instructions run sacct with TZ=UTC
    converter = Converter(layout.columns, file=file, zone=zone, cluster=cluster)
    repairer = Repairer(layout.columns, layout.delimiter)
    at, line_number = (first_end + 1, 2) if layout.header else (0, 1)
    while at < len(view):
        end = _block_end(view, at)
        block = _clean(bytes(view[at:end]), layout)
        frame, quarantined, repaired, lines = _cut(block, layout, repairer, file, line_number)
        parsed = converter.convert(frame, _LINE)
        yield Parsed(
            jobs=parsed.jobs,
            steps=parsed.steps,
            quarantined=(*quarantined, *parsed.quarantined),
            repaired=repaired,
            notes=parsed.notes if at == first_end + 1 else (),
        )
        at = end
        line_number += lines


def _find(view: memoryview, what: bytes, start: int) -> int:
    """Return the position of a byte from ``start``, or the length."""
    step = 1 << 16
    for at in range(start, len(view), step):
        found = bytes(view[at : at + step]).find(what)
        if found >= 0:
            return at + found
    return len(view)


def _block_end(view: memoryview, at: int) -> int:
    """End a block after a line that is followed by a line starting like a row."""
    end = at + _BLOCK_BYTES
    if end >= len(view):
        return len(view)
    while True:
        newline = _find(view, b"\n", end)
        if newline + 1 >= len(view):
            return len(view)
        head = bytes(view[newline + 1 : newline + 24])
        if re.match(rb"\d+[^0-9]|[A-Za-z_.-]+\|", head) or newline - at > 2 * _BLOCK_BYTES:
            return newline + 1
        end = newline + 1


def _clean(block: bytes, layout: Layout) -> bytes:
    if not block.isascii():
        try:
            block.decode("utf-8")
        except UnicodeDecodeError:
            block = block.decode("utf-8", "replace").encode()
    if b"\r\n" in block:
        block = block.replace(b"\r\n", b"\n")
    if b"\0" in block:
        block = block.replace(b"\0", "\ufffd".encode())
    if len(layout.delimiter.encode()) > 1:
        block = block.replace(layout.delimiter.encode(), b"\x1f")
    if layout.trailing:
        cut = _cut_byte(layout)
        block = block.replace(cut + b"\n", b"\n").removesuffix(cut)
    return block if block.endswith(b"\n") else block + b"\n"


def _cut_byte(layout: Layout) -> bytes:
    encoded = layout.delimiter.encode()
    return encoded if len(encoded) == 1 else b"\x1f"


def _cut(
    block: bytes, layout: Layout, repairer: Repairer, file: str, first_line: int
) -> tuple[pl.DataFrame, list[Quarantined], int, int]:
    """Return the rows as text columns plus line numbers, what stayed out, repairs, lines."""
    cut = _cut_byte(layout)
    raw = np.frombuffer(block, dtype=np.uint8)
    newlines = np.flatnonzero(raw == 10)
    # Counting through a running sum of 48 million bytes costs more than searching positions.
    cuts = np.flatnonzero(raw == cut[0])
    counts = np.diff(np.searchsorted(cuts, newlines), prepend=0)
    whole = counts == len(layout.columns) - 1
    starts = np.concatenate(([0], newlines[:-1] + 1))
    filled = newlines > starts
    if whole.all():
        return _read(block, layout, np.arange(len(newlines)) + first_line), [], 0, len(newlines)
    keep = whole & filled
    good = b"".join(block[starts[a] : newlines[b] + 1] for a, b in _runs(np.flatnonzero(keep)))
    frame = _read(good, layout, np.flatnonzero(keep) + first_line)
    quarantined: list[Quarantined] = []
    rows: list[list[str | None]] = []
    numbers: list[int] = []
    text_cut = cut.decode()
    # A blank line may be part of a name with two newlines: only runs of broken lines keep theirs.
    for a, b in _runs(np.flatnonzero(~keep)):
        lines = block[starts[a] : newlines[b]].decode().split("\n")
        if not any(lines):
            continue
        for index, answer in repairer.rows([x.replace(text_cut, layout.delimiter) for x in lines]):
            if isinstance(answer, list):
                rows.append([cell or None for cell in answer])
                numbers.append(int(a) + index + first_line)
            elif lines[index]:
                quarantined.append(
                    Quarantined(
                        file=file,
                        row=int(a) + index + first_line,
                        reason=answer,
                        text=lines[index][:160],
                    )
                )
    if rows:
        schema = dict.fromkeys(frame.columns[:-1], pl.String)
        extra = pl.DataFrame(rows, schema=schema, orient="row").with_columns(
            pl.Series(_LINE, numbers, dtype=pl.Int64)
        )
        frame = pl.concat([frame, extra]).sort(_LINE)
    return frame, quarantined, len(rows), len(newlines)


def _runs(indices: np.ndarray) -> list[tuple[int, int]]:
    """Return first and last of each run of consecutive numbers."""
    if len(indices) == 0:
        return []
    breaks = np.flatnonzero(np.diff(indices) > 1)
    firsts = indices[np.concatenate(([0], breaks + 1))]
    lasts = indices[np.concatenate((breaks, [len(indices) - 1]))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _read(block: bytes, layout: Layout, lines: np.ndarray) -> pl.DataFrame:
    names = _unique(layout.columns)
    if not block:
        return pl.DataFrame(schema={**dict.fromkeys(names, pl.String), _LINE: pl.Int64})
    frame = pl.read_csv(
        BytesIO(block),
        separator=_cut_byte(layout).decode(),
        has_header=False,
        new_columns=names,
        quote_char=None,
        infer_schema=False,
        schema=dict.fromkeys(names, pl.String),
    )
    return frame.with_columns(pl.Series(_LINE, lines, dtype=pl.Int64))


def _unique(columns: Sequence[str]) -> list[str]:
    """Name a column that is asked for twice only once; later ones get a number."""
    seen: dict[str, int] = {}
    names = []
    for name in columns:
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names
