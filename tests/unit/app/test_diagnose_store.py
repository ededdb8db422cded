"""The live store diagnosed: events, steps and numbers of one job's nodes and time."""

import json

import polars as pl
import pytest

from kansoku.app.diagnose import diagnose_store
from kansoku.errors import InputError
from kansoku.model import Domain, table_schema
from kansoku.store import LocalStore

S = 1_000_000_000
T = 1_790_000_000 * S


def rows(table, items):
    schema = table_schema(table)
    return pl.DataFrame([dict.fromkeys(schema) | item for item in items], schema=schema)


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path / "store", clock_ns=lambda: T + 3600 * S)
    yield store
    store.close()


def metrics(slow=None):
    items = []
    for minute in range(40):
        for node in range(4):
            for gpu in range(2):
                hot = slow == (node, gpu) and minute > 20
                labels = {"host.name": f"n{node}", "hw.id": str(gpu), "kansoku.gpu.clock": "sm"}
                items.append(
                    {"metric": "kansoku.gpu.clock.frequency", "labels": json.dumps(labels),
                     "time_ns": T + minute * 60 * S, "value": 1.1e9 if hot else 1.98e9}
                )  # fmt: skip
    return rows("metrics", items)


def diagnose(store, **more):
    return diagnose_store(store, since_ns=T, until_ns=T + 2400 * S, **more)


def test_a_healthy_store_is_quiet(store):
    store.append("metrics", metrics())
    assert diagnose(store).incidents == ()


def test_a_gpu_that_clocks_down_stands_out_from_its_peers(store):
    store.append("metrics", metrics(slow=(2, 1)))
    first = diagnose(store).incidents[0].hypotheses[0]
    assert (first.domain, str(first.subject)) == (Domain.GPU_HARDWARE, "gpu:n2/1")


def job(**more):
    return rows("jobs", [{"cluster": "c", "raw_id": 7, "job_id": "7", "submit_ns": T, "start_ns": T,
                          "end_ns": T + 1200 * S, "state": "FAILED", "node_list": "n[0-1]"} | more])  # fmt: skip


def xid(node):
    return rows("events", [{"time_ns": T + 600 * S, "source": "kernel", "subject": f"gpu:{node}/3",
                            "severity": "error", "kind": "xid",
                            "body": "NVRM: Xid (PCI:0000:3a:00): 79, GPU has fallen off the bus."}])  # fmt: skip


def test_a_jobs_own_nodes_count_and_others_do_not(store):
    store.append("jobs", job())
    store.append("events", xid("n3"))
    assert diagnose(store, job="7").incidents == ()
    store.append("events", xid("n1"))
    first = diagnose(store, job="7").incidents[0].hypotheses[0]
    assert (first.domain, str(first.subject)) == (Domain.GPU_HARDWARE, "gpu:n1/3")


def test_a_job_that_the_store_does_not_know_is_said(store):
    with pytest.raises(InputError, match="no job 99"):
        diagnose(store, job="99")


def test_a_leaf_whose_nics_lost_their_link_together_is_named_by_the_cluster_file(store):
    """Pod 1, rail 2 of the shipped SAKURAONE cluster is ``leaf1-2``."""
    lost = [
        {"time_ns": T + 600 * S + node, "source": "kernel", "subject": f"nic:c{node:03d}/mlx5_2",
         "severity": "error", "kind": "link", "body": "mlx5_core 0000:5c:00.0 mlx5_2: Link down"}
        for node in range(1, 6)
    ]  # fmt: skip
    store.append("events", rows("events", lost))
    first = diagnose(store).incidents[0].hypotheses[0]
    assert str(first.subject).startswith("nic:")
    unknown = diagnose(store, cluster="sakuraone-h100").incidents[0].hypotheses[0]
    assert (unknown.domain, str(unknown.subject)) == (Domain.NETWORK, "switch:leaf1-2")
    assert "its own state is unknown" in unknown.evidence_for[0].sentence
    # An agent asks the switch (`kansoku agent --switches`): from the time of the loss on in vain.
    asked = [
        {"metric": "kansoku.switch.reachable", "labels": json.dumps({"kansoku.switch": "leaf1-2"}),
         "time_ns": T + minute * 60 * S, "value": float(minute < 10)}
        for minute in range(30)
    ]  # fmt: skip
    store.append("metrics", rows("metrics", asked))
    known = diagnose(store, cluster="sakuraone-h100").incidents[0].hypotheses[0]
    assert str(known.subject) == "switch:leaf1-2"
    assert "does not answer" in known.evidence_for[0].sentence
    assert known.confidence > unknown.confidence
