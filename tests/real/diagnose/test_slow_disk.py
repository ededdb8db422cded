"""A real training whose loader reads from a disk that the kernel makes slow for one rank."""

import contextlib
import os
import time
import uuid
from pathlib import Path

import pytest
from tests.labs.observed_training import Plan, train

from kansoku.app.diagnose import diagnose_folder, diagnosis_json
from kansoku.model import Domain

pytestmark = pytest.mark.real

STEPS, READ_BYTES, BYTES_PER_S = 40, 64 << 10, 320 << 10  # 205 ms a step where others take few


@pytest.fixture
def throttled(tmp_path):
    """A file and a cgroup whose reads of its disk are held to 320 KiB/s (blkio, cgroup v1)."""
    path = tmp_path / "batches.bin"
    path.write_bytes(os.urandom(STEPS * READ_BYTES))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    device = path.stat().st_dev
    root = Path("/sys/fs/cgroup/blkio")
    if not (root / "blkio.throttle.read_bps_device").exists():
        pytest.skip("no blkio controller of cgroup v1 is mounted")
    if not Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").exists():
        pytest.skip(f"{tmp_path} is on no block device")
    folder = root / f"kansoku-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    limit = f"{os.major(device)}:{os.minor(device)} {BYTES_PER_S}"
    (folder / "blkio.throttle.read_bps_device").write_text(limit)
    yield path, folder
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            break
        time.sleep(0.1)


def test_reads_that_the_kernel_throttles_are_the_storages_on_that_rank(throttled, tmp_path):
    path, cgroup = throttled
    plan = Plan(name="disk", slow="disk", rank=1, steps=STEPS, disk=str(path), cgroup=str(cgroup))
    answer = diagnose_folder(train([plan], tmp_path / "runs")["disk"])
    assert answer.incidents, diagnosis_json(answer)
    incident = answer.incidents[0]
    cause = incident.hypotheses[0]
    assert (incident.kind, cause.domain) == ("slow", Domain.STORAGE), diagnosis_json(answer)
    assert "rank 1" in " ".join(e.sentence for e in cause.evidence_for)
