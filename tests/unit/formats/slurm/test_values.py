"""Slurm's values in every form; expected ones from sacct(1), slurm source and by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kansoku.formats.slurm import values


@pytest.mark.parametrize(
    ("text", "job", "task", "pending", "het", "step"),
    [
        ("12", 12, None, None, None, None),
        ("12_3", 12, 3, None, None, None),
        ("12_[1-5%2]", 12, None, "1-5%2", None, None),
        ("12_[1,3,5-9]", 12, None, "1,3,5-9", None, None),
        ("12+1", 12, None, None, 1, None),
        ("12.batch", 12, None, None, None, "batch"),
        ("12.extern", 12, None, None, None, "extern"),
        ("12.interactive", 12, None, None, None, "interactive"),
        ("12.0", 12, None, None, None, "0"),
        ("12_3.4", 12, 3, None, None, "4"),
        ("12+1.batch", 12, None, None, 1, "batch"),
        ("12.0+1", 12, None, None, None, "0+1"),
    ],
)
def test_every_job_id(text, job, task, pending, het, step):
    got = values.parse_job_id(text)
    assert (got.job, got.task, got.pending_tasks, got.het_offset, got.step) == (
        job, task, pending, het, step,
    )  # fmt: skip


@pytest.mark.parametrize("text", ["", "abc", "12.x", "12_", "-1", "1 2"])
def test_no_job_id(text):
    with pytest.raises(ValueError, match="job id"):
        values.parse_job_id(text)


@pytest.mark.parametrize(
    ("text", "name", "by", "flags"),
    [
        ("COMPLETED", "COMPLETED", None, ()),
        ("CANCELLED by 1003", "CANCELLED", "1003", ()),
        ("CANCELLED+", "CANCELLED", None, ()),
        ("CD", "COMPLETED", None, ()),
        ("OOM", "OUT_OF_MEMORY", None, ()),
        ("RUNNING,COMPLETING", "RUNNING", None, ("COMPLETING",)),
        ("COMPLETING", "COMPLETING", None, ()),
        ("PENDING,REQUEUED", "PENDING", None, ("REQUEUED",)),
        ("REQUEUED", "REQUEUED", None, ()),
        ("NODE_FAIL", "NODE_FAIL", None, ()),
    ],
)
def test_states_and_flags(text, name, by, flags):
    got = values.parse_state(text)
    assert (got.name, got.cancelled_by, got.flags) == (name, by, flags)


def test_no_state():
    with pytest.raises(ValueError, match="not a job state"):
        values.parse_state("llm")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:05.123", 5.123), ("02:03", 123), ("01:02:03", 3723), ("1-02:03:04", 93784),
        ("7-00:00:00", 604800), ("120", 120), ("2-03", 2 * 86400 + 3 * 3600), ("", None),
        ("Unknown", None), ("####", None), ("INVALID", None), ("00:00:00", 0),
    ],
)  # fmt: skip
def test_durations(text, seconds):
    assert values.parse_duration_s(text) == seconds


@given(st.integers(0, 400 * 86400))
def test_durations_round_trip(seconds):
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    assert values.parse_duration_s(f"{days}-{text}" if days else text) == seconds


def test_limits():
    assert values.parse_time_limit_s("UNLIMITED") is None
    assert values.parse_time_limit_s("Partition_Limit") is None
    assert values.parse_time_limit_s("7-00:00:00") == 604800
    assert values.parse_time_limit_s("20", minutes=True) == 1200


def test_exit_codes():
    assert values.parse_exit("0:0") == (0, None)
    assert values.parse_exit("1:0") == (1, None)
    assert values.parse_exit("0:9") == (0, 9)
    assert values.parse_exit("") == (None, None)
    with pytest.raises(ValueError, match="exit code"):
        values.parse_exit("x:0")


def test_typed_and_untyped_gpus_are_never_summed():
    both = values.parse_tres("billing=4,cpu=4,gres/gpu:h100=16,gres/gpu=16,mem=16000M,node=2")
    assert (both.gpus, both.gpu_kind, both.nodes, both.cpus) == (16, "h100", 2, 4)
    assert both.memory_bytes == 16000 * 2**20
    mixed = values.parse_tres("gres/gpu:a100=4,gres/gpu:h100=8")
    assert (mixed.gpus, mixed.gpu_kind) == (12, "a100+h100")
    assert values.parse_tres("cpu=1,mem=1G,node=1").gpus == 0
    assert values.parse_tres("").gpus is None
    assert values.parse_tres("gpu:4").gpus == 4
    assert values.parse_tres("gpu:h100:4").gpu_kind == "h100"
    assert values.parse_tres("gres/gpu=1.2K").gpus == 1200


@pytest.mark.parametrize(
    ("text", "count"), [("12616K", 12616 * 1024), ("7812.50G", 8388608000000), ("4000Mc", 4000 << 20),
                        ("0", 0), ("", None)],
)  # fmt: skip
def test_sizes(text, count):
    assert values.parse_size_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("c[001-003]", ("c001", "c002", "c003")),
        ("node05", ("node05",)),
        ("r[1-2]n[01-02]", ("r1n01", "r1n02", "r2n01", "r2n02")),
        ("c[1,3]-ib,d7", ("c1-ib", "c3-ib", "d7")),
        ("c[08-11]s", ("c08s", "c09s", "c10s", "c11s")),
        ("None assigned", ()),
        (None, ()),
    ],
)
def test_host_lists(text, names):
    assert sorted(values.expand_nodes(text)) == sorted(names)


@pytest.mark.parametrize("text", ["c[1-70000]", "c[1-300]n[1-300]", "c[1-99999999999999999999]"])
def test_host_lists_stop_at_64k(text):
    with pytest.raises(ValueError, match=r"more than 65536|too wide"):
        values.expand_nodes(text)


def test_host_lists_up_to_the_cap_and_back():
    assert len(values.expand_nodes("c[00001-65536]")) == 65536
    assert values.fold_nodes(("c001", "c002", "c003")) == "c[001-003]"
    with pytest.raises(ValueError, match="host list"):
        values.expand_nodes("c[1-")
