"""Clocks, zones, nodes and plans that files of a bundle tell of each other."""

import json
from datetime import UTC, datetime

import polars as pl
import pytest

from kansoku.app.diagnose import diagnose_folder
from kansoku.diagnose.device_text import compare_facts, facts_of_text
from kansoku.diagnose.edge.background import (
    allocated_nodes,
    boot_times,
    library_facts,
    nodes_of_ranks,
    planned_step,
    zone_minutes,
)
from kansoku.diagnose.measures import MEASURE_COLUMNS, against_plan


def unix_ns(*moment):
    return int(datetime(*moment, tzinfo=UTC).timestamp()) * 10**9


def test_a_named_zone_goes_before_the_z_of_services(tmp_path):
    (tmp_path / "events.txt").write_text("2026-05-16T22:58:36Z Preempted\n")
    (tmp_path / "README").write_text("collected 2026-05-17, time zone Asia/Tokyo\n")
    assert zone_minutes([(p, p.name) for p in sorted(tmp_path.iterdir())][1:]) == 0
    assert zone_minutes([(p, p.name) for p in tmp_path.iterdir()]) == 9 * 60


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("uptime-s.txt", "2026-03-01 09:00:00\n"),
        ("who-b.txt", "         system boot  2026-03-01 09:00\n"),
        ("proc-stat", f"cpu 1 2 3\nbtime {unix_ns(2026, 3, 1, 0) // 10**9}\n"),
    ],
)
def test_boot_times(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert boot_times([(tmp_path / name, name, "n1")], 540) == {"n1": unix_ns(2026, 3, 1, 0)}


def test_the_controllers_log_gives_the_nodes_of_the_bundles_job():
    log = (
        "[t] sched: Allocate JobId=71 NodeList=n[01-02] #CPUs=8\n"
        "[t] sched: Allocate JobId=72 NodeList=n03 #CPUs=8\n"
    )
    assert allocated_nodes(log, ["slurm-71.out"]) == {"n01", "n02"}
    assert allocated_nodes(log, ["train.log"]) == set()


def test_nccl_names_the_node_of_every_rank_and_its_version():
    head = "".join(
        f"n{r // 2}:4{r}:9 [{r % 2}] NCCL INFO comm 0x1 rank {r} nranks 4 cudaDev 0\n"
        for r in range(4)
    )
    assert nodes_of_ranks(head) == {4: {0: "n0", 1: "n0", 2: "n1", 3: "n1"}}
    (fact,) = library_facts("n0:41:41 [0] NCCL INFO NCCL version 2.21.5+cuda12.4\n", "log")
    assert (fact.node, fact.value) == ("n0", "2.21.5+cuda12.4")


@pytest.mark.parametrize(
    ("usual", "odd", "word"),
    [
        ("max locked memory       (kbytes, -l) unlimited", "max locked memory (kbytes, -l) 64",
         "locked"),
        ("tmpfs  756G  1.1M  756G   1% /dev/shm", "tmpfs   64M     0   64M   0% /dev/shm", "shm"),
        ("BOOT_IMAGE=/vmlinuz iommu=pt quiet", "BOOT_IMAGE=/vmlinuz iommu=on quiet", "iommu"),
        ("driver version: 550.54.15", "driver version: 535.129.03", "driver"),
        ("4: eth2: <UP> mtu 9000 qdisc mq", "4: eth2: <UP> mtu 1500 qdisc mq", "mtu"),
        ("\t\tACSCtl: SrcValid- TransBlk-", "\t\tACSCtl: SrcValid+ TransBlk-", "acs"),
        ("GID[  3]: fe80::1, RoCE v2", "GID[  3]: fe80::1, IB/RoCE v1", "gid"),
    ],
)  # fmt: skip
def test_the_node_whose_configuration_differs(usual, odd, word):
    facts = []
    for number in range(5):
        text = odd if number == 3 else usual
        facts += facts_of_text([text], node=f"n{number}", name="facts")
    (seen,) = [o for o in compare_facts(facts) if o.rule == "odd-configuration"]
    assert seen.node == "n3"
    assert word in seen.text.lower()
    (pair,) = [o for o in compare_facts([f for f in facts if f.node in {"n0", "n3"}])
               if o.rule == "odd-configuration"]  # fmt: skip
    assert pair.node is None
    assert "n0" in pair.text
    assert "n3" in pair.text


def test_a_plan_in_the_folder_is_what_slow_is_measured_by(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": "kansoku.plan/1", "step_s": 2.0}))
    assert planned_step(plan) == 2.0
    lines = [f"2026-03-04 05:{n:02d}:00 iteration {n} | time: 3.00 s" for n in range(40)]
    (tmp_path / "job.log").write_text("\n".join(lines))
    answer = diagnose_folder(tmp_path)
    (incident,) = answer.incidents
    assert (incident.kind, incident.hypotheses) == ("slow", ())


@pytest.mark.parametrize(("seconds", "told"), [(2.5, 0), (2.7, 1)])
def test_steps_a_third_over_the_plan_are_slow(seconds, told):
    row = dict.fromkeys(MEASURE_COLUMNS) | {"metric": "step time s", "value": seconds}
    assert len(against_plan(pl.DataFrame([row] * 9, schema=MEASURE_COLUMNS), 2.0)) == told
