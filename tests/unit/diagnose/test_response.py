"""The response machine: every path, every breaker, and death between any two lines."""

import itertools
import os
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kansoku.app.respond import (
    Driver,
    Target,
    clear_breaker,
    progress_of_output,
    progress_of_path,
    read_policy,
    target_of_incident,
)
from kansoku.app.respond_life import mark
from kansoku.app.respond_ways import CHECK, Ways
from kansoku.cli import respond as cli
from kansoku.diagnose.edge.cluster import JobFacts
from kansoku.diagnose.edge.journal import Journal
from kansoku.diagnose.life import Stage, lives_of
from kansoku.diagnose.response import NodeFacts, ResponsePolicy, State
from kansoku.errors import ConfigurationError, InputError, PlatformError


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


class FakeCluster:
    """Three working nodes and two spares; remembers every deed."""

    def __init__(self, *, sick=(), die_at=None):
        self.drained, self.admitted, self.excluded, self.returned = set(), set(), {}, set()
        self.requeues = 0
        self.sick, self.die_at, self.calls = set(sick), die_at, itertools.count()

    def _maybe_die(self):
        if next(self.calls) == self.die_at:
            raise Killed

    def nodes(self):
        self._maybe_die()
        names = [("n1", False), ("n2", False), ("n3", False), ("s1", True), ("s2", True)]
        return [
            NodeFacts(
                name=name,
                states=("IDLE", "DRAIN") if name in self.drained else ("IDLE",),
                reserved=spare,
                drained_by_us=name in self.drained,
            )
            for name, spare in names
        ]

    def job(self, job):
        self._maybe_die()
        return JobFacts(state="RUNNING", partition="p", restarts=self.requeues, excluded="")

    def drain(self, node, reason):
        self.drained.add(node)
        self._maybe_die()

    def validate(self, node):
        self._maybe_die()
        return "GPU 3 is missing" if node in self.sick else None

    def admit(self, node):
        self.admitted.add(node)
        self._maybe_die()

    def give_back(self, node):
        self.returned.add(node)
        self.drained.discard(node)

    def requeue(self, job, exclude, *, prepare):
        prepare()
        self.requeues += 1
        self.excluded[job] = exclude
        self._maybe_die()


TARGET = Target(incident="i1", node="n2", job="77", reason="gpu_hardware: nvlink")


DAY = 86_400 * 10**9


def driver(tmp_path, cluster, *, progress=None, policy=None, checkpoints=None, start_ns=10**18):
    clock = itertools.count(start_ns, 10**9)
    steps = itertools.count(1)
    return Driver(
        control=cluster,
        journal=Journal(tmp_path / "state"),
        policy=policy or ResponsePolicy(progress_within_s=20),
        progress=progress or (lambda _job: next(steps)),
        checkpoints=checkpoints,
        now_ns=lambda: next(clock),
        sleep=lambda _s: None,
    )


def test_the_whole_way(tmp_path):
    cluster = FakeCluster()
    one = driver(tmp_path, cluster)
    response = one.begin(TARGET)
    assert response.state is State.RECOVERED
    assert (cluster.drained, cluster.admitted, cluster.excluded) == ({"n2"}, {"s1"}, {"77": "n2"})
    deeds = [(r["deed"], r["outcome"]) for r in one.journal.audits()]
    assert deeds == [
        (deed, outcome)
        for deed in ("drain", "choose", "validate", "admit", "requeue", "watch")
        for outcome in ("begin", "done")
    ]
    assert one.journal.lives()[0]["event"] == "serviced_out"


def test_a_dry_run_does_nothing(tmp_path):
    cluster = FakeCluster()
    lines, refusal = driver(tmp_path, cluster).dry_run(TARGET)
    assert lines[0] == "drain n2: gpu_hardware: nvlink"
    assert refusal is None
    assert cluster.drained == set()


def test_a_sick_spare_is_set_aside_and_the_next_taken(tmp_path):
    cluster = FakeCluster(sick={"s1"})
    response = driver(tmp_path, cluster).begin(TARGET)
    assert (response.spare, response.rejected) == ("s2", ("s1",))
    assert cluster.admitted == {"s2"}


def test_no_spare_left_is_escalated_with_the_bad_node_out(tmp_path):
    cluster = FakeCluster(sick={"s1", "s2"})
    response = driver(tmp_path, cluster).begin(TARGET)
    assert response.state is State.ESCALATED
    assert cluster.drained == {"n2"}
    assert cluster.requeues == 0


def test_no_progress_is_escalated_and_three_times_open_the_breaker(tmp_path):
    stuck = driver(tmp_path, FakeCluster(), progress=lambda _job: 5)
    for node in ("n1", "n2", "n3"):
        stuck.control.drained.clear()
        response = stuck.begin(Target(incident=node, node=node, job="77", reason="x"))
        assert response.state is State.ESCALATED
        assert "no progress" in response.note
    stuck.control.drained.clear()
    with pytest.raises(PlatformError, match="3 times in vain"):
        stuck.begin(Target(incident="again", node="n1", job="77", reason="x"))
    clear_breaker(stuck.journal, 10**18)
    assert stuck.check(Target(incident="again", node="n1", job="78", reason="x")) is None


def lives_kept(tmp_path):
    return Journal(tmp_path / "state").lives()


@pytest.mark.parametrize("moment", range(24))
def test_killed_at_any_moment_and_taken_up_again(tmp_path, moment):
    """Whatever call to the cluster it dies in, a second driver ends with one spare admitted."""
    cluster = FakeCluster(die_at=moment)
    try:
        driver(tmp_path, cluster).begin(TARGET)
    except Killed:
        again = driver(tmp_path, cluster)
        again.resume()
        if not again.journal.responses():
            again.begin(TARGET)
    (response,) = Journal(tmp_path / "state").responses()
    assert response.state is State.RECOVERED
    assert (cluster.drained, cluster.admitted) == ({"n2"}, {"s1"})
    assert cluster.excluded == {"77": "n2"}
    assert [life["event"] for life in lives_kept(tmp_path)] == ["serviced_out"]


class DyingJournal(Journal):
    """Dies at the nth write of any kind, before or after it reached the disk."""

    die_at = 0
    late = False

    def _append(self, name, record):
        self._write_or_die(lambda: super(DyingJournal, self)._append(name, record))

    def _write(self, path, data):
        self._write_or_die(lambda: super(DyingJournal, self)._write(path, data))

    def _write_or_die(self, write):
        self.die_at -= 1
        if self.die_at == 0 and not self.late:
            raise Killed
        write()
        if self.die_at == 0:
            raise Killed


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("moment", range(1, 25))
def test_killed_at_any_write_and_taken_up_again(tmp_path, moment, late):
    cluster = FakeCluster()
    one = driver(tmp_path, cluster)
    one.journal.__class__ = DyingJournal
    one.journal.die_at, one.journal.late = moment, late
    try:
        one.begin(TARGET)
    except Killed:
        driver(tmp_path, cluster).begin(TARGET)
    (response,) = Journal(tmp_path / "state").responses()
    assert response.state is State.RECOVERED
    assert (cluster.drained, cluster.admitted) == ({"n2"}, {"s1"})
    assert [life["event"] for life in lives_kept(tmp_path)] == ["serviced_out"]
    assert Journal(tmp_path / "state").breaker().restarts == {"77": 0}


def test_beginning_twice_takes_up_the_first(tmp_path):
    cluster = FakeCluster(die_at=3)
    with pytest.raises(Killed):
        driver(tmp_path, cluster).begin(TARGET)
    driver(tmp_path, cluster).begin(TARGET)
    assert len(Journal(tmp_path / "state").responses()) == 1


def test_never_more_than_a_share_of_the_fleet(tmp_path):
    cluster = FakeCluster()
    cluster.drained = {"n1"}
    with pytest.raises(PlatformError, match="1 of 5 nodes are drained"):
        driver(tmp_path, cluster).begin(TARGET)
    assert cluster.drained == {"n1"}


def test_rate_limit(tmp_path):
    one = driver(tmp_path, FakeCluster(), policy=ResponsePolicy(most_responses_per_hour=2))
    for node in ("n1", "n2"):
        one.begin(Target(incident=node, node=node, job=None, reason="x"))
        one.control.drained.clear()
    with pytest.raises(PlatformError, match="2 responses in the last hour"):
        one.begin(Target(incident="x", node="n3", job=None, reason="x"))


def test_a_second_driver_is_refused_while_one_works(tmp_path):
    journal = Journal(tmp_path / "state")
    with journal.owned(), pytest.raises(PlatformError, match="another respond"):
        driver(tmp_path, FakeCluster()).begin(TARGET)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"domain": "application", "confidence": 0.9}, "take no node out"),
        ({"domain": "gpu_hardware", "confidence": 0.3}, "confidence 0.30"),
    ],
)
def test_weak_or_foreign_causes_take_no_node_out(tmp_path, change, words):
    target = Target(incident="i", node="n2", job=None, reason="x", **change)
    assert words in driver(tmp_path, FakeCluster()).check(target)


def answer(subject, domain="gpu_hardware"):
    hypothesis = {"subject": subject, "domain": domain, "component": "nvlink", "confidence": 0.8}
    return {"incidents": [{"id": "a", "onset_ns": 1, "hypotheses": [hypothesis]}]}


@pytest.mark.parametrize("subject", ["node:n2", "gpu:n2/0000:18:00", "nic:n2/mlx5_0"])
def test_the_node_of_an_incident(subject):
    assert target_of_incident(answer(subject), job="1", where="x").node == "n2"


@pytest.mark.parametrize("subject", [None, "rank:3", "storage:OST1", "switch:leaf1"])
def test_causes_that_are_no_node_drain_nothing(subject):
    with pytest.raises(InputError, match="nothing is drained"):
        target_of_incident(answer(subject), job=None, where="x")


def test_policy_files_are_checked(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("most_responses_per_hour = 9\ndomains = ['host']\n")
    policy = read_policy(path)
    assert (policy.most_responses_per_hour, policy.domains) == (9, ("host",))
    path.write_text("most_drained_shares = 1")
    with pytest.raises(ConfigurationError, match="unknown key"):
        read_policy(path)
    path.write_text("least_confidence = 'high'")
    with pytest.raises(ConfigurationError, match="must be a number"):
        read_policy(path)


def test_progress_of_a_checkpoint_folder(tmp_path):
    assert progress_of_path(tmp_path / "none") is None
    (tmp_path / "step_1").write_text("x")
    first = progress_of_path(tmp_path)
    (tmp_path / "step_2").write_text("y")
    assert progress_of_path(tmp_path) >= first


# Circuit breakers, one by one


def stuck_three_times(tmp_path):
    one = driver(tmp_path, FakeCluster(), progress=lambda _job: 5)
    for node in ("n1", "n2", "n3"):
        one.control.drained.clear()
        one.begin(Target(incident=node, node=node, job="77", reason="x"))
    return one


def test_an_open_breaker_stays_open_for_other_jobs_later_drivers_and_days(tmp_path):
    stuck_three_times(tmp_path)
    later = driver(tmp_path, FakeCluster(), start_ns=10**18 + 40 * DAY)
    said = later.check(Target(incident="i", node="n1", job="78", reason="x"))
    assert said == "stopped before: job 77 was restarted 3 times in vain"
    clear_breaker(later.journal, 10**18 + 40 * DAY)
    fresh = driver(tmp_path, FakeCluster(), start_ns=10**18 + 40 * DAY)
    assert fresh.check(Target(incident="i", node="n1", job="77", reason="x")) is None


def test_progress_in_between_sets_the_count_of_restarts_back(tmp_path):
    cluster = FakeCluster()
    for number, progress in enumerate((lambda _job: 5, None, lambda _job: 5, lambda _job: 5)):
        cluster.drained.clear()
        one = driver(tmp_path, cluster, progress=progress, start_ns=10**18 + number * DAY)
        one.begin(Target(incident=str(number), node="n2", job="77", reason="x"))
    breaker = one.journal.breaker()
    assert (breaker.open_reason, breaker.restarts) == (None, {"77": 2})


def test_the_share_of_a_large_fleet_rounds_down(tmp_path):
    """Five per cent of 119 nodes are 5 (5.95): the sixth is refused."""

    class Fleet(FakeCluster):
        def nodes(self):
            return [
                NodeFacts(
                    name=f"n{i}", states=("IDLE",), reserved=False, drained_by_us=i < self.out
                )
                for i in range(119)
            ]

    fleet = Fleet()
    target = Target(incident="i", node="n100", job=None, reason="x")
    fleet.out = 4
    assert driver(tmp_path, fleet).check(target) is None
    fleet.out = 5
    assert "5 of 119 nodes are drained by kansoku already (limit 5)" in driver(
        tmp_path, fleet
    ).check(target)


def test_the_rate_limit_forgets_after_an_hour(tmp_path):
    policy = ResponsePolicy(most_responses_per_hour=1)
    driver(tmp_path, FakeCluster(), policy=policy).begin(TARGET)
    target = Target(incident="i", node="n3", job=None, reason="x")
    soon = driver(tmp_path, FakeCluster(), policy=policy, start_ns=10**18 + 3000 * 10**9)
    assert "1 responses in the last hour" in soon.check(target)
    later = driver(tmp_path, FakeCluster(), policy=policy, start_ns=10**18 + 3700 * 10**9)
    assert later.check(target) is None


def test_the_audit_log_has_refusals_failures_and_clearings(tmp_path):
    one = stuck_three_times(tmp_path)
    with pytest.raises(PlatformError):
        one.begin(TARGET)
    clear_breaker(one.journal, 10**18)
    audits = one.journal.audits()
    watches = [a["outcome"] for a in audits if a.get("deed") == "watch"]
    assert [w.startswith("job 77 made no progress") for w in watches] == [False, True] * 3
    assert audits[-2]["refused"].startswith("stopped before")
    assert audits[-1]["cleared"] == "job 77 was restarted 3 times in vain"
    begun = [a["deed"] for a in audits if a.get("outcome") == "begin"]
    assert begun == ["drain", "choose", "validate", "admit", "requeue", "watch"] * 3
    assert all("time_ns" in a for a in audits)


# Progress without a folder


def test_the_output_shows_progress_only_where_its_newest_lines_state_a_step(tmp_path):
    output = tmp_path / "job.out"
    assert progress_of_output(output) is None
    output.write_text("step 1 loss 3.2\nstep 2 loss 3.1\n")
    assert progress_of_output(output) == output.stat().st_mtime_ns
    with output.open("a") as file:
        file.write("slurmstepd: error: JOB 7 CANCELLED\n" + "starting\n" * 5)
    assert progress_of_output(output) is None


def test_a_job_whose_progress_nobody_can_see_is_handed_over_and_not_counted(tmp_path):
    one = driver(tmp_path, FakeCluster(), progress=lambda _job: None)
    response = one.begin(TARGET)
    assert response.state is State.ESCALATED
    assert "nothing shows whether it gets on" in response.note
    assert one.journal.breaker().restarts == {}


# Checkpoints


def test_a_broken_newest_checkpoint_is_set_aside_between_stop_and_start(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    with zipfile.ZipFile(folder / "step_10.pt", "w") as file:
        file.writestr("data.pkl", b"x" * 1000)
    whole = (folder / "step_10.pt").read_bytes()
    (folder / "step_20.pt").write_bytes(whole[:500])
    os.utime(folder / "step_10.pt", (1, 1))
    os.utime(folder / "step_20.pt", (2, 2))
    cluster = FakeCluster()
    one = driver(tmp_path, cluster, checkpoints=folder)
    lines, _ = one.dry_run(TARGET)
    assert "requeue job 77 without n2; it resumes from step_10.pt" in lines
    assert "set aside step_20.pt: step_20.pt: cut off: its end is missing" in lines
    assert sorted(p.name for p in folder.iterdir()) == ["step_10.pt", "step_20.pt"]
    response = one.begin(TARGET)
    assert response.resumes_from == "step_10.pt"
    assert sorted(p.name for p in folder.iterdir()) == ["step_10.pt", "step_20.pt.incomplete"]
    aside = [a for a in one.journal.audits() if a.get("deed") == "set_aside"]
    assert [a["outcome"] for a in aside] == ["renamed step_20.pt.incomplete"]


# Lemons and the life of a node


def taken_out(journal, node, *days):
    for day in days:
        journal.life(
            {"time_ns": 10**18 - day * DAY, "node": node, "event": "serviced_out", "reason": "x"}
        )


def test_a_reserved_node_that_came_back_too_often_replaces_no_other(tmp_path):
    """Its node check passes, which does not outweigh three times in thirty days."""
    cluster = FakeCluster()
    one = driver(tmp_path, cluster)
    taken_out(one.journal, "s1", 2, 10, 29)
    taken_out(one.journal, "s2", 2, 10, 31)
    lines, _ = one.dry_run(TARGET)
    assert "pass over s1: s1 was taken out 3 times in 30 days" in lines
    assert one.begin(TARGET).spare == "s2"
    chosen = next(a for a in one.journal.audits() if a.get("deed") == "choose")
    assert chosen["sentence"] == (
        "choose reserved node s2 (passed over: s1 was taken out 3 times in 30 days)"
    )


def test_with_only_lemons_in_reserve_it_is_escalated_and_says_so(tmp_path):
    one = driver(tmp_path, FakeCluster())
    for spare in ("s1", "s2"):
        taken_out(one.journal, spare, 1, 2, 3)
    response = one.begin(TARGET)
    assert response.state is State.ESCALATED
    assert "s1 was taken out 3 times" in response.note


def test_the_plan_says_that_the_bad_node_came_back(tmp_path):
    one = driver(tmp_path, FakeCluster())
    taken_out(one.journal, "n2", 1, 5)
    lines, _ = one.dry_run(TARGET)
    assert lines[1] == (
        "note that n2 was taken out 3 times in 30 days: it needs a repair before it returns"
    )


def move(one, stage, **more):
    return mark(one, "n2", Stage(stage), more.pop("reason", "by hand"), dry_run=False)


def test_out_repaired_validated_returned_with_its_times(tmp_path):
    cluster = FakeCluster()
    one = driver(tmp_path, cluster)
    one.begin(TARGET)
    assert move(one, "returned").refusal == "n2 is serviced out: validate it first"
    assert move(one, "repaired", reason="GPU 3 replaced").refusal is None
    cluster.sick = {"n2"}
    assert move(one, "validated").refusal == "GPU 3 is missing"
    assert lives_of(one.journal.lives())["n2"].stage is Stage.REPAIRED
    cluster.sick = set()
    assert move(one, "validated").refusal is None
    assert move(one, "returned").refusal is None
    assert cluster.returned == {"n2"}
    life = lives_of(one.journal.lives())["n2"]
    assert [stage for _, stage, _ in life.events] == [
        "serviced_out", "repaired", "validated", "returned",
    ]  # fmt: skip
    assert life.out_for_ns == life.events[-1][0] - life.events[0][0] > 0
    assert move(one, "repaired").refusal == "n2 is returned: it is in service"


def test_a_lemon_returns_only_after_a_repair_however_clean_its_check(tmp_path):
    cluster = FakeCluster()
    one = driver(tmp_path, cluster)
    taken_out(one.journal, "n2", 1, 5)
    one.begin(TARGET)
    assert move(one, "validated").refusal is None
    assert "a clean check does not outweigh that" in move(one, "returned").refusal
    assert cluster.returned == set()
    move(one, "repaired", reason="board replaced")
    move(one, "validated")
    assert move(one, "returned").refusal is None


def test_a_dry_run_of_a_mark_moves_nothing(tmp_path):
    one = driver(tmp_path, FakeCluster())
    one.begin(TARGET)
    said = mark(one, "n2", Stage.REPAIRED, "x", dry_run=True)
    assert (said.sentence, said.refusal) == ("note that n2 was repaired: x", None)
    assert lives_of(one.journal.lives())["n2"].stage is Stage.SERVICED_OUT


def test_who_takes_it_up_need_not_repeat_the_options(tmp_path):
    """Killed at the drain; taken up with --resume alone it finds the same spare and limits."""
    ways = Ways(spares=("s1",), check="true", checkpoints="/ckpt/a", policy="/etc/limits.toml")
    begun = replace(driver(tmp_path, FakeCluster(die_at=1)), ways=asdict(ways))
    with pytest.raises(Killed):
        begun.begin(TARGET)
    found = []

    def driver_of(response):
        found.append(Ways().over(response.ways))
        return driver(tmp_path, FakeCluster())

    (response,) = driver(tmp_path, FakeCluster()).resume(driver_of)
    assert found == [ways]
    assert response.state is State.RECOVERED


def test_an_option_given_anew_wins_over_what_was_kept():
    kept = asdict(Ways(spares=("s1",), check="old", progress="/a"))
    now = Ways(spares=("s2", "s3")).over(kept)
    assert (now.spares, now.check, now.progress) == (("s2", "s3"), "old", "/a")
    assert Ways().over({}) == Ways(check=CHECK)
    assert f'"{CHECK}"' in Path(cli.__file__).read_text()
