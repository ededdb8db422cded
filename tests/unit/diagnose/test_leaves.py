"""NICs that lose their link together under one leaf: the leaf is named, by the cluster file."""

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from kansoku.app.diagnose import diagnose_folder
from kansoku.diagnose.leaves import blame_leaves
from kansoku.diagnose.observation import Observation
from kansoku.errors import ConfigurationError
from kansoku.model import Domain

S = 1_000_000_000
T = 1_790_000_000 * S
CLUSTER = """
name = "lab"
source = "made up"
[node_kind.gpu]
gpu = "h100-sxm"
gpus = 8
[[node_kind.gpu.nic]]
device = "mlx5_0"
role = "fabric"
rail = 0
interface = "ens1f0"
[[node_kind.gpu.nic]]
device = "mlx5_1"
role = "fabric"
rail = 1
interface = "ens2f0"
[[nodes]]
names = "c[1-8]"
kind = "gpu"
pod = "a"
[fabric]
protocol = "roce"
rail_optimised = true
[[fabric.switch]]
names = "leaf[0-1]"
tier = "leaf"
pod = "a"
rails = [0, 1]
"""
LEAF_OF = {
    (f"c{n}", name): (f"leaf{rail}", f"mlx5_{rail}")
    for n in range(1, 9) for rail in range(2) for name in (f"mlx5_{rail}", f"ens{rail + 1}f0")
}  # fmt: skip
NODES = frozenset(f"c{n}" for n in range(1, 9))


def down(node, device, seconds=0):
    return Observation(
        rule="net-link-down", text=f"mlx5_core 0000:5c:00.0 {device}: Link down", source="dmesg:1",
        kind="kernel", domain=Domain.NETWORK, component="link", role="root", strength=0.9,
        meaning="", action="", time_ns=T + seconds * S, node=node, device=device,
    )  # fmt: skip


def named(seen):
    return [(str(o.subject), o.text.split(" NICs")[0]) for o in blame_leaves(seen, LEAF_OF, NODES)
            if o.rule == "leaf.down"]  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "leaves"),
    [
        ([down(f"c{n}", "ens1f0", n) for n in range(1, 8)], [("switch:leaf0", "7 of 8")]),
        ([down(f"c{n}", "mlx5_1") for n in (1, 2, 3, 4, 5)], [("switch:leaf1", "5 of 8")]),
        # Both names of one NIC are one NIC.
        ([down("c1", "ens1f0"), down("c1", "mlx5_0")], []),
        ([down(f"c{n}", "ens1f0") for n in (1, 2)], []),
        # One after the other, an hour each: cables, or people who work on them.
        ([down(f"c{n}", "ens1f0", 3600 * n) for n in range(1, 8)], []),
        # Nodes that lose all their NICs have lost themselves.
        ([down(f"c{n}", d) for n in range(1, 8) for d in ("ens1f0", "ens2f0")], []),
        # Not NICs of the cluster file.
        ([down(f"x{n}", "ens1f0") for n in range(1, 8)], []),
    ],
    ids=["most", "enough", "names", "two", "hours apart", "whole nodes", "strangers"],
)
def test_a_leaf_is_named_where_most_of_its_nics_are_lost_at_once(seen, leaves):
    assert named(seen) == leaves


def test_two_are_enough_where_there_are_no_others():
    seen = [down(f"c{n}", "ens1f0") for n in (1, 2)]
    found = blame_leaves(seen, LEAF_OF, frozenset(("c1", "c2")))
    assert [o.role for o in found] == ["symptom", "symptom", "root"]
    assert str(found[-1].subject) == "switch:leaf0"


def accusation(seen, **more):
    (found,) = [o for o in blame_leaves(seen, LEAF_OF, NODES, **more) if o.rule == "leaf.down"]
    return found


LOST = [down(f"c{n}", "ens1f0", n) for n in range(1, 8)]


def test_a_switch_of_which_nothing_is_known_is_less_sure_than_one_that_is_in_trouble():
    unknown = accusation(LOST)
    assert "its own state is unknown" in unknown.meaning
    answering = accusation(LOST, answers={"leaf0": True})
    assert "which answers" in answering.meaning
    silent = accusation(LOST, answers={"leaf0": False})
    assert "does not answer" in silent.meaning
    assert answering.strength < unknown.strength < silent.strength


@pytest.mark.parametrize(
    ("at", "words"), [(-60, "tells of trouble itself"), (-7200, "its own state is unknown")]
)
def test_what_the_switch_itself_said_counts_where_it_was_said_then(at, words):
    own = replace(
        down("leaf0", None, at), rule="concept.power", text="leaf0 power supply failed",
        component="power",
    )  # fmt: skip
    assert words in accusation([*LOST, own]).meaning


def test_of_states_without_a_time_it_is_not_said_that_they_were_lost_together():
    undated = [replace(one, time_ns=None, last_ns=None) for one in LOST]
    text = accusation(undated).text
    assert "without a link" in text
    assert "together" not in text


@pytest.fixture
def bundle(tmp_path):
    """Write the kernel logs of eight nodes, of which six lose the link of rail 0, and a job's log."""
    folder = tmp_path / "bundle"
    folder.mkdir()

    def stamp(seconds):
        return datetime.fromtimestamp(T / 1e9 + seconds, UTC).isoformat(timespec="seconds")

    for n in range(1, 9):
        lines = [f"{stamp(-900)} c{n} kernel: mlx5_core 0000:5c:00.0 ens1f0: Link up"]
        if n > 2:
            lines += [f"{stamp(n / 10)} c{n} kernel: mlx5_core 0000:5c:00.0 ens1f0: Link down"]
        (folder / f"dmesg-c{n}.log").write_text("\n".join([*lines, ""]))
    rows = [f"{stamp(-600 + 2 * i)} step {i} loss 2.5 time 2.0 s" for i in range(300)]
    wrong = (
        "c3: [rank16] NCCL WARN NET/IB : Got completion from peer 10.0.0.4 with status=12 opcode=0 "
        "len=0 vendor err 129 (Recv)"
    )
    rows.append(f"{stamp(90)} {wrong}")
    (folder / "train.log").write_text("\n".join([*rows, ""]))
    return folder


def subjects(folder, **more):
    (incident,) = diagnose_folder(folder, **more).incidents
    return [str(h.subject) for h in incident.hypotheses]


def test_without_the_cluster_file_the_nics_are_named(bundle):
    assert all(s.startswith("nic:") for s in subjects(bundle)[:3])


def test_with_the_cluster_file_in_the_folder_the_switch_is(bundle):
    (bundle / "lab.toml").write_text(CLUSTER)
    assert subjects(bundle)[0] == "switch:leaf0"


def test_the_cluster_file_may_be_named(bundle, tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text(CLUSTER)
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "diagnose", str(bundle), "--cluster", str(file), "--json"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    first = json.loads(done.stdout)["incidents"][0]["hypotheses"][0]
    assert (first["subject"], first["domain"]) == ("switch:leaf0", "network")
    with pytest.raises(ConfigurationError, match="nowhere"):
        diagnose_folder(bundle, cluster="nowhere")
