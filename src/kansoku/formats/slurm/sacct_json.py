"""Read ``sacct --json`` of Slurm 21.08 to 25.11.

The form changed between versions and all its spellings are taken: numbers are plain, null or
``{"set", "infinite", "number"}``; words are plain or one-element lists; ``exit_code.signal`` has
``signal_id`` or ``id``. Version 22.05 writes SUCCESS and 0 for every exit code other than a
signal, so its codes of jobs that did not complete are unknown (null), not 0.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
import polars as pl

from kansoku.errors import InputError
from kansoku.formats.slurm import values
from kansoku.formats.slurm.records import JOB_SCHEMA, STEP_SCHEMA, Parsed, Quarantined

__all__ = ["read_sacct_json"]

_NS = 1_000_000_000
# Before this release exit codes other than signals were lost in JSON (seen with 22.05.8).
_EXIT_CODES_SINCE = (23, 2)
_STARTED = (
    ("STARTED_ON_SUBMIT", "submit"),
    ("STARTED_ON_SCHEDULE", "main"),
    ("STARTED_ON_BACKFILL", "backfill"),
)


class _File(msgspec.Struct):
    jobs: list[msgspec.Raw]
    meta: dict[str, Any] = {}
    errors: list[Any] = []


def read_sacct_json(data: bytes | memoryview, *, file: str, cluster: str | None = None) -> Parsed:
    """Return jobs and steps; a job that cannot be taken is quarantined with its index.

    Raises InputError where the file is not the JSON of sacct at all.
    """
    raw = bytes(data)
    if not raw.isascii():
        raw = raw.decode("utf-8", "replace").encode()
    try:
        content = msgspec.json.decode(raw, type=_File)
    except msgspec.DecodeError as error:
        raise InputError(
            f"not the JSON of sacct: {error}", where=file, remedy="write it with sacct --json"
        ) from None
    version = _version(content.meta)
    jobs: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    quarantined: list[Quarantined] = []
    for number, entry in enumerate(content.jobs, start=1):
        try:
            parsed = orjson.loads(memoryview(entry))
            job = _job(parsed, cluster, version)
            mine = [_step(step, job) for step in parsed.get("steps") or ()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
            text = bytes(entry)[:160].decode("utf-8", "replace")
            quarantined.append(Quarantined(file=file, row=number, reason=reason, text=text))
            continue
        jobs.append(job)
        steps += mine
    notes = tuple(f"{file}: sacct reported {e!r}" for e in content.errors[:5])
    return Parsed(
        jobs=pl.DataFrame(jobs, schema=JOB_SCHEMA, orient="row"),
        steps=pl.DataFrame(steps, schema=STEP_SCHEMA, orient="row"),
        quarantined=tuple(quarantined),
        notes=notes,
    )


def _version(meta: Mapping[str, Any]) -> tuple[int, int]:
    slurm = meta.get("Slurm") or meta.get("slurm") or {}
    version = slurm.get("version") or {}
    try:
        return int(version["major"]), int(version["minor"])
    except (KeyError, TypeError, ValueError):
        return (0, 0)


def _number(value: Any) -> int | None:
    if isinstance(value, Mapping):
        if value.get("infinite") or not value.get("set", True):
            return None
        value = value.get("number")
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is not a number")
    return int(value)


def _positive(value: Any) -> int | None:
    number = _number(value)
    return number if number and number > 0 else None


def _word(value: Any) -> str | None:
    if isinstance(value, list):
        value = ",".join(str(v) for v in value)
    return str(value) if value not in (None, "", 0) else None


def _time(value: Any) -> int | None:
    seconds = _positive(value)
    return None if seconds is None else seconds * _NS


def _exit(entry: Any, *, trusted: bool) -> tuple[int | None, int | None]:
    if not isinstance(entry, Mapping):
        return None, None
    code = _number(entry.get("return_code"))
    signal = entry.get("signal") or {}
    number = _positive(signal.get("signal_id", signal.get("id")))
    if number is not None:
        # sacct prints 0:9 for a signal: the code beside it is 0, not unknown.
        return code or 0, number
    status = _word(entry.get("status"))
    return (code, None) if trusted or status != "SUCCESS" else (None, None)


def _tres(entries: Any) -> values.Tres:
    """Read a list of TRES by the text reader, so that both count alike."""
    words = []
    for entry in entries or ():
        count = entry.get("count")
        if count is None:
            continue
        name = f"{entry['type']}/{entry['name']}" if entry.get("name") else entry["type"]
        words.append(f"{name}={_number(count)}")
    return values.parse_tres(",".join(words))


def _job(job: dict[str, Any], cluster: str | None, version: tuple[int, int]) -> dict[str, Any]:
    raw_id = _number(job["job_id"])
    if raw_id is None:
        raise ValueError("job_id is not a number")
    time = job["time"]
    state_entry = job["state"]
    current = _word(state_entry["current"] if isinstance(state_entry, Mapping) else state_entry)
    state = values.parse_state(current or "")
    reason = _word(state_entry.get("reason")) if isinstance(state_entry, Mapping) else None
    trusted = state.name == "COMPLETED" or version >= _EXIT_CODES_SINCE
    code, signal = _exit(job.get("exit_code"), trusted=trusted)
    derived, derived_signal = _exit(job.get("derived_exit_code"), trusted=trusted)
    tres = job.get("tres") or {}
    allocated, requested = _tres(tres.get("allocated")), _tres(tres.get("requested"))
    array, het = job.get("array") or {}, job.get("het") or {}
    printed, identity = _printed_id(raw_id, array, het)
    node_list = _word(job.get("nodes"))
    if node_list in {"None assigned", "None"}:
        node_list = None
    comment = job.get("comment") or {}
    flags = job.get("flags") or []
    limit = _number(time.get("limit"))
    submit = _time(time["submission"])
    if submit is None:
        raise ValueError("no time of submission")
    nodes = _number(job.get("allocation_nodes")) if node_list else None
    start, end = _time(time.get("start")), _time(time.get("end"))
    if state.name == "CANCELLED" and node_list is None and start == end:
        start = None  # cancelled before it started
    return {
        "cluster": _word(job.get("cluster")) or cluster,
        "raw_id": raw_id,
        "submit_ns": submit,
        "job_id": printed,
        "name": _word(job.get("name")),
        "user": _word(job.get("user")) or _word((job.get("association") or {}).get("user")),
        "account": _word(job.get("account")),
        "partition": _word(job.get("partition")),
        "eligible_ns": _time(time.get("eligible")),
        "start_ns": start,
        "end_ns": end,
        "state": state.name,
        "reason": None if reason == "None" else reason,
        "exit_code": code,
        "exit_signal": signal,
        "nodes": nodes,
        "node_list": node_list,
        "gpus": allocated.gpus,
        "gpu_kind": allocated.gpu_kind,
        "cpus": allocated.cpus
        if allocated.cpus is not None
        else _number((job.get("required") or {}).get("CPUs")),
        "time_limit_s": None if limit is None else limit * 60,
        "qos": _word(job.get("qos")),
        **identity,
        "elapsed_s": _number(time.get("elapsed")),
        "suspended_s": _number(time.get("suspended")),
        "derived_exit_code": derived,
        "derived_exit_signal": derived_signal,
        "cancelled_by": _word(job.get("kill_request_user")) or state.cancelled_by,
        "state_flags": ",".join(state.flags) or None,
        "requested_gpus": requested.gpus,
        "requested_nodes": requested.nodes,
        "memory_bytes": allocated.memory_bytes,
        "energy_j": allocated.energy_j,
        "failed_node": _word(job.get("failed_node")),
        "restarts": _number(job.get("restart_cnt")),
        "reservation": _word((job.get("reservation") or {}).get("name")),
        "comment": _word(comment.get("job")) if isinstance(comment, Mapping) else _word(comment),
        "admin_comment": _word(comment.get("administrator"))
        if isinstance(comment, Mapping)
        else None,
        "submit_line": _word(job.get("submit_line")),
        "sluid": _word(job.get("sluid")),
        "scheduling": next((name for flag, name in _STARTED if flag in flags), None),
    }


def _printed_id(
    raw_id: int, array: Mapping[str, Any], het: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    array_job, task = _positive(array.get("job_id")), _number(array.get("task_id"))
    het_job, offset = _positive(het.get("job_id")), _number(het.get("job_offset"))
    pending = _word(array.get("task"))
    printed = str(raw_id)
    if array_job and task is not None:
        printed = f"{array_job}_{task}"
    elif array_job and pending:
        printed = f"{array_job}_[{pending.strip('[]')}]"
    elif het_job and offset is not None:
        printed = f"{het_job}+{offset}"
    return printed, {
        "array_job_id": array_job,
        "array_task_id": task if array_job else None,
        "het_job_id": het_job,
        "het_offset": offset if het_job else None,
    }


def _step(step: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    time = step.get("time") or {}
    identity = step.get("step") or {}
    state = values.parse_state(_word(step.get("state")) or "")
    code, signal = _exit(step.get("exit_code"), trusted=state.name == "COMPLETED")
    nodes = step.get("nodes") or {}
    tres = step.get("tres") or {}
    requested = tres.get("requested") or {}
    allocated = _tres(tres.get("allocated"))
    name = _step_name(identity)
    peak = _of_type(requested.get("max"), "mem")
    total = time.get("total") or {}
    seconds = _number(total.get("seconds"))
    util = _of_type(requested.get("average"), "gres", "gpuutil")
    memory = _of_type(requested.get("max"), "gres", "gpumem")
    return {
        "cluster": job["cluster"],
        "raw_id": job["raw_id"],
        "job_id": job["job_id"],
        "step": name,
        "start_ns": _time(time.get("start")),
        "end_ns": _time(time.get("end")),
        "name": _word(identity.get("name")),
        "state": state.name,
        "exit_code": code,
        "exit_signal": signal,
        "nodes": _number(nodes.get("count")),
        "node_list": _word(nodes.get("range")),
        "tasks": _number((step.get("tasks") or {}).get("count")),
        "gpus": allocated.gpus,
        "cpus": allocated.cpus,
        "elapsed_s": _number(time.get("elapsed")),
        "cpu_s": None
        if seconds is None
        else seconds + (_number(total.get("microseconds")) or 0) // 1000 / 1000,
        "max_rss_bytes": _number(peak.get("count")),
        "max_rss_node": _word(peak.get("node")),
        "gpu_util_ratio": None if not util else (_number(util.get("count")) or 0) / 100,
        "gpu_memory_bytes": _number(memory.get("count")),
    }


def _step_name(identity: Mapping[str, Any]) -> str | None:
    """Return ``batch``, ``0`` or, from versions that write it whole, the part after the dot."""
    value = identity.get("id")
    if isinstance(value, Mapping):
        value = value.get("step_id", value.get("number"))
    if value is None:
        return None
    text = str(value)
    return text.split(".", 1)[1] if "." in text else text


def _of_type(entries: Any, kind: str, name: str | None = None) -> dict[str, Any]:
    for entry in entries or ():
        if entry.get("type") == kind and (name is None or entry.get("name") == name):
            return dict(entry)
    return {}
