"""Hangs from what NCCL says itself: RAS reports as its user guide shows them, debug logs."""

import gc
import json
import os

import pytest

from kansoku.app.trace_hang import hang, hang_json
from kansoku.errors import InputError

HEAD = """NCCL version 2.26.2 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {error}

Errors
======

{errors}
Warnings
========

{warnings}
"""
BEHIND = """#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  6 ranks have launched up to operation 6649
""" + "".join(
    f"  Rank {rank} -- GPU {rank} managed by process {483072 + rank} on node 172.16.64.210\n"
    for rank in (0, 2, 3, 4, 5, 7)
)
ONE_BEHIND = """#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  31 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1
"""
DEAD = """DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

"""


def report(path, *, error="MISMATCH", errors="", warnings=""):
    path.write_text(HEAD.format(error=error, errors=errors, warnings=warnings))
    return path


def test_ranks_behind_in_a_text_report(tmp_path):
    answer = hang_json(hang([report(tmp_path / "ras.txt", warnings=BEHIND)]))
    assert answer["verdict"] == "missing_ranks"
    assert answer["culprits"] == [0, 2, 3, 4, 5, 7]
    assert answer["ranks_read"] == 32
    assert answer["groups"][0]["sequence"] == 6650


def test_one_rank_behind_by_type(tmp_path):
    answer = hang_json(hang([report(tmp_path / "ras.txt", warnings=ONE_BEHIND)]))
    assert answer["culprits"] == [7]


def test_a_dead_rank_in_a_text_report(tmp_path):
    answer = hang_json(hang([report(tmp_path / "ras.txt", error="INCOMPLETE", errors=DEAD)]))
    assert (answer["verdict"], answer["culprits"]) == ("missing_ranks", [21])


def ras_json(*counts, missing=(), name="0xae94", size=None):
    """One communicator; counts by rank."""
    return {
        "nccl_version": "2.29.1",
        "communicators_count": 1,
        "communicators": [communicator(*counts, missing=missing, name=name, size=size)],
    }


def communicator(*counts, missing=(), name="0xae94", size=None, processes=None):
    processes = processes or list(range(len(counts) + len(missing)))
    where = [
        {"rank": r, "host": f"n{p // 8}", "pid": 100 + p, "cuda_dev": p % 8, "nvml_dev": p % 8}
        for r, p in enumerate(processes)
    ]
    present = [r for r in range(len(where)) if r not in missing]
    return {
        "hash": name,
        "secondary_hash": "0x1:0x2",
        "size": size or len(where),
        "ranks": [
            where[r]
            | {
                "status": {"init_state": 0, "async_error": 0, "abort_flag": False},
                "collective_counts": {"AllReduce": count, "Broadcast": 2},
            }
            for r, count in zip(present, counts, strict=True)
        ],
        "missing_ranks": [
            where[r] | {"status": {"unresponsive": True, "considered_dead": False}} for r in missing
        ],
    }


def write(path, document):
    path.write_text(json.dumps(document))
    return path


def test_ranks_behind_in_json(tmp_path):
    answer = hang_json(hang([write(tmp_path / "ras.json", ras_json(9, 9, 8, 9, 8, 9))]))
    assert (answer["verdict"], answer["culprits"]) == ("missing_ranks", [2, 4])


def test_a_rank_that_does_not_answer(tmp_path):
    answer = hang_json(hang([write(tmp_path / "ras.json", ras_json(5, 5, 5, missing=[1]))]))
    assert (answer["verdict"], answer["culprits"]) == ("missing_ranks", [1])
    assert any("did not answer" in line for line in answer["evidence"])


def test_a_small_group_is_joined_to_the_job_by_its_processes(tmp_path):
    document = ras_json(7, 7, 7, 7)
    document["communicators"].append(
        communicator(3, 2, name="0xbb", processes=[1, 3])  # its rank 1 is rank 3 of the job
    )
    answer = hang_json(hang([write(tmp_path / "ras.json", document)]))
    assert (answer["verdict"], answer["culprits"]) == ("missing_ranks", [3])


def test_equal_counts_do_not_tell(tmp_path):
    answer = hang_json(hang([write(tmp_path / "ras.json", ras_json(7, 7, 7))]))
    assert (answer["verdict"], answer["culprits"]) == ("unknown", [])


def test_counts_that_advance_are_no_hang(tmp_path):
    first = write(tmp_path / "a.json", ras_json(9, 9, 8))
    last = write(tmp_path / "b.json", ras_json(20, 20, 19))
    os.utime(first, (1, 1))
    answer = hang_json(hang([last, first]))
    assert (answer["verdict"], answer["culprits"]) == ("none", [])


def test_counts_that_stand_still_are_one(tmp_path):
    paths = [write(tmp_path / f"{n}.json", ras_json(9, 9, 8)) for n in "ab"]
    assert hang(paths).verdict.culprits == (2,)


@pytest.mark.parametrize("cut", [30, 200, 700])
def test_a_report_that_is_cut_off_is_an_error_that_names_it(tmp_path, cut):
    path = tmp_path / "ras.json"
    path.write_text(json.dumps(ras_json(1, 2, 3))[:cut])
    with pytest.raises(InputError, match=r"ras\.json"):
        hang([path])


def test_a_cut_report_beside_a_whole_one_is_evidence(tmp_path):
    write(tmp_path / "ras1.json", ras_json(9, 9, 8, 9))
    (tmp_path / "ras2.json").write_text(json.dumps(ras_json(9, 9, 8, 9))[:200])
    answer = hang_json(hang([tmp_path]))
    assert (answer["verdict"], answer["culprits"]) == ("missing_ranks", [2])
    assert any("ras2.json" in line for line in answer["evidence"])


def log(rank, launches, *, size=4):
    """A process's debug log, after NCCL's own format strings."""
    head = f"node{rank // 2}:{500 + rank}:{700 + rank} [{rank % 2}] NCCL INFO "
    lines = [
        head + f"ncclCommInitRank comm 0x55aa{rank:02x} rank {rank} nranks {size} cudaDev "
        f"{rank % 2} nvmlDev {rank % 2} busId 53000 commId 0xfeed - Init COMPLETE"
    ]
    lines += [
        head + f"{name}: opCount {number:x} sendbuff 0x7f00 recvbuff 0x7f01 count {count} "
        f"datatype {dtype} op 0 root 0 comm 0x55aa{rank:02x} [nranks={size}] stream 0x5600"
        for number, (name, count, dtype) in enumerate(launches)
    ]
    return "\n".join(lines) + "\n"


REDUCE, GATHER = ("AllReduce", 1024, 7), ("AllGather", 1024, 7)


def test_debug_logs_of_all_ranks(tmp_path):
    for rank in range(4):
        text = "a line of the training\n" + log(rank, [REDUCE] * (20 if rank != 2 else 17))
        (tmp_path / f"nccl.{rank}.log").write_text(text)
    answer = hang_json(hang([tmp_path]))
    assert (answer["verdict"], answer["culprits"]) == ("missing_ranks", [2])
    assert answer["groups"][0]["operation"] == "all_reduce"
    assert answer["groups"][0]["sequence"] == 18


def test_one_log_of_the_whole_job(tmp_path):
    (tmp_path / "job.out").write_text(
        "".join(log(rank, [REDUCE] * (3 if rank == 1 else 5)) for rank in range(4))
    )
    assert hang([tmp_path / "job.out"]).verdict.culprits == (1,)


def test_a_rank_that_launches_something_else(tmp_path):
    for rank in range(4):
        last = GATHER if rank == 3 else REDUCE
        (tmp_path / f"nccl.{rank}.log").write_text(log(rank, [REDUCE, REDUCE, last]))
    answer = hang_json(hang([tmp_path]))
    assert (answer["verdict"], answer["culprits"]) == ("mismatch", [3])


def test_a_rank_with_another_size(tmp_path):
    for rank in range(4):
        last = ("AllReduce", 2048 if rank == 0 else 1024, 7)
        (tmp_path / f"nccl.{rank}.log").write_text(log(rank, [REDUCE, last]))
    answer = hang_json(hang([tmp_path]))
    assert (answer["verdict"], answer["culprits"]) == ("mismatch", [0])


@pytest.mark.parametrize("content", [b"hello world", b"", b"\x80\x02}q\x00.", b'{"a": 1}', b"[]"])
def test_junk_is_refused_and_not_called_fine(tmp_path, content):
    path = tmp_path / "junk"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"tells of a hang: .*junk"):
        hang([path])


def test_the_garbage_collector_is_as_it_was(tmp_path):
    with pytest.raises(InputError):
        hang([tmp_path])
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(InputError):
            hang([tmp_path])
        assert not gc.isenabled()
    finally:
        gc.enable()
