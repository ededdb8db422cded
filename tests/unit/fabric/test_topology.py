"""A cluster file as arrays: who hangs where, and what contradicts itself."""

import pytest

from kansoku.catalog import load_cluster
from kansoku.errors import ConfigurationError
from kansoku.fabric.topology import topology_of

TEXT = """
name = "mini"
source = "test"
[node_kind.gpu]
[[node_kind.gpu.nic]]
device = "mlx5_0"
role = "fabric"
[[nodes]]
names = "a[1-2]"
kind = "gpu"
pod = "p0"
[[nodes]]
names = "b[1-2]"
kind = "gpu"
pod = "p1"
[fabric]
protocol = "rocev2"
rail_optimised = false
[[fabric.switch]]
names = "leaf0"
tier = "leaf"
pod = "p0"
[[fabric.switch]]
names = "leaf1"
tier = "leaf"
pod = "p1"
[[fabric.switch]]
names = "spine[0-1]"
tier = "spine"
"""


def read(folder, text):
    path = folder / "cluster.toml"
    path.write_text(text)
    return topology_of(load_cluster(path))


def test_each_nic_hangs_on_the_leaf_of_its_pod(tmp_path):
    made = read(tmp_path, TEXT)
    assert made.rnics == ("a1/mlx5_0", "a2/mlx5_0", "b1/mlx5_0", "b2/mlx5_0")
    assert made.rnic_tor.tolist() == [0, 0, 1, 1]
    assert made.parallel_paths == 2


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('"leaf1"', '"leaf0"', "switch leaf0 is listed twice"),
        ('"spine[0-1]"', '"leaf1"', "switch leaf1 is listed twice"),
        ('"spine"', '"core"', "switch spine0: tier 'core' is not leaf or spine"),
        ("false", '"maybe"', "rail_optimised = 'maybe' is not true or false"),
        ('names = "leaf1"\ntier = "leaf"\npod = "p1"', 'names = "leaf1"\ntier = "leaf"\npod = "p0"',
         "two leaves serve pod p0"),
        ('role = "fabric"', 'role = "storage"', "nothing to probe"),
        ('kind = "gpu"\npod = "p0"', 'kind = "gpu"\npod = ["p0"]', "node a1: pod"),
        ('role = "fabric"', ('role = "fabric"\n[[node_kind.gpu.nic]]\ndevice = "mlx5_0"\n'
         'role = "fabric"'), "a1/mlx5_0 is listed twice"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused(tmp_path, before, after, says):
    assert before in TEXT
    with pytest.raises(ConfigurationError, match=says):
        read(tmp_path, TEXT.replace(before, after, 1))
