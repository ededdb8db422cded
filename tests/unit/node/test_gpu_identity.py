"""Which GPU a rank has: CUDA's own rules, and Slurm's two ways to count."""

import pytest

from kansoku.node.gpu_identity import gpu_of_rank

UUIDS = {"GPU-12ab-0": "gpu4", "GPU-12cd-0": "gpu6"}


@pytest.mark.parametrize(
    ("local_rank", "visible", "device"),
    [
        (3, None, "gpu3"),
        (1, "2,3", "gpu3"),
        (1, " 6 , 7 ", "gpu7"),
        (5, "2", "gpu2"),  # one GPU a task: each rank sees its own as the first
        (0, "GPU-12cd-0", "gpu6"),
        (1, "GPU-12cd,GPU-12ab", "gpu4"),  # CUDA takes abbreviations
    ],
)
def test_inside_the_job(local_rank, visible, device):
    said = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible, "SLURM_JOB_GPUS": "5,6"}
    assert gpu_of_rank(local_rank, said, uuids=UUIDS) == (device, None)


@pytest.mark.parametrize(
    ("local_rank", "visible", "why"),
    [
        (0, "GPU-12", "not among"),  # fits both
        (0, "GPU-99", "not among"),
        (0, "MIG-5", "MIG"),
        (2, "0,1", "none of the 2 GPUs"),
        (0, "", "empty"),
        (0, "NoDevFiles", "names no GPU"),
    ],
)
def test_what_is_not_known_is_said(local_rank, visible, why):
    device, note = gpu_of_rank(local_rank, {"CUDA_VISIBLE_DEVICES": visible}, uuids=UUIDS)
    assert device is None
    assert why in note


@pytest.mark.parametrize(
    ("local_rank", "visible", "allotted", "device"),
    [
        (1, "0,1", "6-7", "gpu7"),  # confined: CUDA counts the allotted ones
        (1, "6,7", "6,7", "gpu7"),  # not confined: CUDA counts the node's
        (0, "1", "0,1", "gpu1"),  # both are the same
        (1, None, "4,5", "gpu5"),
        (0, "3", "6,7", "gpu3"),  # a user's own choice beside Slurm's
        (0, "2", "odd", "gpu2"),
    ],
)
def test_from_outside_slurms_numbers_count(local_rank, visible, allotted, device):
    said = {"SLURM_STEP_GPUS": allotted, "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7"}
    if visible is not None:
        said["CUDA_VISIBLE_DEVICES"] = visible
    assert gpu_of_rank(local_rank, said, uuids={}, whole_node=True) == (device, None)


def test_a_number_with_two_meanings_is_refused():
    said = {"SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1"}
    device, note = gpu_of_rank(0, said, uuids={}, whole_node=True)
    assert device is None
    assert "two meanings" in note
