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


# What a healthy job may say of its speed, in every line of a step.
FINE = [
    "step time 180 ms (below the target of 200 ms)",
    "tokens/s 1200 - never below the baseline 1000",
    "mfu 0.41 (warn below 0.3, expected 0.4)",
    "throughput 1200 tokens/s (alert below 900, target 1000)",
    "throughput 1200 tokens/s, no lower than the baseline",
    "samples/s 310 isn't below the usual 300",
    "tps 1200, step time 180 ms: below the target of 200 ms",
    "tokens/s 1200 loss 2.1 below the target 2.5",
    "step time 180 ms, throughput 1200 above the target of 1000",
    "step time 180 ms accuracy 0.76 above the target 0.75",
    "iteration time 0.18 s, no longer than the usual 0.2 s",
    "step_time 0.18 warn if above the expected 0.3",
    "(alerts if throughput is below the reference)",
]
TOLD = [
    SLOW.partition("WARNING - ")[2],
    "throughput 128 is lower than expected",
    "tokens/s/GPU 128, slower than the baseline of 702",
    "mfu 0.11 (below the target of 0.4)",
    "step time 912 ms is above the usual 180 ms",
    "step_time 0.91 s: slower than the reference",
    "iteration time 0.91 s, longer than expected (0.18 s)",
]


@pytest.mark.parametrize("words", FINE)
def test_a_job_that_says_that_it_is_fast_enough_has_no_incident(tmp_path, words):
    body = [
        f"2026-03-04 05:00:{i:02d},000 {level} step {i} loss {2.5 - i / 100:.2f} {words}"
        for level in ("INFO", "WARNING") for i in range(20)
    ]  # fmt: skip
    for name, lines in (("a.log", body[:20]), ("b.log", body[20:])):
        (folder := tmp_path / name).mkdir()
        (folder / "train.log").write_text("\n".join([*lines, ""]))
        told = [o for i in diagnose_folder(folder).incidents for o in i.hypotheses]
        assert (name, told) == (name, [])


@pytest.mark.parametrize("words", TOLD)
def test_a_job_that_says_that_it_is_slow_is_slow(tmp_path, words):
    lines = steps(1200)
    said = f"2026-03-04 05:15:00,500 - WARNING - {words}"
    (tmp_path / "train.log").write_text("\n".join([*lines[:900], said, *lines[900:], ""]))
    assert [i.kind for i in diagnose_folder(tmp_path).incidents] == ["slow"]
