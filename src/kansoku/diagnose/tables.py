"""Tables of numbers, as any exporter writes them, to one shape: metric, who, when, value.

Wide tables (a column for each metric) and long ones (metric, value), with or without labels as
JSON; times as epochs of any unit or as dates; values with units, hexadecimal or as words.
"""

import re

import orjson
import polars as pl

from kansoku.catalog.quantities import quantity_of, words_of
from kansoku.diagnose.measures import MEASURE_COLUMNS

__all__ = ["measures_of_prometheus", "measures_of_table"]

_ROLES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("time_ns", re.compile(
        r"^(time|timestamp|ts|t|date|datetime|time (s|ms|us|ns|utc|unix)|unix( time)?|"
        r"epoch|when|sampled at|sample time|collected at|wall ?time|(start|end) (time|"
        r"ns))( (s|ms|us|ns))?$")),
    ("metric", re.compile(
        r"^(metric( name)?|counter( name)?|field( name)?|name|series|key|quantity|stat|"
        r"measurement)$")),
    ("value", re.compile(r"^(value|val|reading|v|count)$")),
    ("labels", re.compile(r"^(labels|tags|attributes)$")),
    ("node", re.compile(
        r"^(node|node ?name|node id|host|host ?name|instance|server|machine|client|"
        r"compute node|worker)$")),
    ("rank", re.compile(r"^(rank|global rank|rank id)$")),
    ("target", re.compile(
        r"^(target|ost|mdt|mount( ?point)?|file ?system|fs|volume|bucket|"
        r"storage( target)?|disk|device name|path|endpoint|oss|mds)$")),
    ("device", re.compile(
        r"^(gpu|gpu (id|index|uuid|idx)|index|local rank|uuid|pci( bus id)?|bus id|"
        r"device( id)?|accelerator|nic|interface|if ?name|port|hca|dev|rnic|rdma device|"
        r"link|rail|cpu|hw (id|name)|network interface name|kansoku rdma device|slot)$")),
    ("step", re.compile(r"^(step|iteration|iter|global step|step num\w*)$")),
)  # fmt: skip
_HEX = r"^\s*0x([0-9a-fA-F]+)\s*$"
_NUMBER = r"^\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
# Idle, application clocks, software power cap, sync boost, display: no fault (NVML's reason bits).
_BENIGN_REASONS = 0x1 | 0x2 | 0x4 | 0x10 | 0x100
_REASON_MASK = re.compile(
    r"\b(throttle|clocks?( event| throttle)?) reasons?( active| bitmask)?( mhz)?$"
)
_PROMETHEUS = re.compile(
    r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|NaN|"
    r"Inf))(?:\s+(\d+))?\s*$"
)
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_IGNORED_LABELS = re.compile(
    r"^(job|uuid|model ?name|driver|err msg|namespace|pod|container|os|arch|version|serial)",
    re.IGNORECASE,
)


def _roles(columns: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for column in columns:
        text = words_of(column)
        for role, pattern in _ROLES:
            if pattern.fullmatch(text):
                found.setdefault(role, []).append(column)
                break
    return found


def _time(column: str, kind: pl.DataType) -> pl.Expr:
    """Return Unix nanoseconds of a column of epochs in any unit, dates or datetimes."""
    if kind.is_temporal():
        return pl.col(column).cast(pl.Datetime("ns")).cast(pl.Int64)
    if kind.is_numeric():
        value = pl.col(column).cast(pl.Float64)
        return _epoch(value)
    text = pl.col(column).cast(pl.String).str.strip_chars()
    date = (
        text.str.replace_all("/", "-")
        .str.replace("T", " ")
        .str.replace(r"(Z|[+-]00:?00| UTC)$", "")
        .str.replace(",", ".")
    )
    parsed = [
        date.str.to_datetime(form, time_unit="ns", strict=False).cast(pl.Int64)
        for form in ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M")
    ]
    return pl.coalesce(*parsed, _epoch(text.cast(pl.Float64, strict=False)))


def _epoch(value: pl.Expr) -> pl.Expr:
    return (
        pl.when(value > 1e17)
        .then(value)
        .when(value > 1e14)
        .then(value * 1e3)
        .when(value > 1e11)
        .then(value * 1e6)
        .otherwise(value * 1e9)
        .cast(pl.Int64)
    )


def _value(column: str, kind: pl.DataType) -> pl.Expr:
    if kind.is_numeric():
        return pl.col(column).cast(pl.Float64)
    if kind == pl.Boolean:
        return pl.col(column).cast(pl.Float64)
    text = pl.col(column).cast(pl.String).str.strip_chars()
    lower = text.str.to_lowercase()
    word = (
        pl.when(lower.is_in(["active", "yes", "true", "up", "on", "enabled", "linkup"]))
        .then(1.0)
        .when(lower.is_in(["not active", "inactive", "no", "false", "down", "off", "none"]))
        .then(0.0)
        .when(lower.is_in(["nan", "inf", "-inf"]))
        .then(float("nan"))
    )
    hexadecimal = text.str.extract(_HEX).str.to_integer(base=16, strict=False).cast(pl.Float64)
    number = text.str.extract(_NUMBER).cast(pl.Float64, strict=False)
    return pl.coalesce(word, hexadecimal, number)


def _first(columns: list[str]) -> pl.Expr:
    texts = []
    for column in columns:
        text = pl.col(column).cast(pl.String).str.strip_chars()
        texts.append(pl.when(text != "").then(text))
    return pl.coalesce(*texts)


def _who(
    roles: dict[str, list[str]], kinds: pl.Schema, node: str | None, rank: int | None
) -> list[pl.Expr]:
    who = []
    for role in ("node", "device", "target"):
        known = _first(roles[role]) if role in roles else pl.lit(None, pl.String)
        if role == "node":
            known = pl.coalesce(known.str.replace(r":\d+$", ""), pl.lit(node, pl.String))
        who.append(known.alias(role))
    given = pl.lit(rank, pl.Int64)
    if "rank" in roles:
        column = pl.col(roles["rank"][0]).cast(pl.String).str.extract(r"(\d+)")
        given = pl.coalesce(column.cast(pl.Int64, strict=False), given)
    who.append(given.alias("rank"))
    if "time_ns" in roles:
        when = roles["time_ns"][0]
        who.append(_time(when, kinds[when]).alias("time_ns"))
    elif "step" in roles:
        # Steps order the rows; they are too small to be taken for a time.
        step = pl.col(roles["step"][0]).cast(pl.String).str.extract(r"(\d+)")
        who.append(step.cast(pl.Int64, strict=False).alias("time_ns"))
    else:
        who.append(pl.lit(None, pl.Int64).alias("time_ns"))
    return who


def _masked(metric: str, value: pl.Expr) -> pl.Expr:
    """Leave out the bits of a reason mask that tell of no fault."""
    if not _REASON_MASK.search(words_of(metric)):
        return value
    bits = value.fill_nan(None).cast(pl.Int64, strict=False)
    return (bits - (bits & _BENIGN_REASONS)).cast(pl.Float64)


def measures_of_table(
    table: pl.LazyFrame,
    *,
    node: str | None = None,
    rank: int | None = None,
    bins: int | None = None,
) -> pl.DataFrame:
    """Return the table's known numbers; ``node`` and ``rank`` are the file's where no column is.

    With ``bins``, numbers of one thing are averaged over so many equal parts of the table's time.
    """
    kinds = table.collect_schema()
    roles = _roles(list(kinds))
    if "metric" in roles and "value" in roles:
        return _long(table, kinds, roles, node, rank, bins)
    taken = {column for columns in roles.values() for column in columns}
    values = [
        column
        for column in kinds
        if column not in taken
        and (quantity := quantity_of(column)) is not None
        and quantity.test != "none"
    ]
    if not values:
        return pl.DataFrame(schema=MEASURE_COLUMNS)
    own = {f"value {number}": column for number, column in enumerate(values)}
    rows = table.select(
        *_who(roles, kinds, node, rank),
        *(
            _masked(column, _value(column, kinds[column])).alias(name)
            for name, column in own.items()
        ),
    )
    index = [name for name in MEASURE_COLUMNS if name not in {"metric", "value"}]
    binned = _binned(rows, [name for name in index if name != "time_ns"], list(own), bins)
    long = binned.unpivot(on=list(own), index=index, variable_name="metric", value_name="value")
    return _finished(long.with_columns(pl.col("metric").replace(own)))


def _binned(
    rows: pl.LazyFrame, keys: list[str], values: list[str], bins: int | None
) -> pl.LazyFrame:
    """Return the means of values by keys and part of the time; unchanged where there is none."""
    if bins is None:
        return rows
    first, last = rows.select(
        pl.col("time_ns").min().alias("first"), pl.col("time_ns").max().alias("last")
    ).collect(engine="streaming").row(0)  # fmt: skip
    if first is None or last <= first:
        return rows
    width = (last - first) // bins + 1
    part = (pl.col("time_ns") - first) // width
    means = rows.group_by(*keys, part.alias("part")).agg(
        pl.col("time_ns").min(), *(pl.col(value).mean() for value in values)
    )
    # Groups come in any order; what is first must not hang on it.
    return means.sort(*keys, "part").drop("part")


def _long(
    table: pl.LazyFrame,
    kinds: pl.Schema,
    roles: dict[str, list[str]],
    node: str | None,
    rank: int | None,
    bins: int | None,
) -> pl.DataFrame:
    metric = pl.col(roles["metric"][0]).cast(pl.String)
    value = _value(roles["value"][0], kinds[roles["value"][0]])
    if "labels" not in roles:
        rows = table.select(
            metric.alias("metric"), *_who(roles, kinds, node, rank), value.alias("value")
        )
        keys = [name for name in MEASURE_COLUMNS if name not in {"time_ns", "value"}]
        return _finished(_binned(rows, keys, ["value"], bins))
    column = roles["labels"][0]
    plain = [e for e in _who(roles, kinds, node, rank) if e.meta.output_name() == "time_ns"]
    rows = table.select(
        metric.alias("metric"), pl.col(column).alias("labels"), *plain, value.alias("value")
    )
    frame = _binned(rows, ["metric", "labels"], ["value"], bins).collect(engine="streaming")
    series = frame.select("metric", "labels").unique()
    named = pl.DataFrame(
        [
            (m, text, *_named(m, _labels(text), node, rank))
            for m, text in series.iter_rows()
        ],
        schema={"metric": pl.String, "labels": pl.String, "name": pl.String, "node": pl.String,
                "device": pl.String, "target": pl.String, "rank": pl.Int64},
        orient="row",
    )  # fmt: skip
    joined = frame.join(named, on=["metric", "labels"], nulls_equal=True)
    return _finished(joined.lazy().with_columns(metric=pl.col("name")))


def _labels(text: str | None) -> dict[str, str]:
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return dict(_LABEL.findall(text or ""))
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _named(
    metric: str, labels: dict[str, str], node: str | None, rank: int | None
) -> tuple[str, str | None, str | None, str | None, int | None]:
    """Sort labels into who it is and what belongs to the metric's name."""
    who: dict[str, str] = {}
    more = []
    for key in sorted(labels):
        value, text = labels[key], words_of(key)
        role = next((r for r, p in _ROLES if p.fullmatch(text)), None)
        if role in {"node", "device", "target", "rank"}:
            if role in who and role == "device" and text in {"gpu", "hw name"}:
                who[role] = value  # the index reads better than a UUID or a bus address
            else:
                who.setdefault(role, value)
        elif not _IGNORED_LABELS.match(text):
            more.append(f"{key} {value}")
    digits = re.search(r"\d+", who.get("rank", ""))
    host = re.sub(r":\d+$", "", who["node"]) if "node" in who else node
    name = f"{metric} {' '.join(more)}" if more else metric
    return name, host, who.get("device"), who.get("target"), int(digits[0]) if digits else rank


def _finished(rows: pl.LazyFrame) -> pl.DataFrame:
    frame = rows.select(list(MEASURE_COLUMNS)).filter(pl.col("value").is_not_null())
    return frame.collect(engine="streaming").cast(pl.Schema(MEASURE_COLUMNS))


def measures_of_prometheus(text: str, *, node: str | None = None) -> pl.DataFrame:
    """Return the samples of Prometheus' text form, one scrape or several."""
    rows = []
    for line in text.splitlines():
        match = _PROMETHEUS.match(line)
        if match is None or line.startswith("#"):
            continue
        labels = dict(_LABEL.findall(match[2] or ""))
        name, host, device, target, rank = _named(match[1], labels, node, None)
        stamp = int(match[4]) * 1_000_000 if match[4] else None
        rows.append((name, host, device, target, rank, stamp, float(match[3])))
    return pl.DataFrame(rows, schema=MEASURE_COLUMNS, orient="row")
