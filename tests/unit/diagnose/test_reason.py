"""First divergence, survived events, scope, cascades, unknown: one small story each."""

from dataclasses import replace

from kansoku.diagnose.context import Context, Progress
from kansoku.diagnose.observation import Observation
from kansoku.diagnose.reason import diagnose
from kansoku.model import Domain, Verdict

S = 1_000_000_000
T = 1_741_064_767 * S


def seen(rule, domain, *, at, role="root", strength=1.0, kind="kernel", **more):
    return Observation(
        rule=rule, text=rule, source=f"{rule}:1", kind=kind, domain=Domain(domain),
        component=rule, role=role, strength=strength, meaning="", action="", time_ns=T + at * S,
        last_ns=T + at * S, **more,
    )  # fmt: skip


def watchdogs(at, ranks=range(8)):
    return [
        seen("fw-watchdog", "framework", at=at, role="cascade", kind="job", rank=r) for r in ranks
    ]


def context(progress_at=0, **more):
    return Context(progress=Progress(last_ns={None: T + progress_at * S}), **more)


def test_a_gpu_lost_just_after_the_last_step_wins_over_eight_watchdogs():
    xid = seen("xid.79", "gpu_hardware", at=5, node="n3", device="0000:18:00")
    incident = diagnose([*watchdogs(605), xid], context())
    first = incident.hypotheses[0]
    assert (first.domain, str(first.subject)) == (Domain.GPU_HARDWARE, "gpu:n3/0000:18:00")
    assert incident.onset_ns == T + 5 * S
    assert [c.sentence for c in incident.cascades] == ["fw-watchdog"]


def test_deaths_by_watchdogs_alone_are_a_hang_since_the_collective_was_entered():
    """Ten minutes before the watchdogs spoke; what they killed is the consequence."""
    told = [
        replace(one, text="Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3001) "
                "ran for 600012 milliseconds before timing out.")
        for one in watchdogs(605)
    ]  # fmt: skip
    died = seen("fw-child-failed", "framework", at=606, role="cascade", kind="job")
    incident = diagnose([*told, died], context())
    assert (incident.kind, incident.verdict) == ("hang", Verdict.UNKNOWN)
    assert incident.onset_ns == T + 605 * S - 600_012_000_000
    assert {c.source for c in incident.cascades} == {"fw-watchdog:1", "fw-child-failed:1"}


def test_an_event_that_the_job_survived_is_no_cause():
    flap = seen("net-link-down", "network", at=-3000, node="n7", device="mlx5_0")
    oom = seen("app-oom-cuda", "application", at=2, kind="job", rank=4)
    incident = diagnose([flap, oom], context())
    assert incident.hypotheses[0].domain is Domain.APPLICATION
    link = next(h for h in incident.hypotheses if h.domain is Domain.NETWORK)
    assert "went on long after" in link.evidence_against[0].sentence


def test_a_link_between_switches_is_named():
    lossy = seen("finding.link", "network", at=1, kind="finding", target="link:spine1-tor0")
    incident = diagnose([lossy], context())
    assert str(incident.hypotheses[0].subject) == "link:spine1-tor0"


def test_a_dead_peer_explains_a_network_that_lost_it():
    panic = seen("host-panic", "host", at=1, node="n5")
    retries = [
        seen("net-wc12", "network", at=20, role="either", strength=0.7, kind="job",
             node=f"n{i}", target="n5") for i in range(4)
    ]  # fmt: skip
    incident = diagnose([panic, *retries], context())
    assert str(incident.hypotheses[0].subject) == "node:n5"


def test_many_clients_of_one_target_blame_the_target():
    lost = [
        seen("st-lustre-lost", "storage", at=i, node=f"n{i}", target="scratch-OST0003")
        for i in range(6)
    ]
    incident = diagnose(lost, context())
    assert str(incident.hypotheses[0].subject) == "storage:scratch-OST0003"


def test_one_client_that_loses_many_targets_is_itself_at_fault():
    lost = [
        seen("st-lustre-lost", "storage", at=i, node="n2", target=f"scratch-OST000{i}")
        for i in range(4)
    ]
    incident = diagnose(lost, context())
    assert str(incident.hypotheses[0].subject) == "node:n2"


def test_one_exception_on_every_rank_is_the_jobs():
    crash = [seen("app-shape", "application", at=0.1 * r, kind="job", rank=r) for r in range(16)]
    incident = diagnose(crash, context())
    assert incident.hypotheses[0].subject is None


def test_consequences_alone_leave_the_cause_unknown():
    incident = diagnose(watchdogs(600), context())
    assert incident.verdict is Verdict.UNKNOWN
    assert incident.hypotheses == ()


def test_nothing_wrong_is_no_incident():
    assert diagnose([], context()) is None


def test_order_of_observations_does_not_matter():
    story = [
        *watchdogs(605),
        seen("xid.79", "gpu_hardware", at=5, node="n3", device="0000:18:00"),
        seen("net-link-down", "network", at=-3000, node="n7", device="mlx5_0"),
    ]
    assert diagnose(story, context()) == diagnose(story[::-1], context())


def test_symptoms_after_a_slow_down_do_not_hide_what_came_with_it():
    """A server that stalls and answers again, over and over, while the loader complains later."""
    slower = seen("metric:step time", "framework", at=0, role="symptom", strength=0.2,
                  kind="metric")  # fmt: skip
    server = replace(seen("st-nfs-noresp", "storage", at=-15, node="n1", target="filer"),
                     healed_ns=T + 20 * S)  # fmt: skip
    loader = seen("concept.user code", "application", at=270, role="symptom", strength=0.28,
                  kind="job")  # fmt: skip
    incident = diagnose([slower, server, loader], context(270))
    assert str(incident.hypotheses[0].subject) == "storage:filer"
    assert incident.kind == "slow"


def test_totals_since_boot_are_no_trouble_of_a_job_that_ended_well():
    flaps = replace(seen("metric:link downs", "network", at=0, strength=0.4, kind="metric"),
                    time_ns=None, last_ns=None)  # fmt: skip
    assert diagnose([flaps], context(ended_well=True)) is None
    assert diagnose([flaps], context()) is not None


def test_a_limit_of_the_scheduler_names_the_job_however_it_was_told():
    daemon = seen("sch-time", "scheduler", at=1, kind="scheduler", target="job:661")
    table = seen("sch-state-timeout", "scheduler", at=1, strength=0.9, kind="scheduler")
    (first,) = diagnose([table, daemon], context()).hypotheses
    assert str(first.subject) == "job:661"


def test_the_peer_that_several_nodes_cannot_reach_is_the_subject():
    retries = [
        seen("net-wc12", "network", at=i, role="either", strength=0.7, kind="job", node=f"n{i}",
             device="mlx5_1", target="n9") for i in range(3)
    ]  # fmt: skip
    incident = diagnose(retries, context())
    assert str(incident.hypotheses[0].subject) == "node:n9"
    apart = [replace(o, target=f"n{7 + i}") for i, o in enumerate(retries)]
    named = {str(h.subject) for h in diagnose(apart, context()).hypotheses}
    assert named <= {f"nic:n{i}/mlx5_1" for i in range(3)}


def test_a_full_disk_explains_the_file_that_was_cut_off():
    cut = seen("app-ckpt-corrupt", "storage", at=1, kind="job", rank=5)
    full = seen("app-disk-full", "storage", at=1, kind="job", rank=5)
    incident = diagnose([cut, full], context())
    assert incident.hypotheses[0].component == "app-disk-full"


def test_one_exception_on_every_rank_is_the_jobs_though_a_node_has_an_old_complaint():
    bugs = [
        seen("exception", "application", at=1, role="either", kind="job", rank=r, strength=0.6)
        for r in range(8)
    ]
    old = seen("xid.43", "application", at=-90_000, role="either", node="n1", strength=0.7)
    first = diagnose([*bugs, old], context()).hypotheses[0]
    assert first.subject is None
    assert len(first.evidence_for) > 1


def test_steps_that_go_on_show_that_a_complaint_killed_nobody():
    odd = seen("odd", "framework", at=-900, role="either", kind="job", strength=0.4)
    slow = seen("metric:clock", "gpu_hardware", at=-600, kind="metric", node="n2", device="3")
    incident = diagnose([odd, slow], context())
    assert (incident.kind, incident.hypotheses[0].domain) == ("slow", Domain.GPU_HARDWARE)


def test_a_device_that_computes_wrong_gives_wrong_numbers_though_the_job_was_stopped():
    wrong = seen("num-not-repeated", "gpu_hardware", at=1, kind="job", rank=4)
    wrong = replace(wrong, component="silent corruption")
    stopped = seen("exception", "application", at=2, role="either", kind="job", strength=0.6)
    assert diagnose([wrong, stopped], context()).kind == "numerics"


def test_a_start_up_that_fails_on_the_one_node_set_up_otherwise_is_that_nodes():
    odd = seen("odd-configuration", "host", at=0, role="either", strength=0.55, node="n2")
    odd = replace(odd, time_ns=None, last_ns=None)
    fails = seen(
        "exception", "application", at=1, role="either", strength=0.6, kind="job", node="n2", rank=8
    )
    where = {"nodes": frozenset({"n1", "n2", "n3"})}
    none = Context(progress=Progress(last_ns={}), **where)
    assert diagnose([odd, fails], none).hypotheses[0].domain is Domain.HOST
    # In the middle of a run it is the job's, and so it is where another node fails as well.
    assert diagnose([odd, fails], context(**where)).hypotheses[0].domain is Domain.APPLICATION
    both = [odd, fails, replace(fails, node="n1", rank=0)]
    assert diagnose(both, none).hypotheses[0].domain is Domain.APPLICATION


def test_many_retries_that_began_with_the_slow_down_are_why_and_few_are_not():
    slow = seen("metric:step time", "application", at=-600, role="symptom", kind="metric")
    slow = replace(slow, strength=0.3)
    retries = seen(
        "st-s3", "storage", at=-590, role="symptom", strength=0.2, kind="job", handled=True,
        repeats=40,
    )  # fmt: skip
    retries = replace(retries, last_ns=T)
    incident = diagnose([slow, retries], context())
    assert (incident.kind, incident.hypotheses[0].domain) == ("slow", Domain.STORAGE)
    few = diagnose([slow, replace(retries, repeats=3)], context())
    before = diagnose([slow, replace(retries, time_ns=T - 3000 * S)], context())
    assert [i.hypotheses[:1] for i in (few, before) if i.hypotheses] == []
