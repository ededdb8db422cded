"""Turn sacct's text columns into typed job and step columns.

Most columns hold few distinct texts, so each distinct text is parsed once by the functions of
:mod:`kansoku.formats.slurm.values`. Times are parsed in bulk.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import polars as pl

from kansoku.errors import InputError
from kansoku.formats.slurm import values
from kansoku.formats.slurm.records import (
    JOB_SCHEMA,
    STEP_SCHEMA,
    Parsed,
    Quarantined,
    empty_steps,
)

__all__ = ["Converter"]

_NO_TIME = ("Unknown", "None", "N/A")
_NS = 1_000_000_000
_BAD = "\u0085bad"
_USED = frozenset({
    "JobID", "JobIDRaw", "Cluster", "Submit", "Eligible", "Start", "End", "State", "Elapsed",
    "ElapsedRaw", "ExitCode", "DerivedExitCode", "NNodes", "AllocNodes", "NodeList", "NCPUS",
    "AllocCPUS", "Timelimit", "TimelimitRaw", "AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES",
    "JobName", "User", "Account", "Partition", "QOS", "UID", "Reason", "Suspended", "Planned",
    "FailedNode", "Restarts", "Reservation", "Comment", "AdminComment", "SubmitLine", "SLUID",
    "Flags", "ReqNodes", "NTasks", "TotalCPU", "MaxRSS", "MaxRSSNode", "TRESUsageInAve", "ReqCPUS",
    "ReqMem",
})  # fmt: skip


class Converter:
    """Types the rows of one file."""

    def __init__(
        self, columns: Sequence[str], *, file: str, zone: str, cluster: str | None
    ) -> None:
        """Take the file's columns; raise InputError where they cannot tell jobs apart."""
        self._columns = frozenset(columns)
        self._file = file
        self._zone = zone
        self._cluster = cluster
        if not self._columns & {"JobID", "JobIDRaw"}:
            raise self._missing("JobIDRaw")
        if "State" not in self._columns:
            raise self._missing("State")
        if not self._columns & {"Submit", "Eligible", "Start"}:
            raise self._missing("Submit")
        self._notes = self._what_is_missing()

    def _missing(self, name: str) -> InputError:
        return InputError(
            f"no column {name}",
            where=self._file,
            remedy=f"export with sacct --format=…,{name}",
        )

    def _what_is_missing(self) -> tuple[str, ...]:
        notes = []
        for name, loss in (
            ("JobIDRaw", "array tasks are identified by their printed id"),
            ("Submit", "jobs are identified by Eligible or Start, and waits are unknown"),
            ("AllocTRES", "GPUs are unknown"),
            ("NodeList", "node analyses are impossible"),
        ):
            if name not in self._columns and not (
                name == "AllocTRES" and "AllocGRES" in self._columns
            ):
                notes.append(f"{self._file}: no column {name}: {loss}")
        return tuple(notes)

    def convert(self, frame: pl.DataFrame, line: str) -> Parsed:
        """Return typed rows; ``line`` is the column with line numbers."""
        if frame.is_empty():
            return Parsed(jobs=pl.DataFrame(schema=JOB_SCHEMA), steps=empty_steps(),
                          notes=self._notes)  # fmt: skip
        id_column = "JobIDRaw" if "JobIDRaw" in self._columns else "JobID"
        is_step = frame[id_column].str.contains(".", literal=True)
        if is_step.any():
            steps, bad_steps = self._steps(frame.filter(is_step), line)
            frame = frame.filter(~is_step)
        else:
            steps, bad_steps = empty_steps(), ()
        jobs, bad_jobs = self._jobs(frame, line)
        return Parsed(
            jobs=jobs, steps=steps, quarantined=(*bad_jobs, *bad_steps), notes=self._notes
        )

    # -- jobs ---------------------------------------------------------------------------------

    def _jobs(self, frame: pl.DataFrame, line: str) -> tuple[pl.DataFrame, tuple[Quarantined, ...]]:
        work = _Work(frame)
        identity = self._identity(work)
        times = self._times(work)
        state = work.parsed("State", _state, pl.Struct(
            {"name": pl.String, "by": pl.String, "flags": pl.String}
        ))  # fmt: skip
        allocated = work.tres("AllocTRES" if "AllocTRES" in self._columns else "AllocGRES")
        requested = work.tres("ReqTRES" if "ReqTRES" in self._columns else "ReqGRES")
        exit_ = work.parsed("ExitCode", _exit, _EXIT)
        derived = work.parsed("DerivedExitCode", _exit, _EXIT)
        if "TimelimitRaw" in self._columns:
            limit = work.parsed(
                "TimelimitRaw", partial(values.parse_time_limit_s, minutes=True), pl.Int64()
            )
        else:
            limit = work.parsed("Timelimit", values.parse_time_limit_s, pl.Int64())
        elapsed = work.integer("ElapsedRaw") if "ElapsedRaw" in self._columns else None
        if elapsed is None:
            elapsed = work.parsed("Elapsed", _whole_seconds, pl.Int64())
        nodes = work.integer("NNodes", "AllocNodes")
        node_list = work.text("NodeList", none=("None assigned", "None", "Unknown", "(null)"))
        if "NodeList" in self._columns:
            times |= {"start_ns": _begun(times, state.struct.field("name"), node_list)}
        columns: dict[str, pl.Series | None] = {
            **identity,
            **times,
            "name": work.text("JobName"),
            "user": work.text("User"),
            "account": work.text("Account"),
            "partition": work.text("Partition"),
            "state": state.struct.field("name"),
            "reason": work.text("Reason", none=("None", "Unknown")),
            "exit_code": exit_.struct.field("code"),
            "exit_signal": exit_.struct.field("signal"),
            # A pending or never started job prints the nodes it asked for.
            "nodes": _only_where(nodes, node_list) if "NodeList" in self._columns else nodes,
            "node_list": node_list,
            "gpus": allocated.struct.field("gpus"),
            "gpu_kind": allocated.struct.field("gpu_kind"),
            "cpus": work.integer("NCPUS", "AllocCPUS"),
            "time_limit_s": limit,
            "qos": work.text("QOS"),
            "uid": work.integer("UID"),
            "elapsed_s": elapsed,
            "suspended_s": work.parsed("Suspended", _whole_seconds, pl.Int64()),
            "derived_exit_code": derived.struct.field("code"),
            "derived_exit_signal": derived.struct.field("signal"),
            "cancelled_by": _user_names(state.struct.field("by"), work),
            "state_flags": state.struct.field("flags"),
            "requested_gpus": requested.struct.field("gpus"),
            "requested_nodes": _first(
                requested.struct.field("nodes"), work.integer("ReqNodes"), nodes
            ),
            "memory_bytes": allocated.struct.field("memory_bytes"),
            "energy_j": allocated.struct.field("energy_j"),
            "failed_node": work.text("FailedNode", none=("None", "Unknown")),
            "restarts": work.integer("Restarts"),
            "reservation": work.text("Reservation"),
            "comment": work.text("Comment"),
            "admin_comment": work.text("AdminComment"),
            "submit_line": work.text("SubmitLine"),
            "sluid": work.text("SLUID"),
            "scheduling": work.parsed("Flags", _scheduling, pl.String()),
        }
        return self._finish(work, columns, JOB_SCHEMA, line)

    def _identity(self, work: "_Work") -> dict[str, pl.Series | None]:
        printed = work.text("JobID") if "JobID" in self._columns else work.text("JobIDRaw")
        raw = work.text("JobIDRaw") if "JobIDRaw" in self._columns else printed
        digits = raw.cast(pl.Int64, strict=False)
        odd = digits.is_null()
        if odd.any():  # JobID alone: 12_3, 12+1, 12_[4-9]
            digits = digits.fill_null(raw.str.extract(r"^(\d+)[_+]").cast(pl.Int64, strict=False))
            work.flag(digits.is_null(), "JobID", raw, "not a job id")
        task = printed.str.contains("_", literal=True)
        het = printed.str.contains("+", literal=True)
        parts: dict[str, pl.Series | None] = dict.fromkeys(
            ("array_job_id", "array_task_id", "het_job_id", "het_offset")
        )
        if task.any():
            for name, pattern in (("array_job_id", r"^(\d+)_"), ("array_task_id", r"^\d+_(\d+)")):
                parts[name] = printed.str.extract(pattern).cast(pl.Int64, strict=False)
        if het.any():
            for name, pattern in (("het_job_id", r"^(\d+)\+"), ("het_offset", r"^\d+\+(\d+)")):
                parts[name] = printed.str.extract(pattern).cast(pl.Int64, strict=False)
        cluster = work.text("Cluster")
        if self._cluster is not None:
            cluster = cluster.fill_null(self._cluster)
        return {"cluster": cluster, "raw_id": digits, "job_id": printed, **parts}

    def _times(self, work: "_Work") -> dict[str, pl.Series | None]:
        elapsed = work.integer("ElapsedRaw") if "ElapsedRaw" in self._columns else None
        read = {
            name: work.time(name, self._zone) for name in ("Submit", "Eligible", "Start", "End")
        }
        if any(early is not late for early, late in read.values()):
            read = _settle(read, elapsed)
        submit, eligible, start, end = (read[name][0] for name in read)
        if "Submit" not in self._columns:
            submit = _first(eligible, start)
        return {
            "submit_ns": submit,
            "eligible_ns": eligible,
            "start_ns": start,
            "end_ns": end,
        }

    # -- steps --------------------------------------------------------------------------------

    def _steps(
        self, frame: pl.DataFrame, line: str
    ) -> tuple[pl.DataFrame, tuple[Quarantined, ...]]:
        work = _Work(frame)
        raw = work.text("JobIDRaw") if "JobIDRaw" in self._columns else work.text("JobID")
        printed = work.text("JobID") if "JobID" in self._columns else raw
        times = self._times(work)
        state = work.parsed("State", _state, pl.Struct(
            {"name": pl.String, "by": pl.String, "flags": pl.String}
        ))  # fmt: skip
        exit_ = work.parsed("ExitCode", _exit, _EXIT)
        allocated = work.tres("AllocTRES" if "AllocTRES" in self._columns else "AllocGRES")
        usage = work.parsed("TRESUsageInAve", _usage, pl.Struct(
            {"util": pl.Float64, "memory": pl.Int64}
        ))  # fmt: skip
        cluster = work.text("Cluster")
        if self._cluster is not None:
            cluster = cluster.fill_null(self._cluster)
        columns: dict[str, pl.Series | None] = {
            "cluster": cluster,
            "raw_id": raw.str.extract(r"^(\d+)").cast(pl.Int64, strict=False),
            "job_id": printed.str.split_exact(".", 1).struct.field("field_0"),
            "step": raw.str.extract(r"\.(.*)$"),
            "start_ns": times["start_ns"],
            "end_ns": times["end_ns"],
            "name": work.text("JobName"),
            "state": state.struct.field("name"),
            "exit_code": exit_.struct.field("code"),
            "exit_signal": exit_.struct.field("signal"),
            "nodes": work.integer("NNodes", "AllocNodes"),
            "node_list": work.text("NodeList", none=("None assigned", "None", "Unknown")),
            "tasks": work.integer("NTasks"),
            "gpus": allocated.struct.field("gpus"),
            "cpus": work.integer("NCPUS", "AllocCPUS"),
            "elapsed_s": work.integer("ElapsedRaw")
            if "ElapsedRaw" in self._columns
            else work.parsed("Elapsed", _whole_seconds, pl.Int64()),
            "cpu_s": work.parsed("TotalCPU", values.parse_duration_s, pl.Float64()),
            "max_rss_bytes": work.parsed("MaxRSS", values.parse_size_bytes, pl.Int64()),
            "max_rss_node": work.text("MaxRSSNode"),
            "gpu_util_ratio": usage.struct.field("util"),
            "gpu_memory_bytes": usage.struct.field("memory"),
        }
        return self._finish(work, columns, STEP_SCHEMA, line)

    def _finish(
        self,
        work: "_Work",
        columns: dict[str, pl.Series | None],
        schema: dict[str, pl.DataType],
        line: str,
    ) -> tuple[pl.DataFrame, tuple[Quarantined, ...]]:
        if "submit_ns" in schema and columns["submit_ns"] is not None:
            submit = columns["submit_ns"]
            work.flag(submit.is_null(), "Submit", submit, "no time of submission")
        height = work.frame.height
        data = []
        for name, kind in schema.items():
            series = columns.get(name)
            if series is None:
                series = pl.Series(name, [None], dtype=kind).new_from_index(0, height)
            data.append(series.cast(kind, strict=False).alias(name))
        table = pl.DataFrame(data)
        if not work.reasons:
            return table, ()
        quarantined = []
        numbers = work.frame[line]
        for row in sorted(work.reasons):
            cells = [str(c) for c in work.frame.row(row)[:-1]]
            quarantined.append(
                Quarantined(
                    file=self._file,
                    row=int(numbers[row]),
                    reason=work.reasons[row],
                    text="|".join(cells)[:160],
                )
            )
        keep = pl.Series(range(height)).is_in(list(work.reasons)).not_()
        return table.filter(keep), tuple(quarantined)


_EXIT = pl.Struct({"code": pl.Int32, "signal": pl.Int32})
_TRES = pl.Struct({
    "gpus": pl.Int32, "gpu_kind": pl.String, "nodes": pl.Int32, "cpus": pl.Int32,
    "memory_bytes": pl.Int64, "energy_j": pl.Int64,
})  # fmt: skip


def _state(text: str) -> dict[str, str | None]:
    state = values.parse_state(text)
    return {"name": state.name, "by": state.cancelled_by, "flags": ",".join(state.flags) or None}


def _exit(text: str) -> dict[str, int | None]:
    code, number = values.parse_exit(text)
    return {"code": code, "signal": number}


def _tres(text: str) -> dict[str, object]:
    tres = values.parse_tres(text)
    return {
        "gpus": tres.gpus, "gpu_kind": tres.gpu_kind, "nodes": tres.nodes, "cpus": tres.cpus,
        "memory_bytes": tres.memory_bytes, "energy_j": tres.energy_j,
    }  # fmt: skip


def _usage(text: str) -> dict[str, float | int | None]:
    found: dict[str, float | int | None] = {"util": None, "memory": None}
    for entry in text.split(","):
        key, _, value = entry.partition("=")
        if key == "gres/gpuutil" and value.isdigit():
            found["util"] = int(value) / 100
        elif key == "gres/gpumem":
            found["memory"] = values.parse_size_bytes(value)
    return found


def _whole_seconds(text: str) -> int | None:
    value = values.parse_duration_s(text)
    return None if value is None else int(value)


def _scheduling(text: str) -> str | None:
    for word, name in (
        ("SchedSubmit", "submit"),
        ("SchedMain", "main"),
        ("SchedBackfill", "backfill"),
    ):
        if word in text:
            return name
    return None


def _user_names(cancelled_by: pl.Series, work: "_Work") -> pl.Series:
    """Name the user ids that the file itself names; others stay numbers."""
    if cancelled_by.null_count() == len(cancelled_by):
        return cancelled_by
    names = {"0": "root"}
    if {"UID", "User"} <= set(work.frame.columns):
        pairs = work.frame.select("UID", "User").unique().drop_nulls()
        names |= dict(pairs.iter_rows())
    return cancelled_by.replace(names)


def _first(*series: pl.Series | None) -> pl.Series:
    given = [s for s in series if s is not None]
    first = given[0]
    for other in given[1:]:
        first = first.fill_null(other)
    return first


def _begun(
    times: Mapping[str, pl.Series | None], state: pl.Series, node_list: pl.Series
) -> pl.Series | None:
    """Return the starts; none where Slurm set it to the end of what was cancelled before."""
    start, end = times["start_ns"], times["end_ns"]
    if start is None or end is None:
        return start
    never = (state == "CANCELLED") & node_list.is_null() & (start == end)
    return start.set(never.fill_null(value=False), None)


def _only_where(series: pl.Series, known: pl.Series) -> pl.Series:
    return series.to_frame("n").select(
        pl.when(known.is_not_null()).then(pl.col("n")).otherwise(None)
    )["n"]


_Times = dict[str, tuple[pl.Series, pl.Series]]


def _settle(read: _Times, elapsed: pl.Series | None) -> _Times:
    """Choose between the two readings of local times in the hour that happens twice.

    Elapsed decides between start and end; where it cannot, the order submit ≤ eligible ≤ start ≤
    end does; where neither does, the earlier reading stays.
    """
    table = pl.DataFrame(
        {
            **{f"{name}0": pair[0] for name, pair in read.items()},
            **{f"{name}1": pair[1] for name, pair in read.items()},
            "elapsed": elapsed * _NS if elapsed is not None else [None] * len(read["Start"][0]),
        }
    ).with_columns(pl.col("elapsed").cast(pl.Int64))
    best = None
    for start in ("Start0", "Start1"):
        for end in ("End0", "End1"):
            error = (pl.col(end) - pl.col(start) - pl.col("elapsed")).abs().fill_null(0)
            # A negative span is always wrong, whatever Elapsed says.
            error = error + pl.when(pl.col(end) < pl.col(start)).then(1 << 60).otherwise(0)
            cost = pl.struct(error.alias("cost"), pl.col(start).alias("s"), pl.col(end).alias("e"))
            best = (
                cost
                if best is None
                else pl.when(error < best.struct.field("cost")).then(cost).otherwise(best)
            )
    assert best is not None  # noqa: S101 - the loops above ran
    table = table.with_columns(best.alias("best")).unnest("best")
    anchor = pl.coalesce("s", "e", pl.lit(2**62))
    chosen = table.select(
        Submit=pl.col("Submit0"),
        Eligible=pl.when(
            (pl.col("Eligible0") < pl.col("Submit0")) & (pl.col("Eligible1") <= anchor)
        )
        .then(pl.col("Eligible1"))
        .otherwise(pl.col("Eligible0")),
        Start=pl.col("s"),
        End=pl.col("e"),
    )
    return {name: (chosen[name], chosen[name]) for name in read}


class _Work:
    """One block of text columns, and which rows turned out bad."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self.frame = frame
        self.reasons: dict[int, str] = {}

    def flag(self, mask: pl.Series, column: str, texts: pl.Series, reason: str) -> None:
        """Mark rows as bad."""
        if not mask.any():
            return
        for row in mask.arg_true().to_list():
            self.reasons.setdefault(row, f"{column}: {texts[row]!r} is {reason}")

    def _nothing(self, kind: pl.DataType) -> pl.Series:
        return pl.Series([None], dtype=kind).new_from_index(0, self.frame.height)

    def text(self, column: str, none: tuple[str, ...] = ()) -> pl.Series:
        """Return a text column, empty texts as null."""
        if column not in self.frame.columns:
            return self._nothing(pl.String())
        if not none:
            return self.frame[column]
        return self.frame.select(
            pl.when(pl.col(column).is_in(list(none))).then(None).otherwise(pl.col(column))
        ).to_series()

    def integer(self, *columns: str) -> pl.Series:
        """Return the first of the columns that exists, as integers."""
        for column in columns:
            if column in self.frame.columns:
                texts = self.frame[column]
                numbers = texts.cast(pl.Int64, strict=False)
                odd = numbers.is_null() & texts.is_not_null()
                if odd.any():
                    allowed = texts.is_in(["Unknown", "None"]) | texts.str.contains("^#+$")
                    self.flag(odd & ~allowed, column, texts, "not a whole number")
                return numbers
        return self._nothing(pl.Int64())

    def parsed(self, column: str, parse: Callable[[str], object], kind: pl.DataType) -> pl.Series:
        """Parse each distinct text once; null stays null; what cannot be read marks its rows."""
        if column not in self.frame.columns:
            return self._nothing(kind)
        texts = self.frame[column]
        distinct = texts.unique()
        known: list[object] = []
        bad: dict[str, str] = {}
        for text in distinct.to_list():
            try:
                known.append(parse(text) if text else None)
            except ValueError as error:
                known.append(None)
                bad[text] = str(error)
        table = pl.DataFrame(
            {"text": distinct, "value": pl.Series(known, dtype=kind, strict=False)}
        ).drop_nulls("text")
        result = texts.to_frame("text").join(table, on="text", how="left", maintain_order="left")
        if bad:
            for row in texts.is_in(list(bad)).arg_true().to_list():
                self.reasons.setdefault(row, f"{column}: {bad[texts[row]]}")
        return result["value"]

    def tres(self, column: str) -> pl.Series:
        """Parse a TRES column into a struct."""
        return self.parsed(column, _tres, _TRES)

    def time(self, column: str, zone: str) -> tuple[pl.Series, pl.Series]:
        """Return Unix nanoseconds read both ways where a local time happens twice.

        The two are the same object where no time is ambiguous.
        """
        if column not in self.frame.columns:
            nothing = self._nothing(pl.Int64())
            return nothing, nothing
        texts = self.frame[column]
        naive = texts.str.to_datetime("%Y-%m-%dT%H:%M:%S", time_unit="ns", strict=False)
        odd = naive.is_null() & texts.is_not_null()
        stamps: pl.Series | None = None
        if odd.any():
            # SLURM_TIME_FORMAT=%s prints epoch seconds.
            stamps = texts.cast(pl.Int64, strict=False) * _NS
            stamps = stamps.to_frame("t").select(pl.when(pl.col("t") > 0).then(pl.col("t")))["t"]
            allowed = texts.is_in([*_NO_TIME, "0"]) | texts.str.contains("^#+$")
            self.flag(odd & stamps.is_null() & ~allowed, column, texts, "not a time")
        if zone == "UTC":
            early = late = naive.cast(pl.Int64)
        else:
            first = naive.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
            last = naive.dt.replace_time_zone(zone, ambiguous="latest", non_existent="null")
            gap = first.is_null() & naive.is_not_null()
            self.flag(gap, column, texts, f"a local time that {zone} skips")
            early, late = first.cast(pl.Int64), last.cast(pl.Int64)
            if (early == late).all():
                late = early
        if stamps is not None:
            same = early is late
            early = early.fill_null(stamps)
            late = early if same else late.fill_null(stamps)
        return early, late
