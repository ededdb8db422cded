"""Read a folder of whatever there is: logs, kernel logs, Slurm outputs, dumps, traces, metrics.

Text files are scanned with a fast multi-word search; only suspicious lines reach the patterns.
Files are sorted by what they are; what could not be read is named.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
from isal import igzip

from kansoku.catalog.signatures import Signature
from kansoku.diagnose.lines import SUSPICIOUS, FileFacts, LineReader
from kansoku.errors import InputError
from kansoku.formats.job_log import Clock, host_in_path, parse_line, rank_in_path

__all__ = ["Bundle", "read_bundle"]

_HEAD_BYTES = 256 * 1024
_TAIL_BYTES = 512 * 1024
_DATE_BYTES = 16 * 1024
_LONGEST_UNPACKED_BYTES = 4 << 30
# A file that is nothing but complaints needs no more of them.
_MOST_LINES_A_FILE = 200_000
_MOST_FILES = 50_000

_KERNEL = re.compile(
    r"dmesg|kern(?:el)?[._-]|kern\.log|kmsg|messages|syslog|journal", re.IGNORECASE
)
_SCHEDULER = re.compile(
    r"slurmctld|slurmd|slurmdbd|sacct|sinfo|squeue|scontrol|sdiag", re.IGNORECASE
)
_DUMP = re.compile(
    r"nccl_trace|_dump_\d+$|flight[_-]?recorder|fr_trace|(?:^|[_-])dump[_-]?\d+", re.IGNORECASE
)
_METRICS = {".csv", ".parquet", ".prom"}


@dataclass(slots=True)
class Bundle:
    """What a folder held."""

    reader: LineReader
    text_files: list[str] = field(default_factory=list)
    dumps: list[Path] = field(default_factory=list)
    """Flight Recorder dumps."""
    traces: list[Path] = field(default_factory=list)
    """Kineto traces."""
    runs: list[Path] = field(default_factory=list)
    """kansoku run folders."""
    metrics: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """``file: why`` of what was not read."""


def _kind(name: str, head: str) -> str:
    base = name.rsplit("/", 1)[-1]
    if _SCHEDULER.search(base):
        return "scheduler"
    if (
        _KERNEL.search(base)
        or head.count("kernel:") > 2
        or re.search(r"^(?:<\d+>)?\[\s*\d+\.\d{6}\]", head, re.MULTILINE)
    ):
        return "kernel"
    if re.search(r"JobID\|", head) or re.search(r"NodeName=\S+ .*State=", head):
        return "scheduler"
    if re.search(r"nvidia[_-]?smi|ibstat|lspci|ethtool|ipmi|sel\b|health", base, re.IGNORECASE):
        return "other"
    return "job"


_DATED = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[ T_]\d|\b\w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}")


def _last_date_ns(*texts: str) -> int | None:
    """Return the time of the last line with a whole date."""
    for text in texts:
        for line in reversed(text.splitlines()):
            if _DATED.search(line[:120]):
                found = parse_line(line, Clock(reference_ns=0)).time_ns
                if found is not None:
                    return found
    return None


def _suspicious(frame: pl.LazyFrame) -> list[tuple[int, str]]:
    found = (
        frame.filter(pl.col("line").str.contains_any(list(SUSPICIOUS), ascii_case_insensitive=True))
        .head(_MOST_LINES_A_FILE)
        .collect(engine="streaming")
    )
    return [(row + 1, line) for row, line in zip(found["row"], found["line"], strict=True)]


def _unpacked(path: Path) -> bytes:
    with igzip.open(path, "rb") as file:
        data: bytes = file.read(_LONGEST_UNPACKED_BYTES)
    return data


def _text(path: Path) -> tuple[str, str, pl.LazyFrame]:
    """Return head, tail and a lazy frame of ``(row, line)``."""
    if path.suffix == ".gz":
        data = _unpacked(path)
        text = data.decode("utf-8", errors="replace")
        frame = pl.DataFrame({"line": text.splitlines()}).with_row_index("row").lazy()
        return text[:_HEAD_BYTES], text[-_TAIL_BYTES:], frame
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        size = path.stat().st_size
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
    frame = pl.scan_lines(path, name="line", row_index_name="row")
    return head.decode("utf-8", "replace"), tail.decode("utf-8", "replace"), frame


def _robust_lines(path: Path) -> pl.LazyFrame:
    """Return lines of a file with bytes that are not UTF-8, replaced."""
    lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
    return pl.DataFrame({"line": lines}).with_row_index("row").lazy()


def _read_text(path: Path, name: str, bundle: Bundle, reference_ns: int | None) -> None:
    head, tail, frame = _text(path)
    own = _last_date_ns(tail, head)
    clock = Clock(reference_ns=own or reference_ns or path.stat().st_mtime_ns)
    facts = FileFacts(
        name=name,
        kind=_kind(name, head),
        clock=clock,
        node=host_in_path(name),
        rank=rank_in_path(name),
    )
    try:
        rows = _suspicious(frame)
    except pl.exceptions.ComputeError:
        rows = _suspicious(_robust_lines(path))
    bundle.reader.read(rows, facts)
    if facts.kind == "job":
        bundle.reader.read_progress([*head.splitlines(), *tail.splitlines()], facts)
    bundle.text_files.append(name)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4096)
    return b"\0" in start


def _files(folder: Path, bundle: Bundle) -> Iterator[Path]:
    count = 0
    for path in sorted(folder.rglob("*")):
        if any((parent / "run.json").is_file() for parent in _between(path, folder)):
            continue
        if path.is_dir():
            if (path / "run.json").is_file():
                bundle.runs.append(path)
            continue
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            bundle.skipped.append(f"{path.relative_to(folder)}: a link out of the folder")
            continue
        count += 1
        if count > _MOST_FILES:
            bundle.skipped.append(f"more than {_MOST_FILES} files; the rest was not read")
            return
        yield path


def _between(path: Path, folder: Path) -> list[Path]:
    return [parent for parent in path.parents if parent.is_relative_to(folder)]


def _sort_in(path: Path, name: str, bundle: Bundle, texts: list[tuple[Path, str]]) -> None:
    """Put a file where it belongs; text files are read once all are known."""
    base = path.name.removesuffix(".gz")
    if _DUMP.search(base) or (path.suffix == ".json" and _DUMP.search(name)):
        bundle.dumps.append(path)
    elif Path(base).suffix in _METRICS:
        bundle.metrics.append(path)
    elif base.endswith(".json") and _looks_like_kineto(path):
        bundle.traces.append(path)
    elif path.suffix != ".gz" and _is_binary(path):
        with path.open("rb") as file:
            pickled = file.read(1) == b"\x80"
        if pickled:
            bundle.dumps.append(path)
        else:
            bundle.skipped.append(f"{name}: binary, of no known kind")
    else:
        texts.append((path, name))


def _looks_like_kineto(path: Path) -> bool:
    opener = igzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        start = file.read(8192)
    return b'"traceEvents"' in start or b'"schemaVersion"' in start


def _reference_ns(texts: Sequence[tuple[Path, str]]) -> int | None:
    """Return the middle of the files' own dates, for files whose stamps lack a year."""
    dates = []
    for path, _ in texts:
        if path.suffix == ".gz":
            continue
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _DATE_BYTES))
            found = _last_date_ns(file.read(_DATE_BYTES).decode("utf-8", "replace"))
        if found is not None:
            dates.append(found)
    return sorted(dates)[len(dates) // 2] if dates else None


def read_bundle(path: Path, *, extra: Sequence[Signature] = ()) -> Bundle:
    """Read a folder (or one file); raise InputError where there is nothing to read."""
    bundle = Bundle(reader=LineReader(extra))
    texts: list[tuple[Path, str]] = []
    if path.is_file():
        files, root = [path], path.parent
    elif path.is_dir():
        files, root = list(_files(path, bundle)), path
        if (path / "run.json").is_file():
            bundle.runs.append(path)
    else:
        raise InputError("no such file or folder", where=str(path))
    for file in files:
        name = str(file.relative_to(root))
        try:
            if file.stat().st_size == 0:
                bundle.skipped.append(f"{name}: empty")
            else:
                _sort_in(file, name, bundle, texts)
        except OSError as error:
            bundle.skipped.append(f"{name}: {error.strerror or error}")
    reference_ns = _reference_ns(texts)
    for file, name in texts:
        try:
            _read_text(file, name, bundle, reference_ns)
        except OSError as error:
            bundle.skipped.append(f"{name}: {error.strerror or error}")
        except EOFError as error:
            bundle.skipped.append(f"{name}: cut off: {error}")
    return bundle
