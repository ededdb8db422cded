"""Starting ranks: their first error in one line, and nothing left behind when we end early."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kansoku.bench.edge.launch import launch_ranks, need_memory
from kansoku.errors import InputError, PlatformError

# What torchrun prints around a worker's error (torch 2.13, shortened).
TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:   File "worker.py", line 1, in main
[rank1]: OSError: [Errno 28] No space left on device
E1130 failed (exitcode: 1) local_rank: 1 (pid: 7) of binary: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def script(folder, text):
    path = folder / "launcher.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_the_first_error_is_told_in_one_line(tmp_path):
    launcher = script(tmp_path, f"import sys\nsys.stderr.write({TORCHRUN!r})\nsys.exit(1)\n")
    with pytest.raises(PlatformError) as caught:
        launch_ranks("x", [], ranks=2, timeout_s=30, launcher=launcher)
    assert "ended with 1: OSError: [Errno 28] No space left on device (" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


KILLED = """E1130 failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  traceback : Signal 9 (SIGKILL) received by PID 7
============================================================
"""
ABORTED = """terminate called after throwing an instance of 'gloo::IoException'
  what():  [gloo/transport/tcp/pair.cc:534] Connection closed by peer
============================================================
"""


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (KILLED, "ended with 1: Signal 9 (SIGKILL) received by PID 7 ("),
        (ABORTED, "ended with 1: [gloo/transport/tcp/pair.cc:534] Connection closed by peer ("),
        ("usage\n=====\n", "ended with 1: usage ("),
        ("", "ended with 1: no output ("),
    ],
)
def test_ranks_that_name_no_error(tmp_path, output, words):
    launcher = script(tmp_path, f"import sys\nsys.stderr.write({output!r})\nsys.exit(1)\n")
    with pytest.raises(PlatformError) as caught:
        launch_ranks("x", [], ranks=2, timeout_s=30, launcher=launcher)
    assert words in str(caught.value)


def test_a_launcher_that_is_not_there(tmp_path):
    with pytest.raises(PlatformError, match=r"No such file or directory .*--launcher"):
        launch_ranks("x", [], ranks=2, timeout_s=30, launcher=[str(tmp_path / "srun")])


def gone(pid):
    """Tell whether a process has ended; a zombie of another parent has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def wait_until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_do_not_outlive_us(tmp_path, number):
    """A signal to us alone, as from a scheduler or a supervisor, not to the whole group."""
    launcher = script(
        tmp_path,
        "import os, pathlib, time\n"
        f"p = pathlib.Path({str(tmp_path / 'pid')!r})\n"
        "(q := p.with_suffix('.new')).write_text(str(os.getpid()))\n"
        "q.rename(p)\n"
        "time.sleep(60)\n",
    )
    code = (
        "from kansoku.bench.edge.launch import launch_ranks\n"
        f"launch_ranks('x', [], ranks=2, timeout_s=50, launcher={launcher!r})"
    )
    ours = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        wait_until((tmp_path / "pid").exists)
        child = int((tmp_path / "pid").read_text())
        assert not gone(child)
        ours.send_signal(number)
        assert ours.wait(timeout=30) != 0
        wait_until(lambda: gone(child))
    finally:
        ours.kill()
        ours.wait()
    if number != signal.SIGKILL:
        assert {p.name for p in tmp_path.iterdir()} == {"launcher.py", "pid"}


def test_memory_that_is_not_there_is_refused():
    need_memory(1 << 20, "a megabyte")
    with pytest.raises(InputError, match=r"four ranks needs .* GiB of memory.*fewer ranks"):
        need_memory(1 << 60, "four ranks")
