"""Every state and kind of job, produced by a real Slurm, through both forms and every answer."""

import json
import subprocess
import sys
import time

import polars as pl
import pytest
from tests.labs.slurm import poll, slurm  # noqa: F401 - a fixture

from kansoku.app import jobs as api
from kansoku.formats.slurm import (
    read_sacct_json,
    read_sacct_text,
    read_scontrol_nodes,
    read_sinfo_json,
)
from kansoku.jobs.attribution import confusion
from kansoku.jobs.edge.slurm import LiveSlurm

pytestmark = pytest.mark.real


class Life:
    """What was run, and what Slurm's own records must say of it."""

    def __init__(self, lab):
        self.lab = lab
        self.jobs: dict[str, int] = {}
        self.began = int(time.time())


@pytest.fixture(scope="module")
def life(slurm):  # noqa: F811
    """Run one job of every kind; about 40 s, most of it Slurm noticing a dead node."""
    lab, n = slurm, slurm.nodes
    out = Life(lab)
    j = out.jobs
    # The node that will die gets its jobs first, so that its timeout runs beside the rest.
    j["node_fail"] = lab.sbatch("srun sleep 300", "-N2", "--gres=gpu:8", "--no-requeue",
                                "-w", f"{n[6]},{n[7]}", "-t", "10", user="games")  # fmt: skip
    j["node_requeue"] = lab.sbatch("sleep 300", "-N1", "-w", n[6], "--requeue", "-t", "10",
                                   "-J", "again", user="news")  # fmt: skip
    lab.wait(j["node_fail"], "RUNNING")
    lab.wait(j["node_requeue"], "RUNNING")
    poll(
        lambda: lab.run("squeue", "-h", "-s", "-j", str(j["node_fail"])).stdout.strip(),
        timeout=20, message="the step did not start",
    )  # fmt: skip
    # A step killed while it is being launched leaves its job COMPLETING for minutes.
    launched = time.monotonic()
    poll(lambda: time.monotonic() > launched + 1.5, timeout=5, message="time stands still")
    lab.kill_node(n[6])
    j["timeout"] = lab.sbatch("sleep 300", "-N1", "-t", "1", "-w", n[0], user="games")
    lab.wait(j["timeout"], "RUNNING")
    # Limits are whole minutes; an earlier end by hand is a limit reached all the same.
    lab.scontrol("update", f"JobId={j['timeout']}", "EndTime=now+1")
    j["multi"] = lab.sbatch("srun -N4 true; srun sleep 1", "-N4", "--gres=gpu:h100:8", "-t", "5",
                            "-J", "gpt3|175b\nrun", "--comment=model=x;tp=8", user="games")  # fmt: skip
    j["array"] = lab.sbatch("[ $SLURM_ARRAY_TASK_ID = 2 ] && exit 13; exit 0", "--array=0-3%2",
                            "--gpus=1", "-t", "5", user="news")  # fmt: skip
    het = lab.run("sbatch", "--parsable", "-o", "/dev/null", "--uid=games", "-A", "llm",
                  "-N1", "-t", "5", ":", "-N2", "--gres=gpu:8", "--wrap", "srun true")  # fmt: skip
    j["het"] = int(het.stdout.strip().split(";")[0])
    j["exit"] = lab.sbatch("srun false", "-N2", "--gres=gpu:2", "-t", "5", "-x", n[5], user="news")
    j["signal"] = lab.sbatch("kill -SEGV $$", "-N1", "--gres=gpu:1", "-t", "5", "-x", n[5],
                            user="news")  # fmt: skip
    j["oom"] = lab.sbatch("srun python3 -c 'x = bytearray(400 << 20)'", "-N1", "--mem=60M",
                          "-t", "5", "-x", n[5], user="mail")  # fmt: skip
    j["requeue"] = lab.sbatch("[ $SLURM_RESTART_COUNT ] && exit 0; sleep 60", "-N1", "-t", "5",
                              "--requeue", "-w", n[1], user="mail")  # fmt: skip
    j["cancel_own"] = lab.sbatch("sleep 300", "-N1", "-t", "5", "-w", n[2], user="mail")
    j["cancel_root"] = lab.sbatch("sleep 300", "-N1", "-t", "5", "-w", n[2], user="mail")
    j["cancel_pending"] = lab.sbatch("true", "-N1", "-t", "5", "-H", user="mail")
    j["suspend"] = lab.sbatch("sleep 15", "-N1", "-t", "5", "-w", n[3], user="mail")
    j["exclude"] = lab.sbatch("true", "-N1", "-t", "5", f"--exclude={n[2]}", user="mail")
    for name in ("requeue", "cancel_own", "cancel_root", "suspend"):
        lab.wait(j[name], "RUNNING")
    lab.scontrol("suspend", str(j["suspend"]))
    suspended = time.monotonic()
    lab.scontrol("requeue", str(j["requeue"]))
    # A job of another user may be cancelled by its owner's id.
    uid = subprocess.run(["id", "-u", "mail"], capture_output=True, text=True, check=True).stdout
    lab.run("setpriv", f"--reuid={uid.strip()}", "--clear-groups", "scancel", str(j["cancel_own"]))
    lab.run("scancel", str(j["cancel_root"]), str(j["cancel_pending"]))
    # Preemption: a low job on the node, then one of a higher partition that wants it whole.
    j["preempted"] = lab.sbatch("sleep 300", "-N1", "-p", "low", "--exclusive", "-w", n[4],
                                "--requeue", "-t", "10", user="games")  # fmt: skip
    lab.wait(j["preempted"], "RUNNING")
    j["preemptor"] = lab.sbatch("sleep 1", "-N1", "--exclusive", "-w", n[4], "-t", "5", user="news")
    # Slurm counts suspension in whole seconds.
    poll(lambda: time.monotonic() > suspended + 2, timeout=5, message="time stands still")
    lab.scontrol("resume", str(j["suspend"]))
    lab.wait(j["preemptor"])
    lab.scontrol("update", f"NodeName={n[5]}", "State=DRAIN",
                 "Reason=Xid 79: GPU has fallen off the bus [gpu3]")  # fmt: skip
    lab.scontrol("create", "reservation", "ReservationName=maint", "StartTime=now+1hour",
                 "Duration=60", f"Nodes={n[5]}", "Users=root", "Flags=MAINT")  # fmt: skip
    lab.wait(j["node_fail"], "NODE_FAIL", timeout=90)
    # Slurm holds requeued jobs for two minutes: bring them back at once.
    for name in ("requeue", "node_requeue", "preempted"):
        lab.wait(j[name], "PENDING", "RUNNING")
        lab.scontrol("update", f"JobId={j[name]}", "StartTime=now", check=False)
    lab.wait(j["requeue"], "COMPLETED")
    lab.run("scancel", str(j["node_requeue"]), str(j["preempted"]))
    lab.wait(j["timeout"], "TIMEOUT", timeout=100)
    done = [v for k, v in j.items() if k not in {"array", "het"}]
    for job in done:
        lab.wait(job)
    lab.wait_accounted(done)
    yield out
    lab.start_node(n[6])
    lab.scontrol("delete", "ReservationName=maint", check=False)
    for node in (n[5], n[6]):
        lab.scontrol("update", f"NodeName={node}", "State=RESUME", check=False)
    poll(
        lambda: "idle" in lab.run("sinfo", "-h", "-n", n[6], "-p", "train", "-o", "%T").stdout,
        timeout=30, message="the killed node did not come back",
    )  # fmt: skip


@pytest.fixture(scope="module")
def live(life):
    """kansoku's own way to ask, pointed at the lab."""
    calls = []

    def run(command, environment):
        calls.append(command[0])
        return life.lab.run(*command, env=dict(environment), text=False).stdout

    answer = LiveSlurm(run)
    answer.calls = calls
    return answer


@pytest.fixture(scope="module")
def store(life, live, tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    first = api.import_jobs(live=True, store=folder, slurm=live)
    assert first.quarantined == ()
    assert first.jobs.new >= 20
    return folder


def both(life):
    columns = (
        "JobIDRaw,JobID,Cluster,JobName,User,UID,Account,Partition,QOS,State,ExitCode,"
        "DerivedExitCode,Reason,Submit,Eligible,Start,End,ElapsedRaw,Suspended,TimelimitRaw,NNodes,"
        "NCPUS,NTasks,ReqTRES,AllocTRES,NodeList,Comment,AdminComment,SubmitLine,Flags,FailedNode,"
        "Reservation,TotalCPU,MaxRSS,MaxRSSNode"
    )
    known = life.lab.run("sacct", "--helpformat").stdout.split()
    columns = ",".join(c for c in columns.split(",") if c in known)
    text = life.lab.sacct("-D", "-P", f"--format={columns}", env={"TZ": "UTC"})
    parts = list(read_sacct_text(text.encode(), file="text"))
    whole = read_sacct_json(life.lab.sacct("-D", "--json").encode(), file="json")
    assert [q for p in parts for q in p.quarantined] == []
    assert whole.quarantined == ()
    return pl.concat([p.jobs for p in parts]), whole.jobs


def test_both_forms_say_the_same(life):
    """Every column of every incarnation, but for what the JSON of this version lacks."""
    key = ["raw_id", "submit_ns"]
    text, whole = (frame.sort(key) for frame in both(life))
    assert text.height == whole.height
    for name in text.columns:
        if whole[name].null_count() == whole.height:
            continue
        same = text[name].eq_missing(whole[name])
        if name in {"exit_code", "derived_exit_code"}:
            same = same | whole[name].is_null()
        assert same.all(), (name, text.filter(~same).select("job_id", "state", name).rows(),
                            whole.filter(~same)[name].to_list())  # fmt: skip


EXPECTED = {
    "multi": ["COMPLETED"], "exit": ["FAILED"], "signal": ["FAILED"], "oom": ["OUT_OF_MEMORY"],
    "timeout": ["TIMEOUT"], "node_fail": ["NODE_FAIL"], "cancel_own": ["CANCELLED"],
    "cancel_root": ["CANCELLED"], "cancel_pending": ["CANCELLED"], "suspend": ["COMPLETED"],
    "requeue": ["REQUEUED", "COMPLETED"], "preemptor": ["COMPLETED"], "exclude": ["COMPLETED"],
    "node_requeue": ["NODE_FAIL", "CANCELLED"], "preempted": ["PREEMPTED", "CANCELLED"],
}  # fmt: skip


def test_every_kind_comes_out_right(life, store):
    frame = api.attributions(store=store)
    for name, outcomes in EXPECTED.items():
        rows = frame.filter(pl.col("raw_id") == life.jobs[name]).sort("submit_ns")
        assert rows["outcome"].to_list() == outcomes, (name, rows)
        assert rows["incarnation"].to_list() == list(range(len(outcomes))), name
    one = {n: frame.filter(pl.col("raw_id") == life.jobs[n]).row(0, named=True) for n in EXPECTED}
    assert one["multi"]["name"] == "gpt3|175b\nrun"
    assert (one["multi"]["gpus"], one["multi"]["nodes"]) == (32, 4)
    assert one["exit"]["exit_code"] == 1
    assert one["signal"]["exit_signal"] == 11
    assert one["cancel_pending"]["start_ns"] is None
    assert one["cancel_own"]["cancelled_by"] == "mail"
    assert one["cancel_root"]["cancelled_by"] == "root"
    assert one["suspend"]["suspended_s"] > 0
    tasks = frame.filter(pl.col("job_id").str.starts_with(f"{life.jobs['array']}_"))
    assert sorted(tasks["outcome"]) == ["COMPLETED"] * 3 + ["FAILED"]
    het = frame.filter(pl.col("job_id").str.starts_with(f"{life.jobs['het']}+"))
    assert sorted(het["job_id"].str.slice(-2)) == ["+0", "+1"]


TRUE_CAUSES = {
    "multi": "none", "exit": "user_program", "signal": "user_program", "oom": "out_of_memory",
    "timeout": "time_limit", "node_fail": "node_fail", "cancel_own": "cancelled_by_user",
    "cancel_root": "cancelled_by_other", "requeue": "requeued", "preempted": "preempted",
    "node_requeue": "node_fail",
}  # fmt: skip


def test_attribution_of_labelled_failures(life, store, capsys):
    """The first incarnation of each labelled job; the matrix is printed."""
    frame = api.attributions(store=store).sort("submit_ns")
    given = {
        name: frame.filter(pl.col("raw_id") == life.jobs[name])["cause"][0] for name in TRUE_CAUSES
    }
    matrix = confusion(list(TRUE_CAUSES.values()), [given[n] for n in TRUE_CAUSES])
    with capsys.disabled():
        print(f"\nattribution on a real Slurm, true (rows) × given (columns):\n{matrix}")
    assert given == TRUE_CAUSES
    failed = frame.filter(pl.col("raw_id") == life.jobs["node_fail"]).row(0, named=True)
    assert failed["blamed_node"] == life.lab.nodes[6]


def test_importing_again_changes_nothing(life, live, store):
    before = len(live.calls)
    again = api.import_jobs(live=True, store=store, slurm=live)
    assert (again.jobs.new, again.jobs.updated, again.steps.new) == (0, 0, 0)
    # One sacct for columns (asks no daemon), one for the rows, one sacctmgr: no hammering.
    assert live.calls[before:] == ["sacct", "sacct", "sacctmgr"]
    whole = store.parent / "whole.json"
    whole.write_text(life.lab.sacct("-D", "--json"))
    other = api.import_jobs([whole], store=store, timezone="UTC")
    assert other.jobs.new == 0
    assert other.quarantined == ()


def test_new_jobs_arrive_and_running_ones_are_finished(life, live, store):
    job = life.lab.sbatch("sleep 300", "-N1", "--gres=gpu:1", "-t", "5", user="games")
    life.lab.wait(job, "RUNNING")

    def known():
        return any(str(job) in line.split("|")[0] for line in life.lab.sacct(
            "-X", "-n", "-P", "-o", "JobIDRaw,Partition", "-j", str(job)).splitlines()
            if line.endswith("|train"))  # fmt: skip

    poll(known, timeout=20, message="slurmdbd does not know the job")
    first = api.import_jobs(live=True, store=store, slurm=live)
    assert first.jobs.new == 1
    life.lab.run("scancel", str(job))
    life.lab.wait(job)
    life.lab.wait_accounted([job])
    second = api.import_jobs(live=True, store=store, slurm=live)
    assert (second.jobs.new, second.jobs.updated) == (0, 1)
    row = api.load_jobs(store=store).filter(pl.col("raw_id") == job).collect().row(0, named=True)
    assert (row["state"], row["cancelled_by"]) == ("CANCELLED", "root")


def test_report_and_show_and_nodes(life, store):
    answer = api.report_json(api.report(store=store))
    assert answer["schema"] == "kansoku.jobs.report/1"
    shares = answer["outcomes"]["by_count"]
    assert sum(s["jobs"] for s in shares.values()) == answer["jobs"]
    assert sum(s["job_share"] for s in answer["sizes"]) == pytest.approx(1)
    shown = api.show_json(api.show(str(life.jobs["requeue"]), store=store))
    assert [row["outcome"] for row in shown["incarnations"]] == ["REQUEUED", "COMPLETED"]
    health = api.nodes_json(api.nodes(store=store))
    by_name = {node["node"]: node for node in health["nodes"]}
    assert by_name[life.lab.nodes[2]]["excluded_by"] == 1
    drained = by_name[life.lab.nodes[5]]
    assert any("Xid 79" in text for text in drained["evidence"])
    assert by_name[life.lab.nodes[6]]["node_fails"] >= 1


def test_idle_sees_the_live_queue(life, live):
    big = life.lab.sbatch("sleep 60", "-N8", "--exclusive", "-t", "5", user="games")
    running = life.lab.sbatch("sleep 60", "-N2", "--gres=gpu:8", "-t", "30", user="games")
    life.lab.wait(running, "RUNNING")
    try:
        answer = api.idle_json(api.idle(least=2, slurm=live, store="/nonexistent"))
        assert answer["nodes"]["all"] == 8
        assert life.lab.nodes[5] in {d["node"] for d in answer["nodes"]["down"]}
        # 16 GPUs are held by the running job; the drained and the dead node give none.
        assert answer["gpus"] == {"all": 64, "free": 8 * 6 - 16}
        assert len(answer["nodes"]["idle"]) == 4
        pending = {p["job"].split()[1]: p for p in answer["pending"]}
        assert pending[str(big)]["fits_now"] is False
    finally:
        life.lab.run("scancel", str(big), str(running))
    a = {n.name: n.usable for n in read_scontrol_nodes(live.nodes_text())}
    b = {n.name: n.usable for n in read_sinfo_json(live.nodes())}
    assert a == b


def test_admin_comment_and_one_job_live(life, live, store):
    answer = api.show(str(life.jobs["exit"]), store=store, live=True, slurm=live)
    assert answer.incarnations["exit_code"].to_list() == [1]
    text = api.write_admin_comment(answer, slurm=live)
    assert text.startswith("kansoku=1;outcome=failed;cause=user_program;")
    kept = life.lab.sacct("-X", "-n", "-P", "-o", "AdminComment", "-j", str(life.jobs["exit"]))
    assert kept.strip() == text


def test_the_collector_waits_after_failures(life, live, tmp_path):
    rounds = list(api.collect(every_s=0.01, store=tmp_path, slurm=live, rounds=2, patience=0))
    assert rounds[0].jobs.new > 20
    assert rounds[1].jobs.new == 0


def test_the_command_line(life, store):
    """The installed command on a real Slurm: exit codes and JSON."""

    def kansoku(*words):
        return subprocess.run(
            [sys.executable, "-m", "kansoku", "jobs", *words, "--store", str(store)],
            capture_output=True, text=True, env={**life.lab.env, "COLUMNS": "160"}, timeout=60,
        )  # fmt: skip

    answer = kansoku("import", "--live", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["schema"] == "kansoku.jobs.import/1"
    answer = kansoku("reliability", "--json", "--compare", "1,2")
    assert json.loads(answer.stdout)["steadier"]["answer"] == "cannot tell"
    assert kansoku("show", "999999").returncode == 2
    assert kansoku("show", str(life.jobs["node_fail"])).returncode == 1
