"""A real Slurm 22.05's outputs: nothing lost, and the same answers from both forms."""

import pytest

from kansoku.formats.slurm import (
    read_node_events,
    read_sacct_json,
    read_sacct_text,
    read_scontrol,
    read_scontrol_nodes,
    read_sinfo_json,
    read_squeue_json,
)

KEY = ["raw_id", "submit_ns"]


def text(corpus, name):
    data = (corpus / "slurm" / name).read_bytes()
    (parsed,) = read_sacct_text(data, file=name)
    return parsed


@pytest.mark.parametrize(
    ("name", "jobs", "steps"),
    [
        ("sacct_all_parsable2.txt", 49, 70),
        ("sacct_core_parsable2.txt", 49, 70),
        ("sacct_X_latest_parsable2.txt", 46, 0),
    ],
)
def test_no_row_is_lost(corpus, name, jobs, steps):
    """49 incarnations of 46 jobs and 70 steps; sacct tore 16 lines of it."""
    parsed = text(corpus, name)
    assert (parsed.jobs.height, parsed.steps.height) == (jobs, steps)
    assert parsed.quarantined == ()
    assert parsed.repaired > 0


def test_json_and_text_answer_alike(corpus):
    a = text(corpus, "sacct_all_parsable2.txt")
    b = read_sacct_json((corpus / "slurm" / "sacct_all.json").read_bytes(), file="j")
    left, right = a.jobs.sort(KEY), b.jobs.sort(KEY)
    # The JSON of 22.05 has no user id and no submit line, and loses exit codes (null, not 0).
    absent = {"uid", "submit_line"}
    for name in left.columns:
        if name in absent:
            assert right[name].null_count() == right.height
            continue
        same = left[name].eq_missing(right[name])
        if name in {"exit_code", "derived_exit_code"}:
            same = same | right[name].is_null()
        assert same.all(), (name, left.filter(~same)["job_id"].to_list())
    key = ["raw_id", "start_ns", "step"]
    left, right = a.steps.sort(key), b.steps.sort(key)
    for name in left.columns:
        same = left[name].eq_missing(right[name])
        if name == "exit_code":
            same = same | right[name].is_null()
        assert same.all(), name


def test_names_with_pipes_newlines_and_other_scripts_come_through(corpus):
    names = set(text(corpus, "sacct_core_parsable2.txt").jobs["name"])
    in_json = read_sacct_json((corpus / "slurm" / "sacct_all.json").read_bytes(), file="j")
    assert names == set(in_json.jobs["name"])
    assert any("|" in name for name in names)


def test_states_of_now(corpus):
    folder = corpus / "slurm"
    nodes = {n.name: n for n in read_sinfo_json((folder / "slurm_sinfo.json").read_bytes())}
    assert sorted(n for n, s in nodes.items() if s.idle) == ["node01", "node02"]
    assert not nodes["node03"].usable
    assert not nodes["node04"].usable
    assert (nodes["node08"].gpus, nodes["node08"].gpus_used) == (8, 2)
    again = {
        n.name: n
        for n in read_scontrol_nodes((folder / "slurm_scontrol_show_node.txt").read_bytes())
    }
    for name, node in nodes.items():
        other = again[name]
        assert (node.usable, node.idle, node.gpus, node.gpus_used) == (
            other.usable, other.idle, other.gpus, other.gpus_used,
        )  # fmt: skip
    jobs = read_squeue_json((folder / "slurm_squeue.json").read_bytes())
    by_state = {s: sum(j.state == s for j in jobs) for s in ("RUNNING", "PENDING")}
    assert by_state["RUNNING"] > 0
    assert by_state["PENDING"] > 0
    big = next(j for j in jobs if j.name == "waiting-big")
    assert (big.nodes, big.gpus, big.state) == (6, 48, "PENDING")


def test_node_events(corpus):
    frame = read_node_events((corpus / "slurm" / "slurm_sacctmgr_event.txt").read_bytes())
    assert frame["node"].to_list() == ["node02", "node02", "node03", "node04"]
    assert frame["reason"][2].startswith("Xid 79")
    assert frame["end_ns"][2] is None


def test_scontrol_values_keep_their_spaces(corpus):
    jobs = read_scontrol((corpus / "slurm" / "slurm_scontrol_show_job.txt").read_bytes())
    first = jobs[0]
    assert (first["JobId"], first["JobState"], first["ExitCode"]) == ("6", "TIMEOUT", "0:15")
    nodes = read_scontrol((corpus / "slurm" / "slurm_scontrol_show_node.txt").read_bytes())
    drained = next(n for n in nodes if n["NodeName"] == "node03")
    assert drained["Reason"].startswith("Xid 79: GPU has fallen off the bus")
