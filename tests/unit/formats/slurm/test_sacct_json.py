"""sacct --json: the spellings of the versions, whole and broken files."""

import json

import pytest

from kansoku.errors import InputError
from kansoku.formats.slurm import read_sacct_json

OLD = {
    "account": "llm", "cluster": "c", "job_id": 7, "name": "n", "user": "ann", "nodes": "c001",
    "allocation_nodes": 1, "array": {"job_id": 6, "task_id": 2, "task": None},
    "het": {"job_id": 0, "job_offset": None}, "partition": "p", "qos": "q",
    "state": {"current": "FAILED", "reason": "None"},
    "exit_code": {"status": "SIGNALED", "return_code": None, "signal": {"signal_id": 9, "name": "x"}},
    "derived_exit_code": {"status": "SUCCESS", "return_code": 0}, "flags": ["STARTED_ON_SCHEDULE"],
    "kill_request_user": None, "comment": {"administrator": None, "job": "hello", "system": None},
    "time": {"submission": 100, "eligible": 100, "start": 110, "end": 170, "elapsed": 60,
             "suspended": 0, "limit": 5},
    "tres": {"allocated": [{"type": "gres", "name": "gpu", "id": 1001, "count": 8},
                           {"type": "gres", "name": "gpu:h100", "id": 1002, "count": 8},
                           {"type": "energy", "name": None, "id": 3, "count": None},
                           {"type": "node", "name": None, "id": 4, "count": 1}],
             "requested": [{"type": "gres", "name": "gpu", "id": 1001, "count": 8}]},
    "steps": [],
}  # fmt: skip


def n(number):
    return {"set": True, "infinite": False, "number": number}


NEW = {
    **OLD,
    "array": {"job_id": 6, "task_id": n(2), "task": ""},
    "het": {"job_id": 0, "job_offset": {"set": False, "infinite": False, "number": 0}},
    "state": {"current": ["FAILED"], "reason": "None"},
    "exit_code": {"status": ["SIGNALED"], "return_code": {"set": False, "infinite": False, "number": 0},
                  "signal": {"id": n(9), "name": "KILL"}},
    "derived_exit_code": {"status": ["SUCCESS"], "return_code": n(0)},
    "time": {**OLD["time"], "limit": n(5), "planned": n(10)},
    "submit_line": "sbatch x",
}  # fmt: skip


def read(*jobs, version=(22, 5), **options):
    meta = {"Slurm": {"version": {"major": version[0], "minor": version[1], "micro": 1}}}
    data = json.dumps({"meta": meta, "errors": [], "jobs": jobs}).encode()
    return read_sacct_json(data, file="f", **options)


@pytest.mark.parametrize(("job", "version"), [(OLD, (22, 5)), (NEW, (24, 5))])
def test_old_and_new_spellings_say_the_same(job, version):
    row = read(job, version=version).jobs.row(0, named=True)
    assert (row["job_id"], row["array_job_id"], row["array_task_id"]) == ("6_2", 6, 2)
    assert (row["exit_code"], row["exit_signal"]) == (0, 9)
    assert (row["state"], row["gpus"], row["gpu_kind"], row["time_limit_s"]) == (
        "FAILED", 8, "h100", 300,
    )  # fmt: skip
    assert row["submit_ns"] == 100 * 10**9


def test_limits_without_end_are_null():
    job = {**NEW, "time": {**NEW["time"], "limit": {"set": True, "infinite": True, "number": 0}}}
    assert read(job).jobs["time_limit_s"].item() is None


def test_exit_codes_lost_by_22_05_are_unknown_and_later_ones_kept():
    """22.05.8 writes SUCCESS and 0 for `exit 1` (seen on a real Slurm)."""
    lost = {**OLD, "exit_code": {"status": "SUCCESS", "return_code": 0}}
    assert read(lost).jobs["exit_code"].item() is None
    kept = {**NEW, "exit_code": {"status": ["ERROR"], "return_code": n(1)}}
    assert read(kept, version=(23, 11)).jobs["exit_code"].item() == 1
    done = {**lost, "state": {"current": "COMPLETED", "reason": "None"}}
    assert read(done).jobs["exit_code"].item() == 0


def test_pending_arrays_and_het_components():
    array = {**OLD, "array": {"job_id": 7, "task_id": None, "task": "1-5%2"}}
    het = {**OLD, "array": {"job_id": 0}, "het": {"job_id": 6, "job_offset": 1}}
    assert read(array, het).jobs["job_id"].to_list() == ["7_[1-5%2]", "6+1"]


def test_what_was_cancelled_before_it_started_has_no_start():
    never = {**OLD, "state": {"current": "CANCELLED", "reason": "None"}, "nodes": "None assigned"}
    at = {**OLD["time"], "start": 170, "elapsed": 0}
    starts = read({**never, "time": at}, {**never, "time": at, "nodes": "c001"}).jobs["start_ns"]
    assert starts.to_list() == [None, 170 * 10**9]


def test_a_broken_job_costs_only_itself():
    answer = read(OLD, {"job_id": 8}, {**OLD, "state": {"current": "NONSENSE"}}, NEW)
    assert answer.jobs.height == 2
    assert [q.row for q in answer.quarantined] == [2, 3]
    assert "NONSENSE" in answer.quarantined[1].reason


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"nodes":[]}', b"\xff{}"])
def test_other_files_are_refused(data):
    with pytest.raises(InputError, match="sacct --json"):
        read_sacct_json(data, file="f")


def test_broken_utf8_is_replaced():
    data = json.dumps({"jobs": [{**OLD, "name": "NAME"}]}).encode().replace(b"NAME", b"a\xffb")
    assert read_sacct_json(data, file="f").jobs["name"].item() == "a�b"
