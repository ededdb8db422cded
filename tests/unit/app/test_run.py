"""The launcher when something around it fails: its messages, its disk, its end."""

import errno
import json
import os
import signal

import pytest

from kansoku.app import run as module
from kansoku.app.run import run
from kansoku.model import ring


@pytest.fixture
def launch(tmp_path):
    environment = {"PATH": os.environ["PATH"], "KANSOKU_RING_DIR": str(tmp_path / "rings")}

    def start(*command, **more):
        return run(
            command, out=tmp_path / "out", base_environment=environment | more.pop("env", {}),
            measure_peak=False, **more,
        )  # fmt: skip

    return start


def run_json(tmp_path):
    return json.loads((tmp_path / "out" / "run.json").read_text())


def test_a_line_that_cannot_be_written_ends_nothing(launch, tmp_path, monkeypatch):
    class Line:
        def __init__(self, *_):
            pass

        def read(self, _):
            return "step 1"

    said = []

    def say(line):
        said.append(line)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "LiveLine", Line)
    outcome = launch("sh", "-c", "sleep 0.6; exit 7", say=say, say_every_s=0.0)
    assert (outcome.exit_code, run_json(tmp_path)["exit_code"]) == (7, 7)
    assert said


def test_where_no_new_file_can_be_made_the_end_is_written_over_the_old_one(launch, tmp_path):
    in_the_way = tmp_path / "out" / f".run.json.{os.getpid()}"
    outcome = launch("sh", "-c", f"mkdir {in_the_way}; exit 3")
    assert (outcome.exit_code, outcome.end_written) == (3, True)
    facts = run_json(tmp_path)
    assert facts["exit_code"] == 3
    assert facts["end_ns"] > facts["start_ns"]


def test_an_end_that_cannot_be_written_is_told_to_the_caller(launch, tmp_path):
    in_the_way = tmp_path / "out" / f".run.json.{os.getpid()}"
    gone = tmp_path / "out" / "run.json"
    outcome = launch("sh", "-c", f"mkdir {in_the_way}; rm {gone}; exit 3")
    assert (outcome.exit_code, outcome.end_written) == (3, False)
    assert "run.json could not be written: Is a directory" in outcome.missing


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ({"SLURM_NTASKS": "abc"}, ["SLURM_NTASKS is 'abc', no number: taken as not set"]),
        (
            {"SLURM_NTASKS": "9" * 5000},
            [f"SLURM_NTASKS is '{'9' * 32}', no number: taken as not set"],
        ),
        ({"SLURM_NTASKS": ""}, []),
        (
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "one"},
            ["SLURM_PROCID is 'one', no number: taken as not set"],
        ),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": ""}, []),
        (
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "-3"},
            ["SLURM_LOCALID is '-3', no number: taken as not set"],
        ),
        ({"RANK": "x", "WORLD_SIZE": "", "LOCAL_RANK": "\udcff", "SLURM_NODEID": "n"}, []),
    ],
)
def test_damaged_variables_end_no_job(launch, tmp_path, damaged, said):
    ring.format_ring(buffer := bytearray(1 << 17), pid=1 << 30, process_start=9, anchor=(1, 2))
    (tmp_path / "one.ring").write_bytes(buffer)
    outcome = launch(
        "sh", "-c", f"cp {tmp_path}/one.ring {tmp_path}/rings/$KANSOKU_RUN_ID/n-1.ring; exit 7",
        env=damaged | {"SLURM_JOB_ID": "5"},
    )  # fmt: skip
    assert outcome.exit_code == 7
    facts = run_json(tmp_path)
    assert [text for text in facts["missing"] if "SLURM" in text] == said
    assert [copy.name for copy in (tmp_path / "out").glob("*/*.ring")] == ["n-1.ring"]  # drained


def test_rings_that_could_not_be_kept_are_said(launch, tmp_path, monkeypatch):
    """The ring of an ended process, and something in the way of the folder for its copy."""
    monkeypatch.setattr(module, "_LAST_WORDS_S", 0.3)
    rings = tmp_path / "rings" / "r"
    rings.mkdir(parents=True)
    buffer = bytearray(1 << 17)
    ring.format_ring(buffer, pid=1 << 30, process_start=9, anchor=(1_000, 1_700_000_000 * 10**9))
    (rings / f"far-{1 << 30}.ring").write_bytes(buffer)
    out = tmp_path / "out"
    outcome = launch("sh", "-c", f"touch {out}/far", env={"KANSOKU_RUN_ID": "r"})
    said = (
        f"records could not be written to {out}; rings of ended processes (1) were left in {rings}"
    )
    assert said in outcome.missing
    assert said in run_json(tmp_path)["missing"]


def test_ctrl_c_while_the_end_is_written_costs_nothing(launch, tmp_path, monkeypatch):
    """A press in the middle of the reading of the records."""
    read = module.read_run
    at_end = []

    def pressed(path):
        os.kill(os.getpid(), signal.SIGINT)
        return read(path)

    def ended():
        at_end.append(run_json(tmp_path)["exit_code"])

    monkeypatch.setattr(module, "read_run", pressed)
    before = signal.getsignal(signal.SIGINT)
    assert launch("sh", "-c", "exit 4", ended=ended).exit_code == 4
    assert at_end == [4]
    assert signal.getsignal(signal.SIGINT) is before
