"""The bundle for the vendor, by the command: what the hardware said is in it, no tenant is."""

import csv
import io
import json
import subprocess
import sys
import tarfile

import polars as pl
import pytest

from kansoku.diagnose.edge.journal import Journal
from kansoku.diagnose.vendor import redact
from kansoku.model import table_schema
from kansoku.store import LocalStore

pytestmark = pytest.mark.real

S = 1_000_000_000
T = 1_790_000_000 * S
# Whatever a tenant's data is called here must not be found in any part of the bundle.
TENANT = (
    "alice",
    "nlp-secret",
    "train_gpt9.py",
    "hf_abcdef123456",
    "10.1.2.3",
    "47110815",
    "3133731",
)

DMESG = """\
[  100.000001] NVRM: Xid (PCI:0000:3a:00): 79, pid=3133731, name=train_gpt9.py, GPU has fallen off \
the bus.
[  100.100000] pcieport 0000:38:00.0: AER: Uncorrected (Fatal) error received: 0000:3a:00.0
[  101.000000] Memory cgroup out of memory: Killed process 3133731 (train_gpt9.py) total-vm:1kB
[  102.000000] audit: type=1300 uid=alice exe="/home/alice/nlp-secret/train_gpt9.py"
[  103.000000] Lustre: nlp-secret-OST0001: Connection to 10.1.2.3@o2ib was lost
[  104.000000] mce: [Hardware Error]: Machine check events logged
"""
SMI = """\
==============NVSMI LOG==============

Driver Version                            : 570.86.15

GPU 00000000:3A:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Serial Number                         : 1654422001234
    GPU UUID                              : GPU-11112222-3333-4444-5555-666677778888
    VBIOS Version                         : 96.00.74.00.01
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 3133731
            Name                          : /home/alice/nlp-secret/train_gpt9.py
"""


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "dmesg.txt").write_text(DMESG)
    (folder / "nvidia-smi-q.txt").write_text(SMI)
    (folder / "n05-dmesg.txt").write_text(DMESG.replace("3a:00", "5d:00"))
    (folder / "job.out").write_text("HF_TOKEN=hf_abcdef123456 user alice\n")
    return folder


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    opened = LocalStore(folder)
    samples = [
        ("hw.temperature", {"host.name": "n04", "hw.id": "GPU-1", "hw.type": "gpu"}, 91.0),
        ("hw.temperature", {"host.name": "n05", "hw.id": "GPU-9", "hw.type": "gpu"}, 40.0),
        ("kansoku.gpu.info",
         {"host.name": "n04", "hw.id": "GPU-1", "hw.serial_number": "1654422001234",
          "kansoku.user": "alice"}, 1.0),
        ("kansoku.run.ring.records", {"host.name": "n04", "kansoku.run": "nlp-secret"}, 1.0),
    ]  # fmt: skip
    rows = [
        {"metric": m, "labels": json.dumps(labels), "time_ns": T - 60 * S + i * S, "value": v}
        for i in range(3)
        for m, labels, v in samples
    ]
    opened.append("metrics", pl.DataFrame(rows, schema=table_schema("metrics")))
    event = {
        "time_ns": T, "source": "kernel", "subject": "gpu:n04/3", "severity": "error",
        "kind": "xid", "attributes": None,
        "body": "NVRM: Xid (PCI:0000:3a:00): 48, pid=3133731, name=train_gpt9.py, DBE",
    }  # fmt: skip
    opened.append("events", pl.DataFrame([event], schema=table_schema("events")))
    opened.close()
    return folder


def test_the_bundle_has_the_hardware_and_no_tenant(tmp_path, logs, store):
    lines = [line for line in DMESG.splitlines() if "Xid" in line]
    incident = {
        "id": "nlp-secret-job=47110815", "onset_ns": T, "kind": "stop", "verdict": "found",
        "hypotheses": [
            {"domain": "gpu_hardware", "component": "gpu", "subject": "gpu:n04/0000:3a:00",
             "confidence": 0.9, "evidence_for": [
                 {"sentence": lines[0], "source": "dmesg.txt:1", "time_ns": T},
                 {"sentence": "Traceback: train_gpt9.py of alice", "source": "job.out:1",
                  "time_ns": T}]},
            {"domain": "application", "component": "exception", "subject": "rank:3",
             "confidence": 0.1, "evidence_for": [{"sentence": "alice", "source": "job.out:2"}]},
        ],
    }  # fmt: skip
    told = tmp_path / "incident.json"
    told.write_text(json.dumps({"schema": "kansoku.diagnose/1", "incidents": [incident]}))
    state = tmp_path / "state"
    journal = Journal(state)
    for days in (20, 0):
        journal.life({"time_ns": T - days * 86_400 * S, "node": "n04", "event": "serviced_out",
                      "reason": "gpu_hardware: gpu, job 47110815 of user=alice"})  # fmt: skip
    bundle = tmp_path / "n04.tar.gz"
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "respond", "--state", str(state), "--json",
         "--evidence", str(bundle), "--incident", str(told), "--logs", str(logs),
         "--store", str(store)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with tarfile.open(bundle) as archive:
        parts = {m.name: archive.extractfile(m).read().decode() for m in archive.getmembers()}
    assert set(parts) == {
        f"n04/{name}" for name in ("manifest.json", "incident.json", "life.json", "kernel.log",
                                   "codes.csv", "devices.json", "metrics.csv")
    }  # fmt: skip
    whole = "\n".join(parts.values())
    assert [word for word in TENANT if word in whole] == []

    codes = list(csv.DictReader(io.StringIO(parts["n04/codes.csv"])))
    assert {(c["code"], c["pci"]) for c in codes} == {("79", "0000:3a:00"), ("48", "0000:3a:00")}
    assert all(c["meaning"] for c in codes)
    kernel = parts["n04/kernel.log"]
    assert "AER: Uncorrected (Fatal)" in kernel
    assert "Machine check events logged" in kernel
    assert "5d:00" not in kernel  # another node's file
    devices = parts["n04/devices.json"]
    assert "1654422001234" in devices
    assert "GPU-11112222-3333-4444-5555-666677778888" in devices
    metrics = list(csv.DictReader(io.StringIO(parts["n04/metrics.csv"])))
    assert {m["metric"] for m in metrics} == {"hw.temperature", "kansoku.gpu.info"}
    assert "n05" not in parts["n04/metrics.csv"]
    manifest = json.loads(parts["n04/manifest.json"])
    assert (manifest["times_out"], manifest["onset_ns"]) == (2, T)
    assert manifest["left_out"]["evidence"] == 2
    assert len(manifest["files"]["kernel.log"]) == 64
    assert journal.lives()[-1]["event"] == "evidence"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("NVRM: Xid (PCI:0000:3a:00): 31, pid=7, name=python3, Ch 1",
         "NVRM: Xid (PCI:0000:3a:00): 31, pid=<removed>, name=<removed>, Ch 1"),
        ("failed at /lustre/team/run1/data.bin for bob@example.org",
         "failed at <path> for <removed>"),
        ("peer 10.0.0.7, fe80:1:2:3:4:5:6:7", "peer <address>, <address>"),
        ("job 47110815 token=abc123 on gpu 3", "job <removed> token=<removed> on gpu 3"),
        ("device /dev/nvidia3 at 0000:3a:00.0", "device /dev/nvidia3 at 0000:3a:00.0"),
    ],
)  # fmt: skip
def test_redaction_keeps_the_machine_and_removes_the_people(text, clean):
    assert redact(text) == clean
