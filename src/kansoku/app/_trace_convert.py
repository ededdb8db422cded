"""Use case ``trace convert``: Kineto traces and own runs to the forms other tools open."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kansoku.app._trace_paths import readable_paths
from kansoku.app._trace_set import Progress, given_ranks, is_own_run, rank_verdicts
from kansoku.errors import InputError
from kansoku.formats.kineto import Source, find_sources, rank_from_name, read_trace
from kansoku.trace.kineto.breakdown import find_steps, unions
from kansoku.trace.kineto.rows import device_rows
from kansoku.view import Column as ViewColumn
from kansoku.view import Sentence, Table, Tone, View

if TYPE_CHECKING:
    import polars as pl


__all__ = ["TARGETS", "ConvertResult", "convert"]

SCHEMA = "kansoku.trace.convert/1"
TARGETS = {
    "perfetto": ".perfetto-trace",
    "otlp": ".otlp.pb",
    "kineto": ".json",
    "parquet": ".parquet",
}
"""Target to the suffix of its default file name."""


_STEMS = (
    ".tar.gz", ".tgz", ".tar", ".pt.trace.json.gz", ".pt.trace.json", ".json.gz", ".json",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """One rank's spans, read again and again without being held."""

    run: str
    rank: int | None
    world_size: int | None
    frames: Any
    """Callable without arguments that yields DataFrames."""


@dataclass(frozen=True, kw_only=True)
class ConvertResult:
    """What was written."""

    target: str
    files: tuple[tuple[str, int, int], ...]
    """(file, spans, bytes)."""
    remarks: tuple[str, ...]

    @property
    def written(self) -> "pl.DataFrame":
        """One row per file."""
        import polars as pl

        return pl.DataFrame(
            self.files,
            schema={"file": pl.String, "spans": pl.Int64, "bytes": pl.Int64},
            orient="row",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer."""
        return {
            "schema": SCHEMA,
            "to": self.target,
            "files": [
                {"file": file, "spans": spans, "bytes": size} for file, spans, size in self.files
            ],
            "incomplete": list(self.remarks),
        }

    def view(self) -> View:
        """Return the screen."""
        return View(
            title=f"Converted to {self.target}",
            blocks=[
                *(Sentence(text=remark, tone=Tone.NOTICE) for remark in self.remarks),
                Table(
                    title="",
                    columns=[
                        ViewColumn(title="file"),
                        ViewColumn(title="spans", numeric=True),
                        ViewColumn(title="MB", numeric=True),
                    ],
                    rows=[
                        [file, f"{spans:,}", f"{size / 1e6:,.2f}"]
                        for file, spans, size in self.files
                    ],
                ),
            ],
        )


def convert(
    paths: Sequence[Path | str],
    *,
    to: str,
    out: Path | str | None = None,
    ranks: Sequence[str] = (),
    progress: Progress | None = None,
) -> ConvertResult:
    """Convert Kineto traces (or one run directory) to perfetto, otlp, kineto or parquet.

    ``out`` is a file; for kineto with several ranks a folder, one file a rank. OTLP is protobuf,
    or JSON lines where the name ends in ``.json`` or ``.jsonl``.
    """
    if to not in TARGETS:
        raise InputError(f"unknown target {to!r}", remedy=f"one of {', '.join(TARGETS)}")
    remarks: list[str] = []
    if len(paths) == 1 and is_own_run(Path(paths[0])):
        inputs = _own_run(Path(paths[0]), remarks)
    else:
        inputs = _kineto(paths, given_ranks(ranks), remarks, progress)
    target = Path(out) if out is not None else Path(f"{_stem(Path(paths[0]))}{TARGETS[to]}")
    many = to == "kineto" and len(inputs) > 1
    if many:
        folder = target.with_suffix("") if out is None else target
        folder.mkdir(parents=True, exist_ok=True)
        places = [folder / _rank_file(item, number) for number, item in enumerate(inputs)]
        files = [
            _write(to, place, [item], remarks) for place, item in zip(places, inputs, strict=True)
        ]
    else:
        files = [_write(to, target, inputs, remarks)]
    return ConvertResult(target=to, files=tuple(files), remarks=tuple(remarks))


def _stem(path: Path) -> str:
    name = path.name
    for suffix in (
        ".tar.gz",
        ".tgz",
        ".tar",
        ".pt.trace.json.gz",
        ".pt.trace.json",
        ".json.gz",
        ".json",
    ):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name or "trace"


def _rank_file(item: _Input, number: int) -> str:
    return f"rank{item.rank}.json" if item.rank is not None else f"unknown_{number}.json"


def _write(
    to: str, path: Path, inputs: Sequence[_Input], remarks: list[str]
) -> tuple[str, int, int]:
    from kansoku.formats.kineto.chrome import write_kineto
    from kansoku.formats.otlp_trace import write_otlp_json, write_otlp_protobuf
    from kansoku.formats.perfetto import write_perfetto

    frames: Iterator[pl.DataFrame] = (frame for item in inputs for frame in item.frames())
    if to == "otlp":
        frames = _since_1970(frames, remarks)
    try:
        if to == "parquet":
            spans = _write_parquet(path, frames)
        else:
            with path.open("wb") as file:
                if to == "perfetto":
                    spans = write_perfetto(file, frames)
                elif to == "kineto":
                    spans = write_kineto(
                        file, frames, rank=inputs[0].rank, world_size=inputs[0].world_size
                    )
                elif path.suffix in (".json", ".jsonl"):
                    spans = write_otlp_json(file, frames)
                else:
                    spans = write_otlp_protobuf(file, frames)
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror}", where=str(path)) from None
    return str(path), spans, path.stat().st_size


def _since_1970(frames: "Iterator[pl.DataFrame]", remarks: list[str]) -> "Iterator[pl.DataFrame]":
    """Leave out what OTLP has no time for, and say so: its times are unsigned."""
    left_out = 0
    for frame in frames:
        kept = frame.filter(frame["start_ns"] >= 0)
        left_out += len(frame) - len(kept)
        yield kept
    if left_out:
        remarks.append(f"{left_out} spans are stamped before 1970, for which OTLP has no time")


def _write_parquet(path: Path, frames: "Iterator[pl.DataFrame]") -> int:
    import polars as pl
    import pyarrow.parquet as pq

    from kansoku.model.tables import table_schema

    schema = pl.DataFrame(schema=table_schema("spans")).to_arrow().schema
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for frame in frames:
            count += len(frame)
            if len(frame):
                writer.write_table(frame.select(schema.names).to_arrow().cast(schema))
    return count


def _own_run(path: Path, remarks: list[str]) -> list[_Input]:
    from kansoku.formats.run_directory import read_run

    data = read_run(path)
    remarks += data.missing
    parts = data.spans.partition_by("rank", maintain_order=True)
    world = next((facts.world_size for facts in data.facts.ranks if facts.world_size), None)
    return [
        _Input(
            run=data.facts.run,
            rank=part["rank"][0],
            world_size=world,
            frames=partial(iter, [part]),
        )
        for part in sorted(parts, key=lambda part: part["rank"][0] or 0)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    file: str
    said_rank: int | None
    named_rank: int | None
    world_size: int | None


def _kineto(
    paths: Sequence[Path | str],
    given: dict[str, int],
    remarks: list[str],
    progress: Progress | None,
) -> list[_Input]:
    from kansoku.formats.kineto.spans import SpanFacts, read_spans

    sources = find_sources(readable_paths(paths))
    total = sum(source.size_bytes for source in sources)
    done = 0
    first: list[tuple[Source, SpanFacts, _Claim]] = []
    run = _stem(Path(paths[0]))
    for source in sources:
        trace = read_trace(source)
        rows = device_rows(trace)
        steps = [
            (step.step, step.start_ns, step.end_ns)
            for step in find_steps(trace, rows, unions(rows))
            if step.source != "window"
        ]
        remarks += [f"{source}: {why}" for why in trace.problems]
        facts = SpanFacts(run=run, rank=None, base_ns=trace.base_ns, steps=tuple(steps))
        claim = _Claim(
            file=trace.file,
            said_rank=trace.metadata.rank,
            named_rank=rank_from_name(source.file_name),
            world_size=trace.metadata.world_size,
        )
        first.append((source, facts, claim))
        done += source.size_bytes
        if progress is not None:
            progress(done, total)
    _, verdicts = rank_verdicts([claim for _, _, claim in first], given)
    inputs = []
    for (source, facts, claim), verdict in zip(first, verdicts, strict=True):
        remarks += [f"{source}: {why}" for why in verdict.problems]
        whole = SpanFacts(
            run=facts.run, rank=verdict.rank, base_ns=facts.base_ns, steps=facts.steps
        )
        inputs.append(
            _Input(
                run=run,
                rank=verdict.rank,
                world_size=claim.world_size,
                frames=partial(read_spans, source, whole),
            )
        )
    return sorted(inputs, key=lambda item: (item.rank is None, item.rank or 0))
