"""Panels from few words: each takes its queries and says what it shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import grafanapyroscope as pyroscope
from grafana_foundation_sdk.cog import builder as cog
from grafana_foundation_sdk.cog import variants
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from kansoku.deploy.promql import promql

__all__ = [
    "Logs",
    "Metric",
    "Profile",
    "Traces",
    "board",
    "choice",
    "curves",
    "heat",
    "log_table",
    "metric_table",
    "number",
    "profile",
    "states",
    "text_variable",
    "traces",
]

METRICS, LOGS, TRACES, PROFILES = (
    models.DataSourceRef(type_val=kind, uid=uid)
    for kind, uid in (
        ("prometheus", "kansoku-metrics"),
        ("victoriametrics-logs-datasource", "kansoku-logs"),
        ("jaeger", "kansoku-traces"),
        ("grafana-pyroscope-datasource", "kansoku-profiles"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A PromQL query; ``%hw.power`` in it is the metric's name in PromQL."""

    text: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """A LogsQL query for VictoriaLogs."""

    text: str
    kind: str = "instant"
    """``instant`` (rows), ``stats`` (one row a group), ``statsRange`` (over time)."""
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """A search by Jaeger's API."""

    service: str
    tags: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """CPU profiles of Pyroscope."""

    labels: str


class _Raw(variants.Dataquery):  # type: ignore[misc]
    """A query of a data source that the SDK has no builder for."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self.ref_id = str(fields["refId"])

    def to_json(self) -> dict[str, object]:
        return dict(self._fields)


class _RawBuilder(cog.Builder[variants.Dataquery]):  # type: ignore[misc]
    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def build(self) -> variants.Dataquery:
        return _Raw(self._fields)


def _metric(query: Metric, ref: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(promql(query.text)).ref_id(ref).datasource(METRICS)
    made = made.editor_mode(prometheus_models.QueryEditorMode.CODE)
    if query.legend:
        made = made.legend_format(query.legend)
    if query.instant:
        return made.instant().format(prometheus_models.PromQueryFormat.TABLE)
    return made.range()


def _logs(query: Logs, ref: str) -> _RawBuilder:
    fields = {
        "refId": ref,
        "datasource": LOGS.to_json(),
        "editorMode": "code",
        "expr": query.text,
        "queryType": query.kind,
        "maxLines": 1000,
    }
    if query.legend:
        fields["legendFormat"] = query.legend
    return _RawBuilder(fields)


def _targets(panel: Any, queries: Sequence[Metric | Logs]) -> Any:
    for number_, query in enumerate(queries):
        ref = chr(ord("A") + number_)
        made = _metric(query, ref) if isinstance(query, Metric) else _logs(query, ref)
        panel = panel.with_target(made)
    return panel.datasource(METRICS if isinstance(queries[0], Metric) else LOGS)


def _frame(panel: Any, title: str, note: str, width: int, height: int) -> Any:
    panel = panel.title(title).span(width).height(height)
    return panel.description(note) if note else panel


def _steps(*steps: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    marks = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(marks)


def number(
    title: str, query: Metric | Logs, unit: str = "short", *, bad_above: float | None = None,
    width: int = 3, note: str = "",
) -> Any:  # fmt: skip
    """Return a panel of one big number, red above ``bad_above``."""
    panel = _frame(_targets(stat.Panel(), [query]), title, note, width, 4)
    options = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    panel = panel.unit(unit).reduce_options(options)
    panel = panel.graph_mode(common_models.BigValueGraphMode.AREA).no_value("–")
    if bad_above is None:
        return panel.color_scheme(
            dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color("text")
        )
    return panel.thresholds(_steps((None, "green"), (bad_above, "red")))


def curves(
    title: str, *queries: Metric | Logs, unit: str = "short", stack: bool = False, width: int = 12,
    height: int = 8, note: str = "", top: float | None = None,
) -> Any:  # fmt: skip
    """Return curves over time; ``top`` is the highest value there can be."""
    panel = _frame(_targets(timeseries.Panel(), queries), title, note, width, height)
    panel = panel.unit(unit).line_width(1).show_points(common_models.VisibilityMode.NEVER).min(0)
    panel = panel.tooltip(
        common.VizTooltipOptions()
        .mode(common_models.TooltipDisplayMode.MULTI)
        .sort(common_models.SortOrder.DESCENDING)
    )
    if top is not None:
        panel = panel.max(top)
    if stack:
        stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
        panel = panel.stacking(stacking).fill_opacity(40)
    return panel


def heat(
    title: str, *queries: Metric, unit: str, width: int = 24, height: int = 14, note: str = "",
    top: float | None = None,
) -> Any:  # fmt: skip
    """Return a heat map: each series is a row named by its legend, colour is the value."""
    panel = _frame(_targets(heatmap.Panel(), queries), title, note, width, height)
    color = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME)
    color = color.scheme("Turbo").steps(64).min(0)
    if top is not None:
        color = color.max(top)
    cells = heatmap.CellValues().unit(unit)
    return panel.calculate(False).color(color).cell_gap(0).cell_values(cells).show_legend()


def states(
    title: str, *queries: Metric, unit: str = "short", width: int = 24, height: int = 9,
    note: str = "",
) -> Any:  # fmt: skip
    """Return a state timeline: one row a series, equal values merged."""
    panel = _frame(_targets(statetimeline.Panel(), queries), title, note, width, height)
    panel = panel.unit(unit).merge_values(True).row_height(0.9).line_width(0).per_page(40)
    return panel.color_scheme(
        dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC_BY_NAME)
    )


def _columns(names: dict[str, str], hidden: Sequence[str]) -> models.DataTransformerConfig:
    options = {"excludeByName": dict.fromkeys(hidden, True), "renameByName": names}
    return models.DataTransformerConfig(id_val="organize", options=options)


def metric_table(
    title: str, query: Metric, columns: dict[str, str], *, unit: str = "short", value: str = "",
    width: int = 12, height: int = 8, note: str = "",
) -> Any:  # fmt: skip
    """Return a table of an instant query: labels to column titles; ``value`` titles the value."""
    panel = _frame(_targets(table.Panel(), [query]), title, note, width, height)
    names = {**columns, "Value": value} if value else dict(columns)
    hidden = ["Time", "__name__", *(() if value else ("Value",))]
    return panel.unit(unit).with_transformation(_columns(names, hidden)).filterable(True)


def log_table(title: str, query: Logs, *, width: int = 24, height: int = 10, note: str = "") -> Any:
    """Return a table of log records."""
    panel = _frame(_targets(table.Panel(), [query]), title, note, width, height)
    if query.kind == "instant":
        # The plug-in gives time, line and labels; the fields asked for are in the labels.
        panel = panel.with_transformation(
            models.DataTransformerConfig(
                id_val="extractFields", options={"source": "labels", "replace": False}
            )
        ).with_transformation(_columns({}, ["labels", "id", "Line"]))
    return panel.filterable(True)


def traces(title: str, query: Traces, *, width: int = 24, height: int = 10, note: str = "") -> Any:
    """Return a list of traces."""
    fields = {
        "refId": "A", "datasource": TRACES.to_json(), "queryType": "search",
        "service": query.service, "tags": query.tags, "limit": 50,
    }  # fmt: skip
    panel = _frame(table.Panel(), title, note, width, height)
    return panel.with_target(_RawBuilder(fields)).datasource(TRACES)


def profile(title: str, query: Profile, *, width: int = 24, height: int = 14) -> Any:
    """Return a flame graph."""
    made = pyroscope.Dataquery().label_selector(query.labels).ref_id("A")
    made = made.profile_type_id("process_cpu:cpu:nanoseconds:cpu:nanoseconds").query_type("profile")
    panel = dashboard.Panel().type("flamegraph").title(title).span(width).height(height)
    return panel.with_target(made.datasource(PROFILES)).datasource(PROFILES)


def choice(name: str, label: str, query: str, *, several: bool = True) -> Any:
    """Return a variable whose values are a label's: ``label_values(metric, label)``."""
    made = dashboard.QueryVariable(name).label(label).query(promql(query)).datasource(METRICS)
    made = made.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    made = made.sort(models.VariableSort.NATURAL_ASC).multi(several)
    if not several:
        return made
    return (
        made.include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def text_variable(name: str, label: str, default: str) -> Any:
    """Return a variable that is typed in."""
    option = models.VariableOption(text=default, value=default, selected=True)
    return dashboard.TextBoxVariable(name).label(label).default_value(default).current(option)


def board(
    uid: str, title: str, panels: Sequence[Any], *, variables: Sequence[Any] = (),
    note: str = "", jobs: bool = False,
) -> dashboard.Dashboard:  # fmt: skip
    """Return a dashboard; ``jobs`` marks starts and ends of jobs on every panel."""
    made = dashboard.Dashboard(title).uid(uid).tags(["kansoku"]).description(note).readonly()
    made = made.time("now-1h", "now").refresh("30s").timezone("browser")
    made = made.tooltip(models.DashboardCursorSync.CROSSHAIR)
    made = made.link(
        dashboard.DashboardLink("kansoku")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["kansoku"])
        .as_dropdown(True)
        .keep_time(True)
    )
    for variable in variables:
        made = made.with_variable(variable)
    if jobs:
        changes = promql(
            "sum by (slurm_job_id) (%kansoku.slurm.job.gpu) unless"
            " sum by (slurm_job_id) (%kansoku.slurm.job.gpu offset 1m)"
        )
        made = made.annotation(
            dashboard.AnnotationQuery()
            .name("job starts")
            .datasource(METRICS)
            .enable(True)
            .icon_color("blue")
            .expr(changes)
        )
    for panel in panels:
        made = made.with_panel(panel)
    return made
