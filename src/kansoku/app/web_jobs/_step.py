"""One step of a run: every rank's spans on one clock, collectives joined, lateness marked."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import polars as pl

from kansoku.app.report import LoadedRun
from kansoku.app.web_columns import span_columns
from kansoku.app.web_jobs._figures import (
    StepSpans,
    kept_step_spans,
    step_collectives,
    steps_with_spans,
)
from kansoku.app.web_jobs._run import run_address, run_trail
from kansoku.app.web_jobs._runs import RUN_PARAMETER, kept, load
from kansoku.app.web_jobs._trace import STEP_TRACE, trace_file
from kansoku.app.web_page import (
    Card,
    Cards,
    Columns,
    Missing,
    MissingError,
    Page,
    Parameter,
    Remote,
    Screen,
    ScreenBlock,
)
from kansoku.app.web_reading import Reading
from kansoku.view import Column, Facts, Heading, Sentence, Table, Tone

__all__ = ["STEP"]

_STEP = Parameter(name="step", meaning="number of the step", in_path=True, pattern=r"\d{1,9}")
_RANK = Parameter(name="rank", meaning="number of a rank to look at", pattern=r"\d{1,7}")
_SPAN = Parameter(
    name="span", meaning="id of one of the rank's spans to look at", pattern=r"\d{1,18}"
)
_MOST_ROWS = 200


def _step(reading: Reading, values: Mapping[str, str]) -> Screen:
    what = ("step", *sorted(values.items()))
    return kept(reading, values["run"], what, lambda _: _drawn(reading, values))


def _drawn(reading: Reading, values: Mapping[str, str]) -> Screen:
    run, step = load(reading, values["run"]), int(values["step"])
    rows = run.steps.filter(pl.col("step") == step)
    found = kept_step_spans(run, step)
    if rows.is_empty() and found.frame.is_empty():
        known = run.steps["step"].unique().sort().to_list()
        raise MissingError(
            f"run {run.facts.run!r} has no step {step}",
            remedy=f"its steps are {known[0]}-{known[-1]}" if known else "it has none",
        )
    seen = steps_with_spans(run)
    met = step_collectives(run, step)
    has_spans = step in seen
    blocks: list[ScreenBlock] = [_cards(run, step, rows, found, seen)]
    if "span" in values:
        blocks += _span(run, found, values)
    if has_spans:
        blocks.append(
            Remote(
                title=f"Step {step} on every rank",
                name="timeline",
                kind="timeline",
                note="One lane a rank, spans nested below each other, all on one clock. Choose a "
                "collective to see it joined across ranks; a red frame is a late arrival. Enter "
                "opens the chosen span.",
            )
        )
        blocks += [STEP_TRACE, _held_up(met)]
        if len(met):
            blocks.append(_collectives_table(met, run))
    else:
        nearest = min(seen, key=lambda s: abs(s - step), default=None)
        remedy = "Agents send the spans of every hundredth step and of slow ones."
        if nearest is not None:
            remedy += f" The nearest step with spans is {nearest}."
        blocks.append(
            Missing(
                text="No spans of this step are kept here, only its phases.",
                remedy=remedy + " All of them are in the folder of the run; copy it here:",
                command=f"cp -r RUN_FOLDER {reading.folder}/runs/",
            )
        )
    blocks.append(_ranks_table(run, rows))
    return Screen(
        title=f"Step {step}",
        blocks=blocks,
        answer={
            "schema": "kansoku.web.step/1",
            "run": run.facts.run,
            "step": step,
            "spans": len(found.frame),
            "late": found.frame.filter("late")["rank"].value_counts().sort("rank").to_dicts(),
            "collectives": met.to_dicts(),
            "ranks": rows.select(
                "rank", "start_ns", "duration_ns",
                *(c for c in rows.columns if c.endswith("_ns") and c not in {"start_ns",
                  "duration_ns"}),
            ).to_dicts(),
            "clocks_aligned": run.clocks.applied,
        },
        trail=run_trail(reading, run.facts.run),
    )  # fmt: skip


def _cards(
    run: LoadedRun, step: int, rows: pl.DataFrame, found: StepSpans, seen: list[int]
) -> Cards:
    slowest = rows.top_k(1, by="duration_ns")
    address = f"{run_address(run.facts.run)}/steps/"
    every = sorted(set(seen) | {step})
    place = every.index(step)
    before = every[place - 1] if place else None
    after = every[place + 1] if place + 1 < len(every) else None
    duration = slowest["duration_ns"].to_list()[0] if len(slowest) else None
    cards = [
        Card(
            label="Step time",
            value="–" if duration is None else f"{duration / 1e6:,.4g} ms",
            note=None if not len(slowest) else f"slowest rank {slowest['rank'][0]}",
        ),
        Card(
            label="Spans",
            value=f"{len(found.frame):,}",
            note=f"{len(found.ranks)} ranks; clocks "
            + ("aligned by collectives" if run.clocks.applied else "taken as they are"),
        ),
        Card(
            label="Late arrivals",
            value=str(int(found.frame["late"].sum())),
            note="at collectives whose members waited",
            tone=Tone.NOTICE if found.frame["late"].any() else Tone.GOOD,
        ),
    ]
    if before is not None:
        cards.append(Card(label="Step before", value=str(before), link=f"{address}{before}"))
    if after is not None:
        cards.append(Card(label="Step after", value=str(after), link=f"{address}{after}"))
    return Cards(cards=cards)


def _span(run: LoadedRun, found: StepSpans, values: Mapping[str, str]) -> list[ScreenBlock]:
    """Return what one span is, by its rank and id."""
    rank = values.get("rank")
    chosen = found.frame.filter(pl.col("id") == int(values["span"]))
    if rank is not None:
        chosen = chosen.filter(pl.col("rank") == int(rank))
    if chosen.is_empty():
        return [
            Sentence(
                text=f"This step has no span {values['span']} of rank {rank or 'any'}.",
                tone=Tone.NOTICE,
            )
        ]
    row = chosen.row(0, named=True)
    address = run_address(run.facts.run)
    after = row["start_ns"] - found.start_ns
    items = [
        ("Kind", str(row["kind"]).replace("_", " ")),
        ("Name", row["name"] or "–"),
        ("Begins", f"{after / 1e6:,.4f} ms into the step's first start"),
        (
            "Takes",
            f"{row['duration_ns'] / 1e6:,.4f} ms"
            + (" and had not ended when it was last seen" if row["open"] else ""),
        ),
    ]
    if row["cpu_ns"] is not None:
        items.append(("CPU time of its thread", f"{row['cpu_ns'] / 1e6:,.4f} ms"))
    if row["kind"] == "collective":
        items += [
            ("Process group", str(row["group"] or "unknown")),
            ("Sequence", "unknown" if row["sequence"] is None else str(row["sequence"])),
            ("Size", "unknown" if row["bytes"] is None else f"{row['bytes']:,} bytes"),
        ]
    if row["late_ns"] is not None:
        items += [
            ("After the first arrival", f"{row['late_ns'] / 1e6:,.4f} ms"),
            ("Waited for the last arrival", f"{row['wait_ns'] / 1e6:,.4f} ms"),
        ]
    parents = found.frame.filter(
        (pl.col("rank") == row["rank"]) & (pl.col("id") == (row["parent"] or -1))
    )
    if len(parents):
        items.append(("Within", str(parents["kind"][0]).replace("_", " ")))
    return [
        Heading(text=f"Span {row['id']} of rank {row['rank']}"),
        Facts(items=items),
        Cards(
            cards=(
                Card(
                    label="Its rank", value=str(row["rank"]), link=f"{address}/ranks/{row['rank']}"
                ),
                Card(
                    label="All spans of the step",
                    value=str(found.step),
                    link=f"{address}/steps/{found.step}",
                ),
            )
        ),
    ]


def _held_up(met: pl.DataFrame) -> Sentence:
    held = met.filter("held_up") if len(met) else met
    if held.is_empty():
        return Sentence(
            text="No collective of this step was held up by a late rank.", tone=Tone.GOOD
        )
    worst = held.top_k(1, by="spread_ns").row(0, named=True)
    last = held["last_rank"].mode().to_list()[0]
    return Sentence(
        text=f"{len(held)} of {len(met)} collectives were held up, most often by rank {last}.",
        tone=Tone.NOTICE,
        detail=f"worst: {worst['op']} {worst['sequence']} of {worst['group']}: rank "
        f"{worst['last_rank']} came {worst['spread_ns'] / 1e6:.3f} ms after rank "
        f"{worst['first_rank']}",
    )


def _collectives_table(met: pl.DataFrame, run: LoadedRun) -> Table:
    ranks = f"{run_address(run.facts.run)}/ranks/{{}}"
    shown = met.head(_MOST_ROWS)
    return Table(
        title="Collectives of the step, joined across ranks",
        columns=[
            Column(title="group"),
            Column(title="seq", numeric=True),
            Column(title="operation"),
            Column(title="ranks", numeric=True),
            Column(title="first", numeric=True, link=ranks),
            Column(title="last", numeric=True, link=ranks),
            Column(title="arrival spread ms", numeric=True),
            Column(title="transfer ms", numeric=True),
            Column(title="size MiB", numeric=True),
        ],
        rows=[
            [
                row["group"],
                row["sequence"],
                row["op"],
                row["ranks"],
                row["first_rank"],
                row["last_rank"],
                round(row["spread_ns"] / 1e6, 4),
                None if row["transfer_ns"] is None else round(row["transfer_ns"] / 1e6, 4),
                None if row["bytes"] is None else round(row["bytes"] / 2**20, 3),
            ]
            for row in shown.iter_rows(named=True)
        ],
        tones=[
            Tone.NOTICE if held else Tone.PLAIN for held in shown["held_up"].fill_null(value=False)
        ],
        note=f"The first {_MOST_ROWS} of {len(met)}; the JSON has all."
        if len(met) > _MOST_ROWS
        else None,
    )


def _ranks_table(run: LoadedRun, rows: pl.DataFrame) -> Table:
    phases = [
        c
        for c in rows.columns
        if c.endswith("_ns") and c not in {"start_ns", "duration_ns", "cpu_ns", "run_delay_ns"}
        and (rows[c].sum() or 0) > 0
    ]  # fmt: skip
    shown = rows.sort("duration_ns", descending=True).head(_MOST_ROWS)
    return Table(
        title="Phases of the step on every rank, ms",
        columns=[
            Column(title="rank", numeric=True, link=f"{run_address(run.facts.run)}/ranks/{{}}"),
            Column(title="step time", numeric=True),
            *(Column(title=c.removesuffix("_ns").replace("_", " "), numeric=True) for c in phases),
        ],
        rows=[
            [
                row["rank"],
                round(row["duration_ns"] / 1e6, 3),
                *(round((row[c] or 0) / 1e6, 3) for c in phases),
            ]
            for row in shown.iter_rows(named=True)
        ],
        note=f"The slowest {_MOST_ROWS} of {len(rows)} ranks." if len(rows) > _MOST_ROWS else None,
    )


def _timeline(reading: Reading, values: Mapping[str, str]) -> Columns:
    step = int(values["step"])
    columns = kept(
        reading,
        values["run"],
        ("timeline", step),
        lambda run: timeline_of(kept_step_spans(run, step), run_address(run.facts.run)),
    )
    if "rank" not in values and "span" not in values:
        return columns
    chosen = _chosen(kept_step_spans(load(reading, values["run"]), step), values)
    return replace(columns, header={**columns.header, "choose": chosen})


def _chosen(found: StepSpans, values: Mapping[str, str]) -> int | None:
    """Return the drawing order's place of the span, or of the rank's first, that is asked for."""
    wanted = pl.lit(value=True)
    if "rank" in values:
        wanted = wanted & (pl.col("rank") == int(values["rank"]))
    if "span" in values:
        wanted = wanted & (pl.col("id") == int(values["span"]))
    place = found.frame.select(wanted.arg_true()).to_series()
    return int(place[0]) if len(place) else None


def timeline_of(found: StepSpans, address: str) -> Columns:
    """Return one step's spans for the canvas; ``address`` is the run's page."""
    frame = found.frame
    names, name = _coded(frame["name"])
    kinds, kind = _coded(frame["kind"])
    late = frame["late"].to_numpy()
    columns = span_columns(
        title=f"Step {found.step}",
        lanes=[f"rank {rank}" for rank in found.ranks],
        lane=frame["lane"].to_numpy(),
        depth=frame["depth"].to_numpy(),
        start_ns=frame["start_ns"].to_numpy(),
        duration_ns=frame["duration_ns"].to_numpy(),
        name=name,
        kind=kind,
        mark=late.astype(np.int32),
        names=names,
        kinds=kinds,
        marks=["", "late"],
        join=frame["join"].fill_null(-1).to_numpy().astype(np.int32),
        more={
            "lane_keys": [str(rank) for rank in found.ranks],
            "links": {"span": f"{address}/steps/{found.step}?rank={{lane}}&span={{id}}"},
            "summary": [
                (
                    f"{len(frame):,} spans of {len(found.ranks)} ranks in step {found.step}; "
                    f"{int(late.sum())} late arrivals."
                )
            ],
        },
    )
    # Spans are sorted as span_columns sorts them, so these belong to the same places. A quarter of
    # a million spans travel in half the bytes by the narrowest types that hold them.
    ids = frame["id"].fill_null(0).to_numpy()
    arrays = dict(columns.arrays) | {
        "id": ids.astype(np.float64),
        "duration_ns": columns.arrays["duration_ns"].astype(np.float32),
    }
    if frame["late_ns"].null_count() < len(frame):
        arrays["late_ns"] = frame["late_ns"].cast(pl.Float32).fill_null(np.nan).to_numpy()
    for key in ("lane", "depth", "name", "kind", "mark", "id", "start_ns"):
        most = int(arrays[key].max()) if len(frame) else 0
        narrow = "u1" if most < 2**8 else "u2" if most < 2**16 else "u4"
        if most < 2**32:
            arrays[key] = arrays[key].astype(narrow)
    if len(frame) and int(arrays["join"].max()) < 2**15:
        arrays["join"] = arrays["join"].astype(np.int16)
    return replace(columns, arrays=arrays)


def _coded(texts: pl.Series) -> tuple[list[str], "np.ndarray[tuple[int], np.dtype[np.int32]]"]:
    """Return each text once, and every row's place among them."""
    codes = texts.fill_null("").cast(pl.Categorical)
    known = codes.unique(maintain_order=True)
    place = {int(number): n for n, number in enumerate(known.to_physical().to_list())}
    found = codes.to_physical().replace_strict(place, return_dtype=pl.Int32).to_numpy()
    return known.cast(pl.String).to_list(), found


STEP = Page(
    path="/runs/{run}/steps/{step}",
    title="Step timeline",
    build=_step,
    columns={"timeline": _timeline},
    files={"trace": trace_file},
    parameters=(RUN_PARAMETER, _STEP, _RANK, _SPAN),
)
