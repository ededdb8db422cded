"""What steps used of energy, devices, NICs and NVLinks, as far as agents or the run sampled it."""

import polars as pl

from kansoku.app.web_jobs._figures import folded
from kansoku.app.web_page import ScreenBlock
from kansoku.view import Heading, Line, Sentence, Series, Tone

__all__ = ["use_blocks"]

_SUMS = {
    "energy_j": ("Energy of a step", "J", "energy", 1.0),
    "nic_bytes": ("Bytes through the NICs in a step", "MB", "NICs", 1e6),
    "nvlink_bytes": ("Bytes over NVLink in a step", "MB", "NVLink", 1e6),
}
_ACTIVITIES = {"sm_activity": "SMs", "memory_activity": "device memory"}


def use_blocks(steps: pl.DataFrame) -> list[ScreenBlock]:
    """Return curves over steps: sums over the ranks given, activities as their mean.

    A sum needs every rank's value: a step that lacks one has a gap in its curve. Nothing is drawn
    of what nobody sampled; where that is everything, nothing is returned.
    """
    ended = steps.filter(pl.col("duration_ns").is_not_null())
    known = [
        name
        for name in (*_SUMS, *_ACTIVITIES)
        if name in ended.columns and ended[name].null_count() < len(ended)
    ]
    if not known:
        return []
    whole = [
        pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum())
        for name in known
        if name in _SUMS
    ]
    means = [pl.col(name).mean() for name in known if name in _ACTIVITIES]
    frame = folded(ended.group_by("step").agg(*whole, *means).sort("step"))
    x = [float(step) for step in frame["step"].to_list()]
    drawn: list[ScreenBlock] = [Heading(text="What its steps used")]
    for name, (title, unit, label, factor) in _SUMS.items():
        if name in known and frame[name].null_count() < len(frame):
            line = Line(name=label, x=x, y=(frame[name] / factor).to_list())
            drawn.append(Series(title=title, x_title="step", y_title=unit, lines=[line]))
    if lines := [
        Line(name=label, x=x, y=frame[name].to_list())
        for name, label in _ACTIVITIES.items()
        if name in known
    ]:
        title = "Share of a step in which the devices were active"
        drawn.append(Series(title=title, x_title="step", y_title="ratio", lines=lines))
    some = [name for name in known if name in _SUMS and ended[name].null_count()]
    if some:
        names = ", ".join(_SUMS[name][2] for name in some)
        text = f"Some ranks' steps were not sampled: there the curves of {names} have gaps."
        drawn.append(Sentence(text=text, tone=Tone.MUTED))
    return drawn
