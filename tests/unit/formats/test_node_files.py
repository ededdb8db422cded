"""Small files of a node: /proc, Lustre, NFS, utmp, folded stacks, Slurm's text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.labs.node_tree import MOUNTSTATS, STAT

from kansoku.formats.folded import merge_folded, parse_folded
from kansoku.formats.lustre import filesystem_of, parse_import_state, parse_lustre_stats
from kansoku.formats.mountstats import parse_mountstats
from kansoku.formats.procfs import (
    parse_diskstats,
    parse_key_values,
    parse_meminfo,
    parse_mounts,
    parse_net_dev,
    parse_pressure,
    parse_stat,
    whole_number,
)
from kansoku.formats.slurm_node import parse_jobs, parse_node_states
from kansoku.formats.utmp import RECORD_BYTES, parse_utmp


def expand(text):
    return text.split(",")


PARSERS = [
    parse_stat, parse_key_values, parse_meminfo, parse_pressure, parse_diskstats, parse_net_dev,
    parse_mounts, parse_lustre_stats, parse_import_state, parse_mountstats, parse_node_states,
    parse_folded, lambda text: parse_jobs(text, "c001", expand),
]  # fmt: skip
# Pieces that get past the first check of some parser, broken in every way.
PIECES = st.sampled_from(
    ["cpu", "cpu0 1 2", "MemTotal:", " kB", "some", "total=", "eth0:", "device ", "mounted on",
     "with fstype nfs4", "per-op statistics", "READ: 1 2 3 4 5 6 7 8", "samples [bytes]", "JobId=",
     "Nodes=", "CPU_IDs=", "GRES=gpu:1(IDX:0-99999)", "NodeName=", "State=", "Reason=", "\n", "\t",
     " ", "=", ":", "-1", "99999999999999999999999", "٣", "\\040", "\0"]
)  # fmt: skip


@pytest.mark.parametrize("parser", PARSERS)
def test_any_text_is_survived(parser):
    @given(st.text() | st.lists(PIECES, max_size=40).map("".join) | st.lists(PIECES).map("\n".join))
    def survive(text):
        parser(text)

    survive()


@given(st.binary(max_size=3 * RECORD_BYTES + 7))
def test_any_utmp_is_survived(data):
    parse_utmp(data)


def test_bad_lines_are_counted_and_cost_only_themselves():
    parsed = parse_stat(STAT + "cpu9 1 x 3\nnothing\n")
    assert parsed.bad_lines == 2
    assert parsed.value["processes"] == [4321]
    assert "cpu9" not in parsed.value


@pytest.mark.parametrize("text", ["-1", "1.5", "٣", "", "1" * 21, "0x10", "nan"])
def test_only_whole_numbers_count(text):
    assert whole_number(text) is None


def test_mounts_undo_escapes():
    (mount,) = parse_mounts("/dev/sda1 /mnt/my\\040disk ext4 rw 0 0\n").value
    assert mount.mountpoint == "/mnt/my disk"


def test_mountstats():
    mounts, bad = parse_mountstats(MOUNTSTATS)
    assert bad == 1
    assert (mounts[0].mountpoint, mounts[0].read_bytes, mounts[0].written_bytes) == (
        "/home",
        4096,
        8192,
    )
    assert mounts[0].operations["READ"].transmissions == 12


def test_lustre_names_and_states():
    assert filesystem_of("scratch-ffff9f3a1c2d4800") == "scratch"
    assert filesystem_of("my-fs-ffff9f3a1c2d4800") == "my-fs"
    assert parse_import_state("  target: a-OST0000_UUID\n  state: FULL\n") == ("a-OST0000", "FULL")
    assert parse_import_state("nothing") == (None, None)


def test_folded_stacks_add_up():
    stacks, bad = parse_folded("a;b 3\na;b 4\nmain (x.py:1);f (y z.py:2) 5\nno count\n")
    assert stacks == {"a;b": 7, "main (x.py:1);f (y z.py:2)": 5}
    assert bad == 1
    assert parse_folded(merge_folded(stacks))[0] == stacks


def test_slurm_text_of_the_corpus(corpus):
    """The recorded node03 is drained for an Xid; node04 does not answer."""
    text = (corpus / "slurm" / "slurm_scontrol_show_node.txt").read_text("utf-8")
    nodes = {node.name: node for node in parse_node_states(text)}
    assert len(nodes) == 8
    assert nodes["node03"].states == ("idle", "drain")
    assert nodes["node03"].reason.startswith("Xid 79: GPU has fallen off the bus")
    assert "not_responding" in nodes["node04"].states
