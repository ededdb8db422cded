"""Benchmark results: how training scales, with and without the ideal, and what was lost to what.

Results of one's own lie in ``STORE/bench/NAME/``: one folder of MLPerf logs for each size, as
``kansoku bench scaling`` takes them.
"""

from collections.abc import Mapping
from pathlib import Path

from kansoku.app.bench_mfu import Hardware
from kansoku.app.bench_scaling import Scaling, published, published_names, scaling_of_folders
from kansoku.app.web_jobs._view import drawable
from kansoku.app.web_page import (
    Card,
    Cards,
    Choice,
    Choices,
    Missing,
    MissingError,
    Page,
    Parameter,
    Screen,
    ScreenBlock,
)
from kansoku.app.web_reading import Reading
from kansoku.errors import KansokuError
from kansoku.view import Line, Sentence, Series, Tone

__all__ = ["BENCHMARK"]

_NAME = r"[A-Za-z0-9_@+\-][A-Za-z0-9_.@+\-]{0,99}"
_MOST = 200


def _own(reading: Reading) -> dict[str, list[str]]:
    """Return the names of one's own results, each with its folders by size."""
    root = reading.folder / "bench"
    found: dict[str, list[str]] = {}
    if not root.is_dir() or not reading.sees_all:
        return found
    for path in sorted(root.iterdir())[:_MOST]:
        sizes = sorted(str(p) for p in path.iterdir() if p.is_dir()) if path.is_dir() else []
        if sizes:
            found[path.name] = sizes
    return found


def _scaling(reading: Reading, name: str) -> Scaling:
    own = _own(reading)
    if name in own:
        return scaling_of_folders(own[name], hardware=_hardware(reading))
    if name in published_names():
        return published(name)
    raise MissingError(
        f"no benchmark result {name!r}",
        remedy=f"known: {', '.join([*own, *published_names()])}",
    )


def _hardware(reading: Reading) -> Hardware:
    kinds = {n.kind.gpu for n in reading.cluster.nodes} if reading.cluster else set()
    return Hardware(gpu=kinds.pop() if len(kinds) == 1 else None)


def _bench(reading: Reading, values: Mapping[str, str]) -> Screen:
    names = [*_own(reading), *published_names()]
    name = values.get("result", names[0])
    ideal = values["ideal"] == "yes"
    blocks: list[ScreenBlock] = [
        Choices(
            choices=(
                Choice(name="result", label="Result", options=tuple((n, n) for n in names),
                       value=name),
                Choice(name="ideal", label="Ideal", value=values["ideal"],
                       options=(("yes", "with the ideal"), ("no", "without the ideal"))),
            )
        )
    ]  # fmt: skip
    try:
        found = _scaling(reading, name)
    except MissingError:
        raise
    except KansokuError as error:
        blocks.append(
            Sentence(text=f"{name} cannot be scored: {error}", tone=Tone.BAD,
                     detail="kansoku bench score FOLDER says which line is wrong")
        )  # fmt: skip
        return _screen(name, blocks, {"schema": "kansoku.web.benchmark/1", "result": name,
                                      "scaling": None, "reason": str(error)})  # fmt: skip
    blocks.append(_cards(found))
    for block in drawable(found.view().blocks):
        if isinstance(block, Series) and block.title == "Speed-up":
            blocks.append(block if ideal else _without_ideal(block))
            blocks += _split(found)
            blocks += _rates(found, ideal=ideal)
        else:
            blocks.append(block)
    if name not in _own(reading):
        blocks.append(
            Missing(
                text="This is a published result. Your own can stand here.",
                remedy="Put a folder of MLPerf logs for each size under bench/NAME beside the "
                "store.",
                command=f"mkdir -p {_shown(reading)}/bench/NAME/8gpus",
            )
        )
    answer = {
        "schema": "kansoku.web.benchmark/1",
        "result": name,
        "results": names,
        "scaling": found.to_json(),
        "reason": None,
    }
    return _screen(found.title, blocks, answer)


def _shown(reading: Reading) -> Path | str:
    return reading.folder if reading.sees_all else "STORE"


def _screen(title: str, blocks: list[ScreenBlock], answer: Mapping[str, object]) -> Screen:
    return Screen(title=f"Benchmark: {title}", blocks=blocks, answer=answer)


def _cards(found: Scaling) -> Cards:
    last = found.rows[-1]
    first = found.rows[0]
    cards = [
        Card(
            label="Largest size",
            value=f"{last.at.gpus:,} GPUs",
            note=f"{last.at.minutes:,.2f} minutes; smallest {first.at.gpus:,} GPUs in "
            f"{first.at.minutes:,.2f}",
        ),
        Card(label="Speed-up", value=f"{last.speedup:.2f}×", note=f"ideal {last.ideal:.2f}×"),
        Card(
            label="Efficiency",
            value=f"{last.efficiency:.1%}",
            tone=Tone.GOOD if last.efficiency >= 0.8 else Tone.NOTICE,
        ),
    ]
    if last.at.mfu is not None:
        cards.append(Card(label="MFU", value=f"{last.at.mfu:.1%}", note="at the largest size"))
    cards.append(Card(label="Label", value=found.label))
    return Cards(cards=cards)


def _without_ideal(block: Series) -> Series:
    from dataclasses import replace

    return replace(block, lines=[line for line in block.lines if line.name != "ideal"])


def _split(found: Scaling) -> list[Series]:
    """Return what each size keeps of the ideal speed-up, and what it lost to what, in percent."""
    rows = [r for r in found.rows if r.lost_to_steps is not None]
    x = [float(n) for n in range(len(found.rows))]
    labels = [f"{r.at.gpus:,} GPUs" for r in found.rows]
    if not rows:
        return []

    def percent(value: float | None) -> float | None:
        return None if value is None else 100 * value

    return [
        Series(
            title="Efficiency split",
            x_title="size",
            y_title="% of the ideal speed-up",
            style="bar",
            x_labels=labels,
            lines=[
                Line(name="kept", x=x, y=[percent(r.efficiency) for r in found.rows]),
                Line(
                    name="lost to slower steps",
                    x=x,
                    y=[percent(r.lost_to_steps) for r in found.rows],
                ),
                Line(
                    name="lost to convergence",
                    x=x,
                    y=[percent(r.lost_to_convergence) for r in found.rows],
                ),
            ],
        )
    ]


def _rates(found: Scaling, *, ideal: bool) -> list[Series]:
    """Return tokens/s of all GPUs and the time to train over size."""
    x = [float(r.at.gpus) for r in found.rows]
    series = []
    first = found.rows[0]
    if all(r.at.tokens_per_s_per_gpu is not None for r in found.rows):
        one = first.at.tokens_per_s_per_gpu or 0.0
        lines = [
            Line(
                name="measured",
                x=x,
                y=[(r.at.tokens_per_s_per_gpu or 0.0) * r.at.gpus for r in found.rows],
            )
        ]
        if ideal:
            lines.append(Line(name="ideal", x=x, y=[one * gpus for gpus in x]))
        series.append(
            Series(title="Tokens per second of all GPUs", x_title="GPUs", y_title="tokens/s",
                   lines=lines)
        )  # fmt: skip
    lines = [Line(name="measured", x=x, y=[r.at.minutes for r in found.rows])]
    if ideal:
        lines.append(Line(name="ideal", x=x, y=[first.at.minutes / r.ideal for r in found.rows]))
    series.append(Series(title="Time to train", x_title="GPUs", y_title="minutes", lines=lines))
    return series


BENCHMARK = Page(
    path="/benchmark",
    title="Benchmark",
    build=_bench,
    parameters=(
        Parameter(name="result", meaning="name of a result", pattern=_NAME),
        Parameter(name="ideal", meaning="whether curves show the ideal", default="yes",
                  choices=("yes", "no")),
    ),
    navigation=70,
)  # fmt: skip
