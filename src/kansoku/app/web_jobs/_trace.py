"""A run's or a step's spans as a Perfetto trace: to open beside the pages, or to keep."""

import io
from collections.abc import Mapping

import polars as pl

from kansoku.app.report import LoadedRun
from kansoku.app.web_jobs._runs import load
from kansoku.app.web_page import File, Trace
from kansoku.app.web_reading import Reading
from kansoku.errors import InputError
from kansoku.formats.perfetto import write_perfetto

__all__ = ["RUN_TRACE", "STEP_TRACE", "trace_file", "trace_of"]

_MOST_SPANS = 500_000
RUN_TRACE = Trace(name="trace", note="Every span that is known of this run, on one clock.")
STEP_TRACE = Trace(name="trace", note="Every rank's spans of this step, on one clock.")


def trace_file(reading: Reading, values: Mapping[str, str]) -> File:
    """Return the trace that a page's address names: of a run, or of one of its steps."""
    step = int(values["step"]) if "step" in values else None
    run = load(reading, values["run"])
    name = values["run"] if step is None else f"{values['run']}-step{step}"
    # Not protobuf's own type: Perfetto and browsers go by the name and the first bytes.
    return File(
        name=f"{name}.perfetto-trace", kind="application/octet-stream", body=trace_of(run, step)
    )


def trace_of(run: LoadedRun, step: int | None) -> bytes:
    """Return the spans of a run, or of one step, as Perfetto's protobuf.

    Raises InputError where there are none, or more than Perfetto's page can take at once.
    """
    spans = run.spans.filter(pl.col("rank").is_not_null() & (pl.col("kind") != "note"))
    if step is not None:
        spans = spans.filter(pl.col("step") == step)
    if spans.is_empty():
        raise InputError("no spans are kept here", remedy="ask for a step that has some")
    if len(spans) > _MOST_SPANS:
        raise InputError(
            f"{len(spans):,} spans are more than {_MOST_SPANS:,}",
            remedy="open one step, or use kansoku trace convert --to perfetto",
        )
    if run.clocks.applied:
        spans = spans.with_columns(start_ns=run.clocks.corrected("start_ns").cast(pl.Int64))
    file = io.BytesIO()
    write_perfetto(file, [spans])
    return file.getvalue()
