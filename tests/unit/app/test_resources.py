"""Places of ranks, the report's section, and sampling that never harms the job."""

import os
from dataclasses import replace

import polars as pl
import pytest

from kansoku.app.resources import (
    SAMPLES_SCHEMA,
    attach_resources,
    places_of,
    resources_answer,
    resources_blocks,
    run_samples,
    watched_resources,
)
from kansoku.catalog import load_cluster
from kansoku.model import RankFacts, RunFacts, table_schema
from kansoku.view import Table

S = 1_000_000_000
T0 = 1_800_000_000 * S


def rank(number, node, device="NVIDIA H100 80GB HBM3"):
    return RankFacts(
        rank=number, local_rank=number % 8, world_size=16, node=node, pid=1, device=device,
        torch_version=None, python_version=None, parameters=None,
    )  # fmt: skip


def facts(*ranks):
    return RunFacts(
        run="r", command=("x",), start_ns=T0, end_ns=None, exit_code=None, slurm_job=None,
        nodes=("c001",), ranks=tuple(ranks),
    )  # fmt: skip


def test_places_follow_the_cluster_file():
    """SAKURAONE: the NIC of GPU 3 is mlx5_4, of GPU 7 mlx5_11."""
    ranks = facts(*(rank(n, "c001") for n in range(8)))
    found = places_of(ranks, cluster=load_cluster("sakuraone-h100"))
    assert (found[3].gpu, found[3].nics, found[3].share) == ("gpu3", ("mlx5_4",), 1 / 8)
    assert found[7].nics == ("mlx5_11",)
    assert places_of(ranks)[3].nics is None


def test_a_cpu_rank_has_no_gpu():
    assert places_of(facts(rank(0, "n", device="cpu")))[0].gpu is None


def test_ranks_on_one_gpu_share_it():
    found = places_of(facts(rank(0, "a"), rank(8, "a"), rank(1, "a"), rank(16, "b")))
    assert {r: (p.gpu, p.gpu_share) for r, p in found.items()} == {
        0: ("gpu0", 0.5), 8: ("gpu0", 0.5), 1: ("gpu1", 1.0), 16: ("gpu0", 1.0),
    }  # fmt: skip


def test_a_rank_has_the_gpu_and_the_nic_that_its_environment_names():
    """Of the visible 6,7 local rank 1 has GPU 7, whose NIC is mlx5_11 on SAKURAONE."""
    said = {"CUDA_VISIBLE_DEVICES": "6,7"}
    ranks = facts(*(replace(rank(n, "c001"), extra=said) for n in range(2)))
    found = places_of(ranks, cluster=load_cluster("sakuraone-h100"))
    assert [found[n].gpu for n in range(2)] == ["gpu6", "gpu7"]
    assert found[1].nics == ("mlx5_11",)
    (lost,) = places_of(
        facts(replace(rank(0, "n"), extra={"CUDA_VISIBLE_DEVICES": "MIG-1"}))
    ).values()
    assert lost.gpu is None
    assert "MIG" in lost.note


def test_a_rank_seen_from_outside_is_on_a_gpu_where_there_are_some():
    seen = replace(rank(1, "n"), device=None, recorder="attach")
    assert places_of(facts(seen), uuids={"n": {"GPU-a": "gpu0"}})[1].gpu == "gpu1"
    assert places_of(facts(seen))[1].gpu is None
    inside = replace(seen, recorder="in_process")
    assert places_of(facts(inside), uuids={"n": {"GPU-a": "gpu0"}})[1].gpu is None


@pytest.fixture
def use():
    samples = pl.DataFrame(
        [("c001", "gpu0", "energy_j", T0 + i * S // 10, 50.0 * i) for i in range(21)],
        schema=SAMPLES_SCHEMA,
        orient="row",
    )
    steps = pl.DataFrame(
        [{"rank": 0, "step": 1, "start_ns": T0, "duration_ns": S, "tokens": 1000.0}],
        schema=table_schema("steps"),
    )
    spans = pl.DataFrame(
        [{"rank": 0, "kind": "forward", "start_ns": T0, "duration_ns": S // 4, "thread": 1}],
        schema=table_schema("spans"),
    )
    return attach_resources(steps, spans, samples, facts=facts(rank(0, "c001")))


def test_the_answer_and_the_table(use):
    """500 W for one second, a quarter of it in forward."""
    answer = resources_answer(use)
    assert answer["energy_j"] == pytest.approx(500)
    assert answer["energy_per_token_j"] == pytest.approx(0.5)
    assert answer["sampling_ms"] == 100
    joules = {p["phase"]: p["energy_j"] for p in answer["phases"]}
    assert joules == pytest.approx({"forward": 125, "other": 375})
    assert sum(joules.values()) == pytest.approx(answer["energy_j"])
    (table,) = [b for b in resources_blocks(use) if isinstance(b, Table)]
    assert [row[0] for row in table.rows] == ["forward", "other"]
    assert use.steps["energy_j"].to_list() == pytest.approx([500])


def test_sampling_writes_beside_the_run_and_reads_back(tmp_path, monkeypatch):
    monkeypatch.setenv("KANSOKU_SAMPLING_MS", "10")
    with watched_resources(tmp_path / "n", "n"):
        pass
    found = run_samples(tmp_path)
    assert set(found["node"]) <= {"n"}


def test_sampling_notes_who_else_is_on_the_node(tmp_path, monkeypatch):
    monkeypatch.setenv("KANSOKU_SAMPLING_MS", "10")
    with watched_resources(tmp_path / "n", "n", rings=tmp_path / "rings" / "own"):
        pass
    seen = run_samples(tmp_path).filter(pl.col("quantity") == "other_ranks")
    assert set(seen.filter(pl.col("device") == "node")["value"]) == {0.0}


@pytest.mark.parametrize("damage", ["cut", "pipe", "columns"])
def test_damaged_samples_are_said_and_the_others_read(tmp_path, damage):
    good = pl.DataFrame({name: [None] for name in SAMPLES_SCHEMA}, schema=SAMPLES_SCHEMA)
    good.write_parquet(tmp_path / "resources-00000.parquet")
    bad = tmp_path / "resources-00001.parquet"
    if damage == "pipe":
        os.mkfifo(bad)
    elif damage == "cut":
        bad.write_bytes((tmp_path / "resources-00000.parquet").read_bytes()[:-9])
    else:
        pl.DataFrame({"node": ["n"]}).write_parquet(bad)
    missing: list[str] = []
    assert len(run_samples(tmp_path, missing)) == 1
    (said,) = missing
    assert said.startswith("resources-00001.parquet cannot be read")


@pytest.mark.parametrize("setting", ["0", "nonsense"])
def test_off_or_wrong_settings_cost_samples_only(tmp_path, monkeypatch, setting):
    monkeypatch.setenv("KANSOKU_SAMPLING_MS", setting)
    with watched_resources(tmp_path / "n", "n"):
        pass
    assert run_samples(tmp_path).is_empty()


def test_an_error_of_the_job_passes_through(tmp_path):
    with pytest.raises(RuntimeError, match="of the job"), watched_resources(tmp_path / "n", "n"):
        raise RuntimeError("of the job")
