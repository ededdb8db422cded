"""Read a folder of whatever there is: logs, kernel logs, Slurm outputs, dumps, traces, metrics.

Text files are scanned with a fast multi-word search; only suspicious lines reach the patterns.
Files are sorted by what they are; what could not be read is named.
"""

import io
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import polars as pl
from isal import igzip

from kansoku.catalog.signatures import Signature
from kansoku.diagnose.context import DaemonStart
from kansoku.diagnose.daemons import signs_of_output
from kansoku.diagnose.device_text import DeviceFact, facts_of_text
from kansoku.diagnose.edge.background import (
    accounted_nodes,
    allocated_nodes,
    boot_times,
    daemon_starts,
    library_facts,
    nodes_of_ranks,
    planned_step,
    zone_minutes,
)
from kansoku.diagnose.edge.numbers import is_prometheus, is_table_of_numbers, read_numbers
from kansoku.diagnose.edge.pace import pace_of, print_of
from kansoku.diagnose.edge.sieve import Sieve, plain
from kansoku.diagnose.lines import SUSPICIOUS, FileFacts, LineReader, says_it_ended_well
from kansoku.diagnose.measures import MEASURE_COLUMNS
from kansoku.diagnose.names import addresses_of_nodes, node_of_name
from kansoku.diagnose.policy import Policy, policy_from
from kansoku.diagnose.stacks import Stack, looks_like_stacks, stacks_of_text
from kansoku.errors import ConfigurationError, InputError
from kansoku.formats.job_log import Clock, parse_line, rank_in_path

__all__ = ["Bundle", "read_bundle", "read_policy"]

_HEAD_BYTES = 256 * 1024
_RANK_ENDS_BYTES = 64 * 1024
_LOOKED_AT = 32 * 1024
_TAIL_BYTES = 512 * 1024
_DATE_BYTES = 16 * 1024
_LONGEST_STACKS = 64 << 20
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
_METRICS = {".csv", ".tsv", ".parquet", ".prom"}
_DEVICE_TEXT = re.compile(
    r"nvidia[_-]?smi|ibstat|ibv_dev|lspci|ethtool|ip[_-](?:addr|link)|ifconfig|sysctl|ulimit|limits"
    r"|versions?\b|env\b|config|facts|inventory|df\b|ipmi|dcgmi|mlxlink|rdma|show_gids|hostinfo",
    re.IGNORECASE,
)
_DEVICE_TEXT_BYTES = 8 << 20
_NODE_RECORD_BYTES = 16 << 20
_MOST_PACES = 64


@dataclass(slots=True)
class Bundle:
    """What a folder held."""

    reader: LineReader
    names: list[str] = field(default_factory=list)
    """Of all text files."""
    text_files: list[str] = field(default_factory=list)
    dumps: list[Path] = field(default_factory=list)
    """Flight Recorder dumps."""
    traces: list[Path] = field(default_factory=list)
    """Kineto traces."""
    runs: list[Path] = field(default_factory=list)
    """kansoku run folders."""
    metrics: list[Path] = field(default_factory=list)
    numbers: list[pl.DataFrame] = field(default_factory=list)
    """Measures of tables and of progress lines."""
    facts: list[DeviceFact] = field(default_factory=list)
    """What tools print of devices and configuration."""
    stacks: list[Stack] = field(default_factory=list)
    ended_well: list[bool] = field(default_factory=list)
    """Of each job log that says how it ended."""
    rank_nodes: dict[int, dict[int, str]] = field(default_factory=dict)
    """``{world: {rank: node}}`` as NCCL tells it."""
    boots: dict[str, int] = field(default_factory=dict)
    """When nodes booted, Unix ns."""
    daemons: dict[str, DaemonStart] = field(default_factory=dict)
    """What Slurm's records of nodes say of their daemons."""
    ended_tasks: dict[str, str] = field(default_factory=dict)
    went_on: dict[str, str] = field(default_factory=dict)
    """Of nodes that srun gave up, as in :class:`kansoku.diagnose.context.Signs`."""
    planned_step_s: float | None = None
    """What ``kansoku plan explain --json`` expected of a step, where its answer is there."""
    paces: int = 0
    """Logs whose step times are among the numbers."""
    step_clock: list[tuple[int, int]] = field(default_factory=list)
    """``(step, Unix ns)`` of lines of progress."""
    slurm_ended: list[bool] = field(default_factory=list)
    """The same of Slurm's own records, which know the exit code."""
    job_nodes: set[str] = field(default_factory=set)
    """Nodes of the job in Slurm's records, where these tell of one job alone."""
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


_OWN_EXCEPTION = r"^(?:\S{1,24} )?(?:[a-z_]\w*\.)+[A-Z]\w*[a-z]\w*: \S"


def _sieve(reader: LineReader) -> Sieve:
    return Sieve(SUSPICIOUS, _OWN_EXCEPTION, reader.matters)


def _opened(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        with igzip.open(path, "rb") as file:
            return io.BytesIO(file.read(_LONGEST_UNPACKED_BYTES))
    return path.open("rb")


def _ends(file: BinaryIO, *, of_one_rank: bool) -> tuple[str, str]:
    """Return head and tail of a file, and wind it back; one rank says all in its last lines."""
    head = file.read(_RANK_ENDS_BYTES if of_one_rank else _HEAD_BYTES)
    size = file.seek(0, os.SEEK_END)
    wanted = _RANK_ENDS_BYTES if of_one_rank else _TAIL_BYTES
    file.seek(max(0, size - wanted))
    tail = file.read(wanted)
    file.seek(0)
    return head.decode("utf-8", "replace"), tail.decode("utf-8", "replace")


def _read_text(
    path: Path, name: str, bundle: Bundle, sieve: Sieve, reference_ns: int | None, zone: int
) -> None:
    with _opened(path) as file:
        head, tail = _ends(file, of_one_rank=rank_in_path(name) is not None)
        facts = _facts(path, name, head, tail, bundle, reference_ns, zone)
        if _take_tool_text(path, facts, head, bundle):
            return
        bundle.reader.read(islice(sieve.rows(file), _MOST_LINES_A_FILE), facts)
    # In step all ranks say the same: some logs are enough for the pace.
    if facts.kind == "job" and bundle.paces < _MOST_PACES:
        _take_pace(path, facts, (head, tail), bundle)
    if facts.kind == "job":
        bundle.facts += library_facts(head, name)
        bundle.reader.addresses.update(addresses_of_nodes(head))
        for world, nodes in nodes_of_ranks(head).items():
            bundle.rank_nodes.setdefault(world, {}).update(nodes)
        few = 400 if facts.rank is not None else 4000
        bundle.reader.read_progress(plain(head).splitlines()[: few // 2], facts)
        bundle.reader.read_progress(reversed(plain(tail).splitlines()[-few:]), facts)
        _take_signs(path, name, tail, bundle)
    if facts.kind == "scheduler":
        if "SlurmdStartTime=" in head:
            with _opened(path) as file:
                text = file.read(_NODE_RECORD_BYTES).decode("utf-8", "replace")
            bundle.daemons.update(daemon_starts(text, name, zone))
        told_nodes = accounted_nodes(head) or allocated_nodes(head, bundle.names)
        bundle.job_nodes |= told_nodes
    if facts.kind in {"job", "scheduler"}:
        ended = says_it_ended_well(tail.splitlines()[-40:])
        if ended is not None:
            told = bundle.slurm_ended if facts.kind == "scheduler" else bundle.ended_well
            told.append(ended)
    bundle.text_files.append(name)


def _take_pace(path: Path, facts: FileFacts, ends: tuple[str, str], bundle: Bundle) -> None:
    shown = print_of(*ends)
    if shown is None:
        return
    text = None
    if path.suffix == ".gz":
        text = _opened(path).read().decode("utf-8", "replace").encode()
    steps, clock = pace_of(path, text, facts, shown)
    bundle.step_clock += clock
    if len(steps):
        bundle.paces += 1
        bundle.numbers.append(steps)


def _take_signs(path: Path, name: str, tail: str, bundle: Bundle) -> None:
    """Take what follows srun's word that a node failed, in the end of a log."""
    if "srun: error: Node failure on " not in tail:
        return
    lines = tail.split("\n")
    with _opened(path) as file:
        rows = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    signs = signs_of_output(lines, name, rows - len(lines) + 2)
    bundle.ended_tasks.update(signs.ended_tasks)
    bundle.went_on.update(signs.went_on)


def _facts(
    path: Path,
    name: str,
    head: str,
    tail: str,
    bundle: Bundle,
    reference_ns: int | None,
    zone: int,
) -> FileFacts:
    own = _last_date_ns(tail, head)
    node = node_of_name(name)
    clock = Clock(
        reference_ns=own or reference_ns or path.stat().st_mtime_ns,
        boot_ns=bundle.boots.get(node or ""),
        utc_offset_minutes=zone,
    )
    guessed = False
    if own is None and clock.boot_ns is None and (uptimes := _UPTIMES.findall(tail)):
        # Without a date: the last line is taken for the end of what was collected.
        guess = reference_ns or path.stat().st_mtime_ns
        clock = replace(clock, boot_ns=guess - int(float(uptimes[-1]) * 1e9))
        guessed = True
    return FileFacts(
        estimated=guessed,
        name=name,
        kind=_kind(name, head[:_LOOKED_AT]),
        clock=clock,
        node=node,
        rank=rank_in_path(name),
    )


def _take_tool_text(path: Path, facts: FileFacts, head: str, bundle: Bundle) -> bool:
    """Take stacks and what tools print; say whether nothing else is in the file."""
    name = facts.name
    if looks_like_stacks(head[:_LOOKED_AT]):
        text = path.read_bytes()[:_LONGEST_STACKS].decode("utf-8", "replace")
        bundle.stacks += stacks_of_text(
            text.splitlines(), name=name, node=facts.node, rank=facts.rank
        )
        if facts.kind != "job" or len(head) < _HEAD_BYTES:
            bundle.text_files.append(name)
            return not re.search(r"(?i)error|fail|step|iter", head.partition("Process")[0])
    elif _DEVICE_TEXT.search(name) and path.suffix != ".gz":
        with path.open("rb") as file:
            text = file.read(_DEVICE_TEXT_BYTES).decode("utf-8", "replace")
        bundle.facts += facts_of_text(text.splitlines(), node=facts.node, name=name)
    return False


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4096)
    return b"\0" in start


def _is_run(folder: Path) -> bool:
    """Say whether a folder is a kansoku run, or holds the rings of one that still runs."""
    return (folder / "run.json").is_file() or any(folder.glob("*.ring"))


def _bad_link(path: Path, folder: Path) -> str | None:
    """Return why a link is not followed; None for what may be read."""
    if not path.is_symlink():
        return None
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # which of the two depends on Python's version
        return "a link that leads to itself"
    return None if inside else "a link out of the folder"


def _files(folder: Path, bundle: Bundle) -> Iterator[Path]:
    """Yield the files that belong to no run; note the runs."""
    count = 0
    for root, folders, names in _walk(folder):
        if _is_run(root):
            bundle.runs.append(root)
            folders.clear()
            continue
        folders.sort()
        for name in sorted(names):
            path = root / name
            bad_link = _bad_link(path, folder)
            if bad_link is not None:
                bundle.skipped.append(f"{path.relative_to(folder)}: {bad_link}")
                continue
            count += 1
            if count > _MOST_FILES:
                bundle.skipped.append(f"more than {_MOST_FILES} files; the rest was not read")
                return
            yield path


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for root, folders, names in os.walk(folder):
        yield Path(root), folders, names


def _sort_in(path: Path, name: str, bundle: Bundle, texts: list[tuple[Path, str]]) -> None:
    """Put a file where it belongs; text files are read once all are known."""
    base = path.name.removesuffix(".gz")
    if _DUMP.search(base) or (path.suffix == ".json" and _DUMP.search(name)):
        bundle.dumps.append(path)
    elif (Path(base).suffix in _METRICS and not _SCHEDULER.search(base)) or (
        Path(base).suffix in {".jsonl", ".ndjson"} and is_table_of_numbers(path)
    ):
        bundle.metrics.append(path)
    elif base.endswith(".json") and (planned := planned_step(path)) is not None:
        bundle.planned_step_s = planned
        bundle.text_files.append(name)
    elif base.endswith(".json") and _looks_like_kineto(path):
        bundle.traces.append(path)
    elif path.suffix != ".gz" and _is_binary(path):
        with path.open("rb") as file:
            pickled = file.read(1) == b"\x80"
        if pickled:
            bundle.dumps.append(path)
        else:
            bundle.skipped.append(f"{name}: binary, of no known kind")
    elif is_prometheus(path):
        bundle.metrics.append(path)
    else:
        texts.append((path, name))


def _read_table(path: Path, name: str, bundle: Bundle, texts: list[tuple[Path, str]]) -> None:
    """Take a table's numbers; a table without known numbers is read as text."""
    if path.suffix not in {".parquet", ".gz"} and _is_binary(path):
        bundle.skipped.append(f"{name}: binary, no table")
        return
    try:
        rows = read_numbers(path, node=node_of_name(name), rank=rank_in_path(name))
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        bundle.skipped.append(f"{name}: {str(error).splitlines()[0][:120]}")
        if path.suffix == ".parquet":
            return
        rows = pl.DataFrame(schema=MEASURE_COLUMNS)
    if len(rows):
        bundle.numbers.append(rows)
    elif path.suffix != ".parquet":
        texts.append((path, name))
        return
    bundle.text_files.append(name)


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


_UPTIMES = re.compile(r"^(?:<\d+>)?\[\s*(\d{1,9}\.\d{6})\]", re.MULTILINE)


def read_bundle(
    path: Path,
    *,
    extra: Sequence[Signature] = (),
    sorted_in: Callable[[Bundle], None] = lambda _bundle: None,
) -> Bundle:
    """Read a folder (or one file); raise InputError where there is nothing to read.

    ``sorted_in`` is called once dumps, traces and runs are known, before logs are read: others may
    read those meanwhile.
    """
    bundle = Bundle(reader=LineReader(extra))
    texts: list[tuple[Path, str]] = []
    if path.is_file():
        files, root = [path], path.parent
    elif path.is_dir():
        files, root = list(_files(path, bundle)), path
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
    sorted_in(bundle)
    reference_ns = _reference_ns(texts)
    sieve = _sieve(bundle.reader)
    zone = zone_minutes(texts)
    bundle.names = [name for _, name in texts]
    bundle.boots = boot_times(((file, name, node_of_name(name)) for file, name in texts), zone)
    for file in bundle.metrics:
        _read_table(file, str(file.relative_to(root)), bundle, texts)
    for file, name in texts:
        try:
            _read_text(file, name, bundle, sieve, reference_ns, zone)
        except OSError as error:
            bundle.skipped.append(f"{name}: {error.strerror or error}")
        except EOFError as error:
            bundle.skipped.append(f"{name}: cut off: {error}")
    return bundle


def read_policy(path: Path | None) -> Policy:
    """Read an operator's thresholds from TOML; raise ConfigurationError for what is not one."""
    if path is None:
        return Policy()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(str(error), where=str(path)) from None
    return policy_from(table, path)
