"""Map work over trace files: in this process, over its cores, or over a Dask cluster."""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kansoku.app._trace_paths import readable_paths
from kansoku.errors import DependencyError, InputError
from kansoku.formats.kineto import (
    KinetoTrace,
    Source,
    find_sources,
    inflated_bytes,
    rank_from_name,
    read_together,
    read_trace,
)
from kansoku.trace.kineto.ranks import RankClaim, RankVerdict, resolve_ranks
from kansoku.view.plain import plain_text

__all__ = [
    "Progress",
    "given_ranks",
    "is_own_run",
    "map_traces",
    "open_executor",
    "rank_verdicts",
    "short_name",
]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

T = TypeVar("T")
Together = Callable[[Sequence[KinetoTrace], Sequence[int | None]], list[T]]

logger = logging.getLogger(__name__)

_SMALL_BYTES = 96 << 20
"""Below this, starting processes costs more than it saves (0.5 s, as much as reading 96 MB)."""
_TOGETHER_BYTES = 16 << 20
"""Of text: what is kept of it takes a few MB."""
_PRELOAD = ["kansoku.app._trace_set", "kansoku.trace.kineto.report"]


@contextmanager
def open_executor(
    *, total_bytes: int, processes: int | None = None, scheduler: str | None = None
) -> Iterator[Executor | None]:
    """Yield an executor: Dask's where a scheduler is named, else a process pool, else None.

    None (work in this process) for small inputs and for ``processes=1``.
    """
    if scheduler is not None:
        try:
            from distributed import Client

            from kansoku.app._dask_scheduler import check_scheduler
        except ImportError:
            raise DependencyError.missing("--scheduler", "distributed", "dask") from None
        check_scheduler(scheduler)
        with Client(scheduler, set_as_default=False) as client:
            yield client.get_executor(pure=False)
        return
    count = processes or os.cpu_count() or 1
    if count < 2 or (processes is None and total_bytes < _SMALL_BYTES):
        yield None
        return
    # Here, not above: small inputs need neither of the two.
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # forkserver: children inherit no threads and no locks of whoever calls the Python API.
    # It imports once what all of them need, and they share those pages.
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        yield pool


def map_traces(
    work: Callable[[KinetoTrace, int | None], T],
    paths: Sequence[Path | str],
    *,
    processes: int | None = None,
    scheduler: str | None = None,
    progress: Progress | None = None,
    together: Together[T] | None = None,
) -> list[T]:
    """Read every trace under the paths and return ``work(trace, rank of its name)`` of each.

    ``together``, where given, does the same for several small traces at once.

    One trace is cut into chunks over the executor; several go one by one to its workers. The
    order is that of the sources. Raises InputError where a path holds no trace or is no file,
    PlatformError where no scheduler answers.
    """
    sources = find_sources(readable_paths(paths))
    total = sum(source.size_bytes for source in sources)
    with open_executor(total_bytes=total, processes=processes, scheduler=scheduler) as executor:
        if executor is not None and len(sources) > 1:
            return _some(_over_files(work, sources, executor, total, progress), paths)
        advance = _counted(progress, total)
        if executor is None:
            return _some(_one_by_one(work, sources, advance, together), paths)
        trace = _read(sources[0], executor=executor, progress=advance)
    # The pool is closed by now: one large trace is analysed without its workers' memory.
    results = [] if trace is None else [work(trace, rank_from_name(sources[0].file_name))]
    return _some(results, paths)


def _one_by_one(
    work: Callable[[KinetoTrace, int | None], T],
    sources: Sequence[Source],
    advance: Callable[[int], None] | None,
    together: Together[T] | None,
) -> list[T]:
    """Read and analyse in this process: each trace by itself, or small ones together."""
    if together is None:
        results = (_read_and_work(work, source, progress=advance) for source in sources)
        return [result for result in results if result is not None]
    found: list[T] = []
    for batch in _small_sets(sources):
        traces, ranks = _read_set(batch, advance)
        found += together(traces, ranks) if len(traces) > 1 else map(work, traces, ranks)
    return found


def _read_set(
    sources: Sequence[Source], advance: Callable[[int], None] | None
) -> tuple[list[KinetoTrace], list[int | None]]:
    """Return the traces of some sources and the ranks of their names."""
    ranks = [rank_from_name(source.file_name) for source in sources]
    if len(sources) > 1 and (traces := read_together(sources)) is not None:
        if advance is not None:
            advance(sum(source.size_bytes for source in sources))
        return traces, ranks
    read = [_read(source, progress=advance) for source in sources]
    known = [(trace, rank) for trace, rank in zip(read, ranks, strict=True) if trace is not None]
    return [trace for trace, _ in known], [rank for _, rank in known]


def _small_sets(sources: Sequence[Source]) -> list[list[Source]]:
    """Return the sources in sets of limited size, in their order."""
    sets: list[list[Source]] = []
    room = 0
    for source in sources:
        size = inflated_bytes(source)
        if not sets or size > room:
            sets.append([])
            room = _TOGETHER_BYTES
        sets[-1].append(source)
        room -= size
    return sets


def _counted(progress: Progress | None, total: int) -> Callable[[int], None] | None:
    """Return what sums sizes into a call of ``progress``."""
    if progress is None:
        return None
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    return advance


def _over_files(
    work: Callable[[KinetoTrace, int | None], T],
    sources: Sequence[Source],
    executor: Executor,
    total: int,
    progress: Progress | None,
) -> list[T]:
    waiting: dict[Future[T | None], int] = {
        executor.submit(_read_and_work, work, source): number
        for number, source in enumerate(sources)
    }
    results: dict[int, T | None] = {}
    done = 0
    for future in _completed(waiting):
        number = waiting[future]
        results[number] = future.result()
        done += sources[number].size_bytes
        if progress is not None:
            progress(done, total)
    ordered = (results[number] for number in range(len(sources)))
    return [found for found in ordered if found is not None]


def _completed(waiting: Mapping[Future[T], int]) -> Iterator[Future[T]]:
    """Yield futures as they end; Dask's are not concurrent.futures' and are taken in order."""
    if all(isinstance(future, Future) for future in waiting):
        yield from as_completed(waiting)
    else:
        yield from waiting


def _some(results: list[T], paths: Sequence[Path | str]) -> list[T]:
    if not results:
        raise InputError("no file here is a trace", where=", ".join(map(str, paths)))
    return results


def _read_and_work(
    work: Callable[[KinetoTrace, int | None], T],
    source: Source,
    *,
    progress: Callable[[int], None] | None = None,
) -> T | None:
    """Return the work on one trace; None for a file in a folder that is no trace at all."""
    trace = _read(source, progress=progress)
    return None if trace is None else work(trace, rank_from_name(source.file_name))


def _read(
    source: Source,
    *,
    executor: Executor | None = None,
    progress: Callable[[int], None] | None = None,
) -> KinetoTrace | None:
    try:
        return read_trace(source, executor=executor, progress=progress)
    except InputError as error:
        if source.named:
            raise
        logger.warning("passed over: %s", plain_text(str(error)))
        return None


def is_own_run(path: Path) -> bool:
    """Say whether a path is a run directory of kansoku: it holds run.json or rings."""
    return path.is_dir() and (
        (path / "run.json").exists() or next(path.rglob("*.ring"), None) is not None
    )


def given_ranks(flags: Sequence[str]) -> dict[str, int]:
    """Read ``FILE=N`` flags; raise InputError for anything else."""
    found: dict[str, int] = {}
    for flag in flags:
        name, _, number = flag.rpartition("=")
        if not name or not number.isdigit():
            raise InputError(f"--rank {flag}: expected FILE=N, such as trace_a.json=3")
        found[name] = int(number)
    return found


def rank_verdicts(
    parts: Sequence[Any], given: Mapping[str, int]
) -> tuple[list[RankClaim], list[RankVerdict]]:
    """Resolve the ranks of analysed files (records with file, said_rank, named_rank)."""
    files = {part.file for part in parts}
    unknown = [name for name in given if not any(_is_named(file, name) for file in files)]
    if unknown:
        raise InputError(
            f"--rank {unknown[0]}={given[unknown[0]]}: no such file among the traces",
            remedy="FILE is a trace's path, or its name in the folder or archive",
        )
    claims = [
        RankClaim(
            file=part.file,
            said=part.said_rank,
            named=part.named_rank,
            given=next((rank for name, rank in given.items() if _is_named(part.file, name)), None),
            world_size=part.world_size,
        )
        for part in parts
    ]
    return claims, resolve_ranks(claims)


def _is_named(file: str, name: str) -> bool:
    return name == file or Path(file.rpartition("!")[2]).name == Path(name).name


def short_name(name: str, *, width: int = 56) -> str:
    """Return a kernel name a person can read: without return type, template and parameters."""
    if name.startswith("Mem"):  # Memcpy HtoD (Pinned -> Device): the brackets are the name
        return name
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth, out = 0, []
    for character in text:
        if character in "<(":
            depth += 1
            if depth == 1:
                out.append("…")
        elif character in ">)" and depth:
            depth -= 1
        elif depth == 0:
            out.append(character)
    short = "".join(out).removesuffix("…").strip()
    # Generic kernels differ in what they apply only.
    if applied := re.search(r"(\w*Functor\w*|\w+_kernel_cuda)", text[len(short) :]):
        short = f"{short} {applied[1]}"
    if len(short) < 4:
        short = text
    return short if len(short) <= width else f"{short[: width - 1]}…"
