"""Which ranks compute with the same data: meshes over a process group that only pretends."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from kansoku.capture.payload import split


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def model():
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def test_plain_parameters_are_split_over_nobody():
    assert split.find_split(model()).ranks == 1


def test_a_tensor_parallel_axis_is_one():
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    parallel = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel()})
    assert split.find_split(parallel).ranks == 4
    fully_shard(parallel, mesh=mesh["dp"])
    assert split.find_split(parallel).ranks == 4


def test_fsdp_alone_is_none_named_or_not():
    whole = fully_shard(model())
    assert split.find_split(whole).ranks == 1
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    assert split.find_split(fully_shard(model(), mesh=mesh)).ranks == 1


def test_expert_parallelism_over_ranks_of_other_data_is_none():
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("rest", "ep"))
    made = model()
    experts = distribute_tensor(torch.randn(4, 16, 16), mesh["ep"], [Shard(0)])
    made.register_parameter("experts", nn.Parameter(experts))
    data = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    for part in made:
        fully_shard(part, mesh=data)
    assert split.find_split(made).ranks == 1
