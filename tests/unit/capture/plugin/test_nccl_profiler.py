"""The NCCL plugin against a replay of its interface: a ring that the reader knows."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from kansoku.capture.plugin import BuildError, build_plugin
from kansoku.formats.run_directory import read_run

REPLAY = Path(__file__).parents[3] / "labs" / "nccl_replay.py"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    if not any(shutil.which(c) for c in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler on PATH")
    return build_plugin(str(tmp_path_factory.mktemp("plugin")))


def replay(plugin, case, folder, **more):
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("KANSOKU_", "SLURM_"))},
        "KANSOKU_RING_DIR": str(folder), "KANSOKU_RUN_ID": "job", "RANK": "5", "LOCAL_RANK": "1",
        "WORLD_SIZE": "8", "KANSOKU_NODE": "n1", **more,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(REPLAY), plugin, case],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -9), done.stderr
    return done


def test_a_life_of_two_communicators(plugin, tmp_path):
    assert replay(plugin, "life", tmp_path).returncode == -9
    data = read_run(tmp_path / "job-nccl")
    (facts,) = data.facts.ranks
    assert (facts.rank, facts.local_rank, facts.world_size, facts.node) == (5, 1, 8, "n1")
    assert facts.recorder == "nccl_profiler"
    assert [(g.name, g.description) for g in facts.groups] == [
        ("0000000000abcdef", "world"),
        ("0000000000000007", "abc"),
    ]
    rows = data.spans.select("name", "group", "sequence", "bytes", "dtype").rows()
    world = "0000000000abcdef"
    assert rows == [
        ("all_reduce", world, 0, 4000, "float32"),
        ("all_gather", world, 1, 10 * 2 * 4, "bfloat16"),
        ("reduce_scatter", world, 2, 8 * 4 * 4, "float32"),
        ("send", world, 0, 12, "bfloat16"),
        ("send", world, 1, 12, "bfloat16"),
        ("recv", world, 0, 12, "bfloat16"),
        ("broadcast", "0000000000000007", 0, 12, "float32"),
    ]
    durations = data.spans["duration_ns"].to_list()
    assert all(duration >= 0 for duration in durations[:-1])
    assert durations[-1] is None  # what it was in when it was killed
    # 9,500 - 5,000 and so on: by the device's own timer; the third's end was never told.
    assert data.resources["device_ns"].to_list() == [4500, 700, 40, 40, 40]
    assert "no_times" in data.spans["attributes"][2]
    assert "no_times" not in data.spans["attributes"][0]
    assert data.counters.filter(pl.col("kind") == "collective").row(0)[2:] == (
        6,
        4000 + 80 + 128 + 36,
    )


def test_more_than_there_is_room_for_is_counted(plugin, tmp_path):
    replay(plugin, "many", tmp_path, KANSOKU_RING_BYTES=str(300_000))
    (ring,) = (tmp_path / "job-nccl").glob("*.ring")
    assert ring.stat().st_size == 300_000
    capacity = (300_000 - 4096 - 2 * 65_536) // 128
    data = read_run(tmp_path / "job-nccl")
    assert len(data.spans) == capacity
    # 5,000 asked for, 4,096 handles; of those that had one, the overwritten ones are counted too.
    lost = 5000 - 4096 + 4096 - capacity
    assert f"rank 5: {lost} records could not be written" in data.missing


@pytest.mark.parametrize(
    "more",
    [{"KANSOKU_DISABLE": "1"}, {"KANSOKU_RING_DIR": "/proc/nowhere"}],
    ids=["off", "no room"],
)
def test_without_a_ring_nccl_is_left_alone(plugin, tmp_path, more):
    replay(plugin, "life", tmp_path, **more)
    assert list(tmp_path.glob("**/*.ring")) == []


def test_no_compiler_is_said(tmp_path):
    with pytest.raises(BuildError, match="no-such-cc"):
        build_plugin(str(tmp_path), compiler="no-such-cc")
