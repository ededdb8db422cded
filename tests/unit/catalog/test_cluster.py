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
