"""What libraries say of how they were set up: a cause of slow jobs, and no trouble of its own."""

import pytest

from kansoku.app.diagnose import diagnose_folder
from kansoku.model import Domain

# NCCL 2.21 on nodes without RDMA, with NCCL_DEBUG=INFO; its lines bear no date.
REMARKS = [
    "{node}:4711:4920 [0] NCCL INFO Failed to open libibverbs.so[.1]",
    "{node}:4711:4920 [0] NCCL INFO NET/IB : No device found.",
    "{node}:4711:4920 [0] NCCL INFO Using network Socket",
]
SLOW = (
    "2026-03-04 05:15:00,500 - WARNING - throughput 128 tokens/s/GPU is far below the reference "
    "702 for this configuration"
)


def steps(count, *, dated=True):
    return [
        f"{f'2026-03-04 05:{i // 60:02d}:{i % 60:02d},000 - INFO - ' if dated else ''}"
        f"step {i} loss 2.5 time 1.0 s"
        for i in range(count)
    ]


def told(remark):
    return [remark.format(node=f"node0{n}") for n in (1, 2)]


@pytest.mark.parametrize("remark", REMARKS)
@pytest.mark.parametrize("dated", [True, False], ids=["dated", "undated"])
@pytest.mark.parametrize("where", ["head", "middle", "end", "own file"])
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "runs"])
def test_a_healthy_job_that_cannot_open_rdma_has_no_cause(tmp_path, remark, dated, where, ended):
    lines, said = steps(1200, dated=dated), told(remark)
    body = {
        "head": [*said, *lines], "middle": [*lines[:600], *said, *lines[600:]],
        "end": [*lines, *said], "own file": lines,
    }[where]  # fmt: skip
    if ended:
        body.append("training done")
    (tmp_path / "train.log").write_text("\n".join([*body, ""]))
    if where == "own file":
        (tmp_path / "stderr.log").write_text("\n".join([*said, ""]))
    assert diagnose_folder(tmp_path).incidents == ()


@pytest.mark.parametrize("remark", REMARKS)
def test_the_same_words_are_the_cause_where_the_job_says_that_it_is_slow(tmp_path, remark):
    lines = steps(1200)
    body = [*told(remark)[:1], *lines[:900], SLOW, *lines[900:], ""]
    (tmp_path / "train.log").write_text("\n".join(body))
    (incident,) = diagnose_folder(tmp_path).incidents
    assert incident.kind == "slow"
    assert incident.hypotheses[0].domain is Domain.NETWORK


def test_the_same_words_are_the_cause_where_the_job_fails_at_its_start(tmp_path):
    died = (
        "2026-03-04 05:00:02,000 - ERROR - torch.distributed.DistBackendError: NCCL error in "
        "ProcessGroupNCCL.cpp:2251, unhandled system error"
    )
    body = [*told(REMARKS[1]), died, ""]
    (tmp_path / "train.log").write_text("\n".join(body))
    (incident,) = diagnose_folder(tmp_path).incidents
    assert (incident.kind, incident.hypotheses[0].domain) == ("stop", Domain.NETWORK)


def test_what_a_job_got_over_is_no_incident_where_nothing_else_is_wrong(tmp_path):
    """On two nodes each: neither is more likely than the other, and the job goes on."""
    lines = steps(1200)
    said = [f"node0{n}: mlx5_core 0000:5c:00.0 ens1f{n}: Link down" for n in (1, 2)]
    (tmp_path / "train.log").write_text("\n".join([*lines[:300], *said, *lines[300:], ""]))
    assert diagnose_folder(tmp_path).incidents == ()
