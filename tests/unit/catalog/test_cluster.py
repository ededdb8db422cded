"""The cluster file: the shipped example against the published figures, and complaints."""

import pytest

from kansoku.catalog import load_cluster, shipped_clusters
from kansoku.errors import ConfigurationError, KansokuError


def test_sakuraone_h100_is_as_published():
    """100 nodes × 8 GPUs, 2 pods × 8 leaves, 8 spines, 50 NICs a leaf (arXiv 2604.13600)."""
    cluster = load_cluster("sakuraone-h100")
    assert len(cluster.nodes) == 100
    assert sum(node.kind.gpus for node in cluster.nodes) == 800
    assert len(cluster.fabric.leaves) == 16
    assert len(cluster.fabric.spines) == 8
    kind = cluster.nodes[0].kind
    assert [nic.device for nic in kind.fabric_nics] == [
        f"mlx5_{n}" for n in (0, 1, 2, 4, 5, 6, 7, 11)
    ]
    on_leaf = {}
    for node in cluster.nodes:
        for nic in kind.fabric_nics:
            leaf = cluster.leaf_of(node.name, nic).name
            on_leaf[leaf] = on_leaf.get(leaf, 0) + 1
    assert set(on_leaf.values()) == {50}


def test_unknown_values_are_absent_not_zero():
    kind = load_cluster("template-b200").nodes[0].kind
    assert kind.gpus is None
    assert kind.memory_bytes is None


def test_every_shipped_file_loads():
    for name in shipped_clusters():
        assert load_cluster(name).source


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 1\nbogus = 2", "unknown key bogus"),
        ("name = 'x", 'Expected "\'"'),
        ("name='x'\nsource='y'\n[[nodes]]\nnames='a'\nkind='k'\n[node_kind.z]", "kind 'k'"),
        ("name='x'\nsource='y'\n[[nodes]]\nnames='a[1-'\nkind='k'\n[node_kind.k]", "nodes.names"),
        ("name='x'\nsource='y'\nnodes=[]\n[node_kind.k]\ngpu='h999'", "h999"),
    ],
)
def test_complaints_name_key_and_value(tmp_path, text, words):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(KansokuError) as caught:
        load_cluster(path)
    assert words in str(caught.value)


def test_missing_file_names_the_shipped_ones():
    with pytest.raises(ConfigurationError, match="sakuraone-h100"):
        load_cluster("nope.toml")


def test_short_name_of_a_shipped_cluster():
    assert load_cluster("sakuraone") == load_cluster("sakuraone-h100")
    with pytest.raises(ConfigurationError, match="template: no such cluster file"):
        load_cluster("template")  # of two that begin so


WHOLE = """
name = "x"
source = "y"
[[nodes]]
names = "a[1-2]"
kind = "k"
[node_kind.k]
gpu = "h100-sxm"
gpus = 8
memory_gib = 2048
[[node_kind.k.nic]]
device = "mlx5_0"
role = "fabric"
line_rate_gbps = 400
rail = 0
[fabric]
protocol = "rocev2"
rail_optimised = true
oversubscription = 1.5
[[storage]]
name = "s"
kind = "lustre"
bandwidth_gb_per_s = 200
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gpus = 8", "gpus = -8", "node_kind.k: gpus must be a whole number"),
        ("gpus = 8", 'gpus = "eight"', "not 'eight'"),
        ("gpus = 8", "gpus = true", "not True"),
        ("memory_gib = 2048", "memory_gib = 0", "memory_gib must be a number above 0"),
        ("line_rate_gbps = 400", "line_rate_gbps = nan", "line_rate_gbps must be a number above 0"),
        ("line_rate_gbps = 400", "line_rate_gbps = 0", "leave it out"),
        ("oversubscription = 1.5", "oversubscription = -1", "fabric: oversubscription"),
        ("bandwidth_gb_per_s = 200", "bandwidth_gb_per_s = inf", "storage: bandwidth_gb_per_s"),
        ("rail = 0", "rail = -1", "rail must be a whole number of at least 0"),
        ("a[1-2]", "a[1-999999999]", "more than 1,000,000 hosts"),
        ('gpu = "h100-sxm"', "gpu = 100", "gpu must be a name"),
        ('gpu = "h100-sxm"', 'gpu = "tpu"', "node_kind.k: unknown accelerator"),
    ],
)
def test_impossible_numbers_name_file_key_and_value(tmp_path, old, new, words):
    path = tmp_path / "c.toml"
    path.write_text(WHOLE)
    assert load_cluster(path).fabric.oversubscription == 1.5
    path.write_text(WHOLE.replace(old, new))
    with pytest.raises(ConfigurationError) as caught:
        load_cluster(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "docs/cluster-file.md" in str(caught.value)
