"""The response machine: every path, every breaker, and death between any two lines."""

import itertools

import pytest

from kansoku.app.respond import (
    Driver,
    Target,
    clear_breaker,
    progress_of_path,
    read_policy,
    target_of_incident,
)
from kansoku.diagnose.edge.cluster import JobFacts
from kansoku.diagnose.edge.journal import Journal
from kansoku.diagnose.response import NodeFacts, ResponsePolicy, State
from kansoku.errors import ConfigurationError, InputError, PlatformError


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


class FakeCluster:
    """Three working nodes and two spares; remembers every deed."""

    def __init__(self, *, sick=(), die_at=None):
        self.drained, self.admitted, self.excluded = set(), set(), {}
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

    def requeue(self, job, exclude, *, prepare):
        prepare()
        self.requeues += 1
        self.excluded[job] = exclude
        self._maybe_die()


TARGET = Target(incident="i1", node="n2", job="77", reason="gpu_hardware: nvlink")


def driver(tmp_path, cluster, *, progress=None, policy=None):
    clock = itertools.count(10**18, 10**9)
    steps = itertools.count(1)
    return Driver(
        control=cluster,
        journal=Journal(tmp_path / "state"),
        policy=policy or ResponsePolicy(progress_within_s=20),
        progress=progress or (lambda _job: next(steps)),
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
