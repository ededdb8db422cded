"""The doctor on planted situations: what is broken, what is merely absent, and the remedy."""

import json
import shutil
import socket
import subprocess
import sys

import pytest
from tests.labs.node_tree import make_node, write

from kansoku.app._doctor_checks import (
    Check,
    Situation,
    check_compiler,
    check_kineto,
    check_ports,
    check_rdma,
    check_rings,
    check_slurm,
    check_store,
    check_torch,
    filesystem_kind,
)
from kansoku.app.doctor import doctor, doctor_answer
from kansoku.node import CommandResult
from kansoku.node.edge.machine import Machine


def situation(root, **settings):
    return Situation(machine=Machine(root=root), environment={}, **settings)


def one(found):
    (check,) = found
    return check


def test_a_failing_check_is_a_line_not_a_crash(tmp_path):
    def check_odd(_):
        raise RuntimeError("boom")

    (line,) = doctor(situation(tmp_path), checks=[check_odd])
    assert (line.name, line.state) == ("odd", "broken")
    answer, view = doctor_answer([line])
    assert answer["verdict"] == "found"
    assert "1 of 1" in answer["reason"]
    assert view.blocks


def test_absent_hardware_is_no_finding(tmp_path):
    answer, _ = doctor_answer([Check(name="NVML", area="node", state="absent", found="no driver")])
    assert answer["verdict"] == "none"


def test_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    found = one(check_store(situation(tmp_path, store=tmp_path / "file")))
    assert found.state == "broken"
    assert "--store" in found.remedy


def test_a_store_on_lustre_is_limited(tmp_path):
    write(tmp_path, "/proc/mounts", f"fs {tmp_path} lustre rw 0 0\n/dev/a / ext4 rw 0 0\n")
    found = one(check_store(situation(tmp_path, store=tmp_path / "new" / "store")))
    assert (found.state, "lustre" in found.found) == ("limited", True)


@pytest.mark.parametrize(
    ("programs", "states"),
    [
        ({"c++", "gcc"}, {"C++ compiler": "ok", "C compiler": "ok"}),
        ({"clang"}, {"C++ compiler": "limited", "C compiler": "ok"}),
        (set(), {"C++ compiler": "limited", "C compiler": "limited"}),
    ],
)
def test_compilers_are_looked_for_by_what_they_are_for(tmp_path, programs, states):
    place = situation(
        tmp_path, find_program=lambda name: f"/usr/bin/{name}" if name in programs else None
    )
    found = {check.name: check for check in check_compiler(place)}
    assert {name: check.state for name, check in found.items()} == states
    for name, package in (("C++ compiler", "g++"), ("C compiler", "gcc")):
        lacks = states[name] != "ok"
        assert (found[name].remedy is not None) == lacks
        assert not lacks or package in found[name].remedy
    assert "collective recorder" in found["C++ compiler"].enables
    assert "burst reader" in found["C compiler"].enables
    assert "span reader" in found["C compiler"].enables


def test_the_compiler_that_cxx_names_is_the_one(tmp_path):
    place = Situation(
        machine=Machine(root=tmp_path), environment={"CXX": "/opt/bin/my-c++"},
        find_program=lambda name: name if name.startswith("/opt") else None,
    )  # fmt: skip
    assert next(iter(check_compiler(place))).found == "/opt/bin/my-c++"


def test_variables_that_are_no_commands_name_no_compiler(tmp_path):
    place = Situation(
        machine=Machine(root=tmp_path), environment={"CC": 'gcc "', "CXX": "g++ '"},
        find_program=lambda name: f"/usr/bin/{name}",
    )  # fmt: skip
    assert [check.state for check in check_compiler(place)] == ["limited", "limited"]


def compilers(root, commands, cc):
    """Return the check of the C compiler where ``commands`` (name: script) are installed."""
    folder = root / "bin"
    folder.mkdir()
    for name, script in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    place = Situation(
        environment={} if cc is None else {"CC": cc},
        find_program=lambda name: shutil.which(name, path=str(folder)),
    )
    return list(check_compiler(place))[1]


WORKS = "exit 0"
REFUSES = """case "$*" in *-march=no*) echo "cc1: error: bad value 'no' for '-march=' switch" >&2; exit 1;; esac"""


@pytest.mark.parametrize(
    ("commands", "cc", "found", "remedy"),
    [
        ({"gcc": WORKS}, "/no/such", "CC=/no/such names no compiler: no such program",
         "set CC to one that works, or unset CC"),
        ({"gcc": WORKS}, 'gcc "', 'CC=gcc " names no compiler: CC is no command',
         "set CC to one that works, or unset CC"),
        ({}, "/no/such", "CC=/no/such names no compiler",
         "set CC to one that works, or unset CC and apt install gcc libc6-dev"),
        ({"gcc": REFUSES}, "gcc -march=no", "CC=gcc -march=no does not work: cc1: error: bad value",
         "set CC to a compiler and arguments that work, or unset CC"),
        ({"cc": "echo 'fatal error: stdint.h: No such file or directory' >&2; exit 1"}, None,
         "bin/cc does not work: fatal error: stdint.h", "apt install gcc libc6-dev"),
        ({"cc": "exit 7"}, None, "bin/cc does not work: it ended with 7",
         "apt install gcc libc6-dev"),
        ({}, None, "none: bursts are read in Python", "apt install gcc libc6-dev"),
    ],
    ids=["absent", "quote", "no-other", "arguments", "headers", "silent", "none"],
)  # fmt: skip
def test_a_compiler_that_does_not_work_is_told_from_one_that_is_not_there(
    tmp_path, commands, cc, found, remedy
):
    check = compilers(tmp_path, commands, cc)
    assert check.state == "limited"
    assert found in check.found
    assert check.remedy == remedy


def test_a_compiler_that_works_with_its_arguments_is_named_with_them(tmp_path):
    check = compilers(tmp_path, {"gcc": REFUSES}, "gcc -O1")
    assert (check.state, check.found, check.remedy) == ("ok", f"{tmp_path}/bin/gcc -O1", None)


def test_rings_without_a_folder(tmp_path):
    found = one(check_rings(situation(tmp_path, ring_folder=tmp_path / "none")))
    assert found.state == "broken"
    assert "KANSOKU_RING_DIR" in found.remedy


def test_a_taken_port(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        found = one(check_ports(situation(tmp_path, ports=((port, "OTLP"),))))
    assert (found.name, found.state, found.found) == (f"port {port}", "limited", "in use")


def test_rdma_ports_that_are_down_are_named(tmp_path):
    make_node(tmp_path, nics=2)
    write(tmp_path, "/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    found = one(check_rdma(situation(tmp_path)))
    assert found.state == "limited"
    assert "mlx5_1/1" in found.found
    assert found.remedy == "check cable and switch port"


@pytest.mark.parametrize(
    ("said", "configuration", "state"),
    [
        ("Slurmctld(primary) at head is UP", True, "ok"),
        ("Slurmctld(primary) at head is DOWN", True, "broken"),
        ("no configuration", False, "absent"),
    ],
)
def test_slurm(tmp_path, said, configuration, state):
    if configuration:
        write(tmp_path, "/etc/slurm/slurm.conf", "x")
    answer = CommandResult(code=0, stdout=said, stderr="")
    machine = Machine(root=tmp_path, programs=lambda *_: answer)
    where = Situation(machine=machine, environment={}, find_program=lambda name: f"/bin/{name}")
    assert one(check_slurm(where)).state == state


def test_switches_of_the_recorder_are_seen(tmp_path):
    where = Situation(machine=Machine(root=tmp_path), environment={"KANSOKU_DISABLE": "1"})
    states = {c.name: c for c in check_torch(where)}
    assert states["KANSOKU_DISABLE"].remedy == "unset KANSOKU_DISABLE"


def test_another_owner_of_the_profiler_endpoint(tmp_path):
    write(tmp_path, "/proc/net/unix", "Num Path\n0000: 2 0 0 2 1 99 @dynolog\n")
    assert one(check_kineto(situation(tmp_path))).state == "limited"


def test_the_longest_mount_point_wins():
    mounts = "/dev/a / ext4 rw 0 0\nfs1:/h /home nfs4 rw 0 0\n/dev/b /home2 xfs rw 0 0\n"
    assert filesystem_kind(mounts, "/home/alice") == "nfs4"
    assert filesystem_kind(mounts, "/home2/x") == "xfs"
    assert filesystem_kind(mounts, "/var") == "ext4"


def test_the_command_and_its_json():
    done = subprocess.run(
        [sys.executable, "-m", "kansoku", "doctor", "--json"], capture_output=True, text=True, timeout=60
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert done.returncode == (1 if answer["verdict"] == "found" else 0)
    assert answer["schema"] == "kansoku.doctor/1"
    assert sum(answer["counts"].values()) == len(answer["checks"])
    for check in answer["checks"]:
        assert set(check) == {"name", "area", "state", "found", "remedy", "enables"}
        assert check["state"] == "ok" or check["remedy"], check
