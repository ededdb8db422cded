"""``kansoku run``: the job's own exit, signal and stdout; the run directory; frameworks."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import polars as pl
import pytest
from tests.labs.training import ROOT, bare_environment

from kansoku.formats.run_directory import read_run

pytestmark = pytest.mark.real

PLAIN = """
import sys, torch
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(6):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", number, float(loss.detach()).hex(), flush=True)
"""


def kansoku_run(tmp_path, *command, out="out", timeout=120, **more):
    environment = bare_environment(KANSOKU_RING_DIR=tmp_path / "rings", **more)
    return subprocess.run(
        [sys.executable, "-m", "kansoku", "run", "--out", str(tmp_path / out), "--", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        cwd=ROOT,
    )


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_what_the_caller_hands_over_by_number_reaches_the_job(tmp_path):
    """A shell's <(…), a jobserver, a log on descriptor 3."""
    line = f'"{sys.executable}" -m kansoku run --no-report --out "{tmp_path}/out" -- cat <(echo ok)'
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert "no process of the job was observed" in done.stderr  # without a report to say it


def test_a_script_without_distributed(tmp_path):
    path = script(tmp_path, PLAIN)
    done = kansoku_run(tmp_path, sys.executable, str(path))
    assert done.returncode == 0, done.stderr
    bare = subprocess.run(
        [sys.executable, str(path)],
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout == bare.stdout  # bitwise the same losses, and not a line of ours
    off = kansoku_run(tmp_path, sys.executable, str(path), out="off", KANSOKU_DISABLE="1")
    assert off.stdout == bare.stdout
    data = read_run(tmp_path / "out")
    counts = dict(data.spans.group_by("kind").len().iter_rows())
    assert (counts["step"], counts["forward"], counts["backward"], counts["optimizer"]) == (
        6, 6, 6, 6,
    )  # fmt: skip
    assert data.facts.exit_code == 0
    assert data.facts.command == (sys.executable, str(path))
    assert data.facts.ranks[0].parameters == 81
    assert data.peak["source"].startswith("measured: float32 matrix product of 256×256 on one core")
    assert len(read_run(tmp_path / "off").spans) == 0
    assert "kansoku: no report: no process of the job was observed" in off.stderr
    run_json = json.loads((tmp_path / "off" / "run.json").read_text())
    assert any("KANSOKU_DISABLE=1" in text for text in run_json["missing"])


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_the_jobs_own_exit_code(tmp_path, code):
    done = kansoku_run(tmp_path, "sh", "-c", f"echo out; echo err >&2; exit {code}")
    assert done.returncode == code
    assert done.stdout == "out\n"
    assert "err\n" in done.stderr
    assert read_run(tmp_path / "out").facts.exit_code == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_the_jobs_own_signal(tmp_path, number):
    done = kansoku_run(tmp_path, "sh", "-c", f"kill -{int(number)} $$")
    assert done.returncode == -number
    assert read_run(tmp_path / "out").facts.exit_code == 128 + number


def started(tmp_path, code, **more):
    process = subprocess.Popen(
        [sys.executable, "-m", "kansoku", "run", "--out", str(tmp_path / "out"), "--",
         sys.executable, "-c", textwrap.dedent(code)],
        env=bare_environment(KANSOKU_RING_DIR=tmp_path / "rings"),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        cwd=ROOT, **more,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    return process


def in_a_terminal(tmp_path, code):
    """Run ``code`` under ``kansoku run`` in a pseudo-terminal; return its process and our end."""
    program = [sys.executable, "-m", "kansoku", "run", "--out", str(tmp_path / "out"), "--",
               sys.executable, "-c", textwrap.dedent(code)]  # fmt: skip
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.execve(program[0], program, bare_environment(KANSOKU_RING_DIR=tmp_path / "rings"))
    return process, terminal


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGQUIT", "SIGALRM", "SIGXCPU", "SIGUSR1"])
def test_a_signal_to_us_reaches_the_job(tmp_path, name):
    code = f"""
    import os, signal, time
    def got(*_):
        print("got", flush=True)
        os._exit(9)
    signal.signal(signal.{name}, got)
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
    """
    process = started(tmp_path, code, start_new_session=True)  # no terminal sends keys to it
    process.send_signal(getattr(signal, name))
    output, _ = process.communicate(timeout=60)
    assert (output, process.returncode) == ("got\n", 9)


def test_what_is_ignored_stays_ignored_for_the_job(tmp_path):
    """As under nohup, or in the background of a script."""
    code = """
    import signal
    print("ready", flush=True)
    print(*(signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGHUP, signal.SIGINT)))
    """
    shell = ["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh"]
    run = [sys.executable, "-m", "kansoku", "run", "--out", str(tmp_path / "out"), "--"]
    done = subprocess.run(
        [*shell, *run, sys.executable, "-c", textwrap.dedent(code)],
        env=bare_environment(KANSOKU_RING_DIR=tmp_path / "rings"),
        capture_output=True, text=True, check=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout == "ready\nTrue True\n"


def test_ctrl_c_of_a_terminal_comes_once(tmp_path):
    """Over a real pseudo-terminal: the driver sends SIGINT to the whole foreground group."""
    code = """
    import signal, time
    count = 0
    def got(*_):
        global count
        count += 1
    signal.signal(signal.SIGINT, got)
    print("ready", flush=True)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        time.sleep(0.05)
    print("count", count, flush=True)
    """
    process, terminal = in_a_terminal(tmp_path, code)
    seen = ""
    try:
        while not re.search(r"count \d", seen):
            seen += os.read(terminal, 4096).decode()
            if "ready" in seen and "^C" not in seen:
                os.write(terminal, b"\x03")
                seen += "^C"
    finally:
        os.close(terminal)
        os.waitpid(process, 0)
    assert "count 1" in seen, seen


@pytest.mark.parametrize(
    ("words", "code"), [("exit 7", 7), ("exit 0", 0), ("kill -TERM $$", -signal.SIGTERM)]
)
@pytest.mark.parametrize("stderr", ["full", "no reader"])
def test_the_jobs_own_end_where_stderr_cannot_be_written(tmp_path, stderr, words, code):
    if stderr == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    program = [sys.executable, "-m", "kansoku", "run", "--out", str(tmp_path / "out"), "--"]
    try:
        done = subprocess.run(
            [*program, "sh", "-c", words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=descriptor, env=bare_environment(KANSOKU_RING_DIR=tmp_path / "rings"),
            check=False, timeout=60, cwd=ROOT,
        )  # fmt: skip
    finally:
        os.close(descriptor)
    assert done.returncode == code
    assert read_run(tmp_path / "out").facts.exit_code == (code if code >= 0 else 128 - code)


def test_the_jobs_environment_is_the_callers_and_ours(tmp_path):
    """In the C locale, where Python adds a variable to its own."""
    given = {"PATH": os.environ["PATH"], "LANG": "C", "KANSOKU_RING_DIR": str(tmp_path / "rings"),
             "PYTHONPATH": "/mine", "TWO": "a=b\nc"}  # fmt: skip
    out = tmp_path / "out"
    program = [sys.executable, "-m", "kansoku", "run", "--out", str(out), "--", "env", "-0"]
    done = subprocess.run(
        program, env=given, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    seen = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    ours = {"KANSOKU_RUN_ID", "KANSOKU_OUT", "KANSOKU_LAUNCH_NODE"}
    assert seen.keys() - given.keys() == ours
    assert {name: seen[name] for name in given} == given | {"PYTHONPATH": f"{out}/.capture:/mine"}


def test_ctrl_c_again_and_again_leaves_the_jobs_end(tmp_path):
    """A press every 20 ms from the job's start to the launcher's end."""
    code = """
    import os, signal, time
    signal.signal(signal.SIGINT, lambda *_: os._exit(9))
    print("ready", flush=True)
    time.sleep(60)
    """
    process, terminal = in_a_terminal(tmp_path, code)
    seen = ""
    try:
        while True:
            while select.select([terminal], [], [], 0)[0]:
                seen += os.read(terminal, 4096).decode()
            if "ready" in seen:
                os.write(terminal, b"\x03")
            time.sleep(0.02)
    except OSError:  # its other end is closed
        pass
    finally:
        _, status = os.waitpid(process, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 9, seen.replace("^C", "")
    facts = read_run(tmp_path / "out").facts
    assert facts.exit_code == 9
    assert facts.end_ns is not None


def test_records_that_do_not_fit_are_said(tmp_path):
    """No file may grow over 128 KiB: the copy is refused, the ring stays and is read."""
    path = script(tmp_path, PLAIN.replace("range(6)", "range(400)"))
    limit = 'ulimit -f 256; exec "$@"'  # blocks of 512 bytes
    program = [sys.executable, "-m", "kansoku", "run", "--out", str(tmp_path / "out"), "--"]
    rings = tmp_path / "rings"
    environment = bare_environment(KANSOKU_RING_DIR=rings, KANSOKU_NATIVE=0)
    environment["KANSOKU_RING_BYTES"] = str(120 << 10)
    done = subprocess.run(
        ["sh", "-c", limit, "sh", *program, sys.executable, str(path)],
        env=environment, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = f"records could not be written to {tmp_path / 'out'}"
    left = f"rings of ended processes (1) were left in {rings}/"
    assert said in " ".join(done.stderr.split())
    run_json = json.loads((tmp_path / "out" / "run.json").read_text())
    assert any(text.startswith(said) and left in text for text in run_json["missing"])
    assert run_json["exit_code"] == 0


def test_a_process_without_room_for_its_ring_is_named(tmp_path):
    path = script(tmp_path, PLAIN)
    done = kansoku_run(tmp_path, sys.executable, str(path), KANSOKU_RING_BYTES=10**14, RANK=5)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 6
    (said,) = json.loads((tmp_path / "out" / "run.json").read_text())["missing"]
    assert said.startswith("rank 5 (pid ")
    assert "was not observed: no ring in" in said
    assert said.endswith(("No space left on device", "File too large"))


def test_usage_and_missing_programs(tmp_path):
    assert kansoku_run(tmp_path, "no-such-program-here").returncode == 127
    again = kansoku_run(tmp_path, "true")
    assert again.returncode == 2
    assert "another run" in again.stderr


def test_the_runs_node_drains_what_the_launcher_does_not_reach(tmp_path):
    """A process that says it is on another node starts that node's drain by itself."""
    path = script(tmp_path, "import os\nos.environ['KANSOKU_NODE'] = 'far'\n" + PLAIN)
    done = kansoku_run(tmp_path, sys.executable, str(path))
    assert done.returncode == 0
    data = read_run(tmp_path / "out")
    assert [rank.node for rank in data.facts.ranks] == ["far"]
    assert len(data.spans.filter(pl.col("kind") == "step")) == 6


TRAINER = """
import sys, torch, warnings
warnings.simplefilter("ignore")
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, TrainerCallback
class Data(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, i):
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}
class Count(TrainerCallback):
    steps = 0
    def on_step_end(self, *a, **k): self.steps += 1
count = Count()
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16))
arguments = TrainingArguments(sys.argv[1], per_device_train_batch_size=2, max_steps=5,
    gradient_accumulation_steps=2, report_to=[], save_steps=5, logging_steps=100, use_cpu=True,
    disable_tqdm=True)
Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=[count]).train()
print("steps", count.steps, "layers", 2)
"""

LIGHTNING = """
import sys, torch, warnings, logging
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lightning as L
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self.steps = 0
    def training_step(self, batch, _):
        self.steps += 1
        return self.net(batch).pow(2).mean()
    def validation_step(self, batch, _): self.net(batch)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=2)
model = Model()
L.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
    num_sanity_val_steps=0).fit(model, data, data)
print("steps", model.steps)
"""


@pytest.mark.parametrize(
    ("text", "steps", "forwards", "evaluations"),
    [(TRAINER, 5, 10, 0), (LIGHTNING, 6, 6, 6)],
    ids=["transformers", "lightning"],
)
def test_frameworks(tmp_path, text, steps, forwards, evaluations):
    path = script(tmp_path, text)
    done = kansoku_run(tmp_path, sys.executable, str(path), str(tmp_path / "work"), timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"steps {steps}" in done.stdout
    spans = read_run(tmp_path / "out").spans
    complete = ~pl.col("attributes").fill_null("").str.contains("incomplete")
    counts = dict(spans.filter(complete).group_by("kind").len().iter_rows())
    assert counts["step"] == steps
    assert counts["forward"] == counts["backward"] == forwards
    assert counts.get("evaluation", 0) == evaluations
    assert counts["data_wait"] >= forwards


def test_torchrun_with_everything(tmp_path):
    """Two ranks under torchrun: run.json lists them, the agent process itself is not one."""
    path = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        dist.destroy_process_group()
        """,
    )
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    done = kansoku_run(
        tmp_path, torchrun, "--standalone", "--nproc-per-node", "2", str(path), timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    data = read_run(tmp_path / "out")
    assert [(r.rank, r.local_rank, r.world_size) for r in data.facts.ranks] == [
        (0, 0, 2), (1, 1, 2),
    ]  # fmt: skip
    run_json = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [rank["rank"] for rank in run_json["ranks"]] == [0, 1]
    reduced = data.spans.filter((pl.col("name") == "all_reduce") & (pl.col("step") >= 0))
    assert len(reduced) == 8
    assert not list((tmp_path / "rings").rglob("*.ring"))
