"""What is no bundle is refused, what lies in one and cannot be read is named; Kineto traces."""

import json
import subprocess
import sys

import pytest
from tests.labs.kineto_files import Job, text, write

from kansoku.app.diagnose import diagnose_folder
from kansoku.app.diagnose._traces import observe_traces
from kansoku.errors import InputError


def kansoku(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kansoku", "diagnose", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def junk(folder):
    folder.mkdir()
    (folder / "blob.bin").write_bytes(bytes(range(256)) * 9)
    return folder


def empty(folder):
    folder.mkdir()
    return folder


def unreadable(folder):
    folder.mkdir()
    (folder / "job.log").symlink_to(folder / "gone.log")
    return folder


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder, "no such file or folder"),
        (empty, "it is empty"),
        (junk, "blob.bin: binary, of no known kind"),
        (unreadable, "job.log: No such file or directory"),
    ],
    ids=["absent", "empty", "junk", "unreadable"],
)
def test_where_nothing_can_be_read_there_is_no_verdict(tmp_path, make, why):
    with pytest.raises(InputError, match=why):
        diagnose_folder(make(tmp_path / "target"))


def test_a_log_is_no_checkpoint(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("step 1 loss 2.0\n")
    assert diagnose_folder(log).checkpoint is None


def test_a_refused_target_ends_with_2_and_says_why(tmp_path):
    done = kansoku(empty(tmp_path / "target"), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nothing in it that can be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_be_read_beside_a_log_is_named(tmp_path):
    target = junk(tmp_path / "target")
    (target / "job.log").write_text("2026-03-04 05:00:00 step 1 loss 2.0\n")
    (target / "gone.log").symlink_to(tmp_path / "nowhere")
    (target / "ring.log").symlink_to("ring.log")
    for name in ("nodes.parquet", "nodes.csv", "nccl_trace_rank_0"):
        (target / name).write_bytes(b"\x93\0\x01" * 99)
    done = kansoku(target, "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"]) == (0, "none")
    assert answer["inputs"]["read"] == ["job.log"]
    assert {"blob.bin: binary, of no known kind"} < set(answer["inputs"]["missing"])
    assert any(line.startswith("gone.log: ") for line in answer["inputs"]["missing"])
    assert "ring.log: a link that leads to itself" in answer["inputs"]["missing"]


def test_the_rank_that_traces_show_late_supports_what_is_known_of_it(tmp_path):
    for rank in range(4):
        late = 30.0 if rank == 2 else 0.0
        job = Job(rank=rank, world=4, steps=6, late_us=late)
        write(tmp_path / f"trace_rank{rank}.json", text(job))
    (seen,), _ = observe_traces(list(tmp_path.iterdir()))
    assert (seen.rank, seen.locates) == (2, True)
    (tmp_path / "logs").mkdir()
    for rank in range(4):
        said = "ValueError: batch of 0 rows" if rank == 2 else "step 40 loss 1.2"
        (tmp_path / "logs" / f"rank_{rank}.log").write_text(f"2026-03-04 05:00:00 {said}\n")
    first = diagnose_folder(tmp_path).incidents[0].hypotheses[0]
    assert str(first.subject) == "rank:2"
    assert any("Kineto" in e.source for e in first.evidence_for)


def test_one_trace_is_said_to_tell_nothing(tmp_path):
    write(tmp_path / "trace_rank0.json", text(Job()))
    _, missing = observe_traces(list(tmp_path.iterdir()))
    assert missing == ["one Kineto trace: ranks cannot be compared"]
