"""Ranks, categories of every age, chunking, sources, processes."""

import gzip
import io
import json
import random
import tarfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from tests.labs.kineto_files import BASE_NS, START_US, Job, document, events, row, text, write

from kansoku.app.trace import breakdown
from kansoku.catalog.kernels import RowKind, kernel_rules
from kansoku.errors import InputError
from kansoku.formats.kineto import find_sources, rank_from_name, read_trace
from kansoku.formats.kineto._scan import split


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3),
        ("rank_12.json.gz", 12),
        ("trace_rank-7.pt.trace.json", 7),
        ("worker5_step_12.1694128201549.pt.trace.json", 5),
        ("host17_4242.1694128201549.pt.trace.json", None),
        ("global_rank31_local3.json", 31),
        ("kineto_trace_r11.json", 11),
        ("3.json", 3),
        ("trace_0.json", 0),
        ("b200_eager.json.gz", None),
        ("mi250_rocm62.json.gz", None),
        ("trace.json", None),
        ("frank3.json", None),
    ],
)
def test_rank_from_file_name(name, rank):
    assert rank_from_name(name) == rank


def test_rank_order_of_trust(tmp_path):
    write(tmp_path / "rank9.json", text(Job(rank=2)))
    write(tmp_path / "rank4.json", text(Job(info=False)))
    write(tmp_path / "alpha.json", text(Job(info=False)))
    result = breakdown([tmp_path], ranks=["alpha.json=6"]).to_json()
    found = {(r["rank"], r["source"]) for r in result["rank_sources"]}
    assert found == {(2, "distributedInfo"), (4, "file name"), (6, "user")}


def test_two_files_of_one_rank_are_said(tmp_path):
    for name in ("a", "b", "c"):
        write(tmp_path / f"{name}.json", text(Job(rank=1 if name == "c" else 0)))
    said = [r["incomplete"] for r in breakdown([tmp_path]).to_json()["ranks"]]
    assert "rank 0 is also in" in said[0][0]
    assert said[2] == []


def test_all_rank_zero_is_said(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.json", text(Job()))
    said = [r["incomplete"] for r in breakdown([tmp_path]).to_json()["ranks"]]
    assert all("all 2 files say rank 0" in why[0] for why in said)


def test_all_rank_zero_but_names_differ(tmp_path):
    for number in range(3):
        write(tmp_path / f"rank{number}.json", text(Job()))
    result = breakdown([tmp_path]).to_json()
    assert [r["rank"] for r in result["ranks"]] == [0, 1, 2]
    assert all("file name" in r["incomplete"][0] for r in result["ranks"])


def test_one_rank_of_many(tmp_path):
    result = breakdown([write(tmp_path / "x.json", text(Job(rank=3)))]).to_json()
    assert result["missing_ranks"] == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("Kernel", RowKind.COMPUTE),
        ("kernel", RowKind.COMPUTE),
        ("Memcpy", RowKind.MEMCPY),
        ("gpu_memcpy", RowKind.MEMCPY),
        ("Memset", RowKind.MEMSET),
        ("gpu_memset", RowKind.MEMSET),
        ("Runtime", RowKind.LAUNCH),
        ("cuda_runtime", RowKind.LAUNCH),
        ("cuda_driver", RowKind.LAUNCH),
        ("hip_runtime", RowKind.LAUNCH),
        ("xpu_runtime", RowKind.LAUNCH),
        ("mtia_runtime", RowKind.LAUNCH),
        ("mtia_ccp_events", RowKind.COMPUTE),
        ("cuda_sync", RowKind.DEVICE_SYNC),
        ("Operator", RowKind.OPERATOR),
        ("cpu_op", RowKind.OPERATOR),
        ("user_annotation", RowKind.ANNOTATION),
        ("gpu_user_annotation", RowKind.DEVICE_ANNOTATION),
        ("python_function", RowKind.PYTHON),
        ("overhead", RowKind.OTHER),
        ("brand_new_category", RowKind.OTHER),
        (None, RowKind.OTHER),
    ],
)
def test_categories_of_every_age(category, kind):
    assert kernel_rules().category(category) == kind


@pytest.mark.parametrize(
    ("name", "said", "kind"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            False,
            RowKind.COLLECTIVE,
        ),
        (
            "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long)",
            False,
            RowKind.COLLECTIVE,
        ),
        ("ncclKernel_Generic(ncclDevComm*)", False, RowKind.COLLECTIVE),
        ("rcclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096>)", False, RowKind.COLLECTIVE),
        ("oneccl_allreduce_pcie", False, RowKind.COLLECTIVE),
        ("my_fused_thing", True, RowKind.COLLECTIVE),
        ("void reduce_kernel<128, 4>(float)", False, RowKind.COMPUTE),
        ("volta_sgemm_128x32_nt", False, RowKind.COMPUTE),
        ("Stream Sync", False, RowKind.DEVICE_SYNC),
        ("Context Sync", False, RowKind.DEVICE_SYNC),
        ("Stream Wait Event", False, RowKind.DEVICE_SYNC),
        ("eventful_kernel", False, RowKind.COMPUTE),
    ],
)
def test_collectives_by_arguments_then_name(name, said, kind):
    assert kernel_rules().refine(RowKind.COMPUTE, name, has_collective_arguments=said) == kind


@pytest.mark.parametrize(
    ("text_", "word"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclKernel_Reduce_RING", "reduce"),
        ("ncclKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclDevKernel_SendRecv", "send_recv"),
        ("coalesced", "unknown"),
    ],
)
def test_operations(text_, word):
    assert kernel_rules().operation(text_) == word


def test_bus_factors_of_nccl_tests():
    rules = kernel_rules()
    assert rules.bus_factor("all_reduce", 8) == 1.75
    assert rules.bus_factor("all_gather", 8) == 0.875
    assert rules.bus_factor("broadcast", None) == 1.0
    assert rules.bus_factor("all_reduce", None) is None


def test_sync_rows_are_not_work(tmp_path):
    rows = events(Job())
    rows += [
        row("cuda_sync", "Stream Sync", 0, 7, START_US, 5000.0, {}),
        row("kernel", "Context Sync", 0, 7, START_US, 5000.0, {}),
    ]
    result = breakdown([write(tmp_path / "a.json", text(Job(), rows))]).to_json()
    clean = breakdown([write(tmp_path / "b.json", text(Job()))]).to_json()
    assert result["ranks"][0]["busy_us"] == clean["ranks"][0]["busy_us"]


def test_graph_launch_with_many_and_few_kernels(tmp_path):
    rows = [row("cuda_runtime", "cudaGraphLaunch", 1, 1, 100.0, 5.0, {"correlation": 5})]
    rows += [
        row("kernel", f"k{n}", 0, 7, 110.0 + 10 * n, 8.0, {"correlation": 5, "graph node id": n})
        for n in range(6)
    ]
    rows += [row("cuda_runtime", "cudaGraphLaunch", 1, 1, 150.0, 5.0, {"correlation": 6})]
    result = breakdown([write(tmp_path / "a.json", text(Job(base=False), rows))]).to_json()
    launch = result["launches"][0]
    assert (launch["graph_calls"], launch["graph_rows"], launch["rows"]) == (1, 6, 6)
    assert launch["delay_median_us"] == 10.0


def test_optimizer_rows_make_steps(tmp_path):
    rows = [r for r in events(Job()) if "ProfilerStep" not in r["name"]]
    for step in range(3):
        rows.append(  # noqa: PERF401
            row(
                "user_annotation",
                "Optimizer.step#AdamW.step",
                4000,
                4001,
                START_US + 810 * step + 700,
                80.0,
                {},
            )
        )
    result = breakdown([write(tmp_path / "a.json", text(Job(), rows))]).to_json()
    assert [(s["step"], s["source"]) for s in result["steps"]] == [
        (n, "optimizer") for n in range(3)
    ]
    assert [s["span_us"] for s in result["steps"]] == [780.0, 810.0, 810.0]


def test_without_steps_the_window(tmp_path):
    rows = [r for r in events(Job()) if r.get("cat") != "user_annotation"]
    (step,) = breakdown([write(tmp_path / "a.json", text(Job(), rows))]).to_json()["steps"]
    assert (step["step"], step["source"]) == (None, "window")


def test_stamps_without_base_keep_every_nanosecond(tmp_path):
    # 1.7e15 µs with three decimals has more digits than a double holds.
    content = '[{"ph":"X","cat":"kernel","name":"a","pid":0,"tid":7,"ts":1712195495519689.047,"dur":1.001,"args":{}},{"ph":"X","cat":"kernel","name":"a","pid":0,"tid":7,"ts":1712195495519695.812,"dur":0.002,"args":{}}]'
    trace = read_trace(find_sources([write(tmp_path / "a.json", content)])[0])
    assert trace.columns["start_ns"].tolist() == [1712195495519689047, 1712195495519695812]
    assert trace.columns["duration_ns"].tolist() == [1001, 2]


def test_integer_and_fractional_stamps_mix(tmp_path):
    content = '[{"ph":"X","cat":"kernel","name":"a","pid":0,"tid":7,"ts":1712195495519689,"dur":1.5,"args":{}},{"ph":"X","cat":"kernel","name":"a","pid":0,"tid":7,"ts":5.25,"dur":3,"args":{}}]'
    trace = read_trace(find_sources([write(tmp_path / "a.json", content)])[0])
    assert sorted(trace.columns["start_ns"].tolist()) == [5250, 1712195495519689000]


@pytest.mark.parametrize("chunk", [64, 700, 5000])
def test_chunks_are_whole_events(chunk):
    data = text(Job()).encode()
    blocks = [data[at : at + 37] for at in range(0, len(data), 37)]
    pieces = list(split(blocks, chunk_bytes=chunk))
    assert b"".join(piece.data for piece in pieces) == data
    assert pieces[0].kind == "header"
    assert len(pieces) > 3
    for piece in pieces[1:-1]:
        json.loads(b"[" + piece.data.strip(b", \n") + b"]")


def test_nested_objects_that_look_like_events(tmp_path):
    rows = events(Job())
    for event in rows:
        if event.get("cat") == "cpu_op":
            event["args"]["nodes"] = [{"name": "a", "ts": 1}, {"name": "b", "ts": 2}]
    whole = json.dumps(document(Job(), rows), indent=2)
    result = breakdown([write(tmp_path / "a.json", whole)]).to_json()
    assert result["ranks"][0]["incomplete"] == []
    assert result["launches"][0]["rows"] == 120


def test_base_time_makes_unix_stamps(tmp_path):
    result = breakdown([write(tmp_path / "a.json", text(Job()))]).to_json()
    assert result["steps"][0]["start_ns"] == BASE_NS + round(START_US * 1000)


def test_archives_folders_and_nothing(tmp_path):
    with tarfile.open(tmp_path / "set.tar.gz", "w:gz") as archive:
        for rank in range(2):
            data = text(Job(rank=rank)).encode()
            entry = tarfile.TarInfo(f"x/rank{rank}.json")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    assert [r["rank"] for r in breakdown([tmp_path]).to_json()["ranks"]] == [0, 1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no trace files"):
        find_sources([tmp_path / "empty"])
    with pytest.raises(InputError, match="no such"):
        find_sources([tmp_path / "absent"])


def test_an_archive_cut_short(tmp_path):
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        data = text(Job()).encode()
        entry = tarfile.TarInfo("rank0.json")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    cut = write(tmp_path / "cut.tar", (tmp_path / "set.tar").read_bytes()[: len(data) // 2])
    (row_,) = breakdown([cut]).to_json()["ranks"]
    assert any("truncated" in why for why in row_["incomplete"])


def test_one_core_or_two_say_the_same(tmp_path):
    for rank in range(2):
        write(tmp_path / f"{rank}.json", text(Job(rank=rank, kernels=400)))
    one, two = (breakdown([tmp_path], processes=count).to_json() for count in (1, 2))
    assert one == two
    assert [r["rank"] for r in one["ranks"]] == [0, 1]
    assert [r["comm_us"] for r in one["ranks"]] == [120 * 30.5, 120 * 30.5]


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_of_one_file_over_processes(tmp_path, monkeypatch, packed):
    path = write(tmp_path / "a.json", text(Job(kernels=300)))
    if packed:  # its chunks travel to the processes, which read those of a plain file themselves
        path = tmp_path / "a.json.gz"
        path.write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))
    alone = read_trace(find_sources([path])[0])
    monkeypatch.setattr(
        "kansoku.formats.kineto._scan.split.__kwdefaults__", {"chunk_bytes": 20_000}
    )
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        shared = read_trace(find_sources([path])[0], executor=pool)
    name = [np.array(t.names)[t.columns["name"]].tolist() for t in (alone, shared)]
    assert name[0] == name[1]
    for column in ("start_ns", "duration_ns", "correlation"):
        assert np.array_equal(alone.columns[column], shared.columns[column]), column
    for detail in ("sequence", "bytes"):
        one, other = (t.details[detail] for t in (alone, shared))
        assert len(one.rows)
        assert np.array_equal(one.rows, other.rows), detail
        assert np.array_equal(one.values, other.values), detail
    assert alone.operators == shared.operators
    assert -1 not in alone.columns["correlation"][alone.of(RowKind.LAUNCH)]


@pytest.mark.parametrize("key", ["correlation", "device", "stream", "bytes"])
@pytest.mark.parametrize("value", [[1], {"a": [1]}])
def test_an_argument_of_no_such_form_is_absent(tmp_path, key, value):
    whole, odd = Job(), Job()
    rows = events(whole)
    expected = breakdown([write(tmp_path / "whole.json", text(whole, rows))]).to_json()["ranks"]
    kernel = next(e for e in rows if e.get("cat") == "kernel")
    kernel["args"][key] = value
    found = breakdown([write(tmp_path / "odd.json", text(odd, rows))]).to_json()["ranks"]
    assert found[0]["span_us"] == expected[0]["span_us"]
    assert found[0]["busy_us"] == expected[0]["busy_us"]


def test_a_passed_over_file_does_not_command_the_terminal(tmp_path, caplog):
    write(tmp_path / "rank0.json", text(Job()))
    (tmp_path / "\x1b[31mrank1.json").write_text("no trace")
    breakdown([tmp_path])
    assert r"\x1b[31mrank1.json" in caplog.text
    assert "\x1b" not in caplog.text


def test_a_rank_for_no_file_is_refused(tmp_path):
    write(tmp_path / "a.json", text(Job()))
    with pytest.raises(InputError, match=r"no such file among the traces"):
        breakdown([tmp_path], ranks=["b.json=3"])


def test_other_files_in_a_folder_are_passed_over(tmp_path, caplog):
    write(tmp_path / "rank0.json", text(Job()))
    write(tmp_path / "config.json", '{"lr": 1}')
    assert len(breakdown([tmp_path]).to_json()["ranks"]) == 1
    assert "config.json" in caplog.text
    (tmp_path / "rank0.json").unlink()
    with pytest.raises(InputError, match="no file here is a trace"):
        breakdown([tmp_path])
    with pytest.raises(InputError, match=r"config\.json"):
        breakdown([tmp_path / "config.json"])


@pytest.mark.parametrize("junk", ['{"ph":[', '{"ph":"X","args":{"a":', "[[[[", '"', "{" * 50])
def test_hostile_repetition_ends_soon(tmp_path, junk):
    content = text(Job()).replace(
        '"traceEvents": [', '"traceEvents": [' + junk * (400_000 // len(junk)) + ",", 1
    )
    (result,) = breakdown([write(tmp_path / "a.json", content)]).to_json()["ranks"]
    assert any("could not be read" in why for why in result["incomplete"])


def _as_pairs(rows):
    """Write every slice as a beginning and an end."""
    out = []
    for row_ in rows:
        if row_["ph"] != "X":
            out.append(row_)
            continue
        end = round(row_["ts"] + row_["dur"], 3)
        begin = {key: value for key, value in row_.items() if key != "dur"}
        out.append({**begin, "ph": "B"})
        out.append({"ph": "E", "pid": row_["pid"], "tid": row_["tid"], "ts": end})
    return out


@pytest.mark.parametrize("seed", range(4))
def test_begin_and_end_pairs_are_slices_in_any_order(tmp_path, seed):
    job = Job()
    # Rows that overlap on their thread without enclosing each other can be slices only.
    rows = [
        r
        for r in events(job)
        if r.get("cat") in {"kernel", "cuda_runtime", "gpu_memcpy"} and "AllReduce" not in r["name"]
    ]
    wanted = breakdown([write(tmp_path / "rank0.json", text(job, rows))]).to_json()
    pairs = _as_pairs(rows)
    random.Random(seed).shuffle(pairs)
    found = breakdown([write(tmp_path / "rank0.json", text(job, pairs))]).to_json()
    for key in ("ranks", "kernels", "launches", "queues", "copies", "idle"):
        assert found[key] == wanted[key], key


def test_nested_named_and_lonely_ends(tmp_path):
    def edge(ph, at, name=None):
        kept = {} if name is None else {"name": name}
        return {"ph": ph, "cat": "kernel", "pid": 0, "tid": 7, "ts": at, **kept}

    rows = [
        edge("B", 100, "outer"), edge("B", 110, "inner"), edge("E", 120), edge("E", 150, "outer"),
        edge("E", 160), edge("B", 200, "never ends"),
        edge("B", 210, "empty"), edge("E", 210, "empty"),
    ]  # fmt: skip
    answer = breakdown([write(tmp_path / "rank0.json", text(Job(base=False), rows))]).to_json()
    kernels = {row_["name"]: row_["total_us"] for row_ in answer["kernels"]}
    assert kernels == {"outer": 50.0, "inner": 10.0, "empty": 0.0}
    said = answer["ranks"][0]["incomplete"]
    assert "1 slices set aside: a beginning without an end" in said
    assert "1 slices set aside: an end without a beginning" in said
