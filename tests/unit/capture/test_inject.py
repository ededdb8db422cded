"""The injected folder: self-contained, Python 3.9, chained, inert, silent."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kansoku.capture import environment, write_payload
from kansoku.model import ring

ALLOWED = set(sys.stdlib_module_names) | {"_kansoku", "torch", "__future__"}


@pytest.fixture(scope="module")
def payload(tmp_path_factory):
    return Path(write_payload(str(tmp_path_factory.mktemp("payload"))))


def test_self_contained_and_python_3_9(payload):
    files = list(payload.rglob("*.py"))
    assert len(files) > 8
    for file in files:
        tree = ast.parse(file.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                assert name.partition(".")[0] in ALLOWED, f"{file.name} imports {name}"


def test_the_ring_layout_is_the_same_file(payload):
    assert (payload / "_kansoku" / "ring.py").read_bytes() == Path(ring.__file__).read_bytes()


def python(payload, code, *flags, **more):
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(payload), **more}
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_inert_without_torch(payload, tmp_path):
    code = "import sys, json; print(sorted(m for m in sys.modules if 'kansoku' in m))"
    done = python(payload, code, KANSOKU_RING_DIR=str(tmp_path), KANSOKU_RUN_ID="r")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "['_kansoku', '_kansoku.bootstrap']"
    assert list(tmp_path.iterdir()) == []


def test_kill_switch(payload):
    code = "import sys; print([m for m in sys.modules if 'kansoku' in m], len(sys.meta_path))"
    off = python(payload, code, KANSOKU_DISABLE="1").stdout
    assert off.startswith("[]")


def test_an_existing_sitecustomize_still_runs(payload, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = 'ran'\n")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{payload}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", "print(mine)"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "ran\n", done.stderr


def test_a_broken_sitecustomize_fails_as_it_would_without_us(payload, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('theirs')\n")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{payload}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", "print(1)"], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n"
    assert "theirs" in done.stderr


def test_starts_when_a_module_called_torch_is_imported_and_survives_a_strange_one(
    payload, tmp_path
):
    """A torch without anything we know: the import works, nothing is said."""
    (tmp_path / "torch.py").write_text("__version__ = '0.0'\n")
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{payload}{os.pathsep}{tmp_path}",
        "KANSOKU_RING_DIR": str(tmp_path / "rings"),
    }
    code = "import torch, sys; print(torch.__version__, '_kansoku.hooks' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.0 True\n", "")
    assert not (tmp_path / "rings").exists()


def test_environment_puts_us_first_and_keeps_what_was_there():
    made = environment(
        {"PYTHONPATH": "/theirs", "X": "1"}, payload="/ours", run="r", out="/o", node="n"
    )
    assert made["PYTHONPATH"] == f"/ours{os.pathsep}/theirs"
    assert (made["X"], made["KANSOKU_RUN_ID"], made["KANSOKU_OUT"]) == ("1", "r", "/o")
