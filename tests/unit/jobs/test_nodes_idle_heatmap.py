"""Lemons, free windows, fragmentation, heat maps and their PNG."""

import io
import itertools
import struct
import zlib
from dataclasses import replace

import httpx
import numpy as np
import polars as pl
import pytest

from kansoku.app.jobs import excluded_nodes, heatmap, heatmap_json, heatmap_png, heatmap_view
from kansoku.app.jobs.capacity import IdleAnswer, idle_view
from kansoku.errors import InputError, PlatformError
from kansoku.formats.slurm import NodeState, QueuedJob
from kansoku.jobs import idle
from kansoku.jobs.edge.promql import device_of, node_of, query_range
from kansoku.jobs.heatmap import (
    QUANTITIES,
    job_boxes,
    matrix_from_samples,
    synthetic_month,
    to_png,
)
from kansoku.jobs.nodes import node_health

H = 3600 * 10**9


def jobs_frame(rows):
    """rows: (node_list, hours, blamed)."""
    return pl.DataFrame(
        [
            {"node_list": n, "run_ns": round(h * H), "outcome": "FAILED" if b else "COMPLETED",
             "failed_node": None, "blamed": b}
            for n, h, b in rows
        ],
        schema_overrides={"failed_node": pl.String},
    )  # fmt: skip


def test_a_planted_lemon_is_found_and_busy_nodes_are_not():
    """40 nodes alike but c7, which fails six of its jobs; c1 runs ten times as much as others."""
    rows = [(f"c{n}", 5, k == 0 and n % 4 == 0) for n in range(1, 41) for k in range(10)]
    rows += [("c1", 5, k % 40 == 0) for k in range(90)]
    rows += [("c7", 5, True)] * 6 + [("c[7-8]", 5, True)] * 2
    found = node_health(jobs_frame(rows))
    assert [n.node for n in found if n.lemon] == ["c7"]
    assert found[0].node == "c7"
    assert found[0].blame == pytest.approx(7)
    assert found[0].score < 0.01
    busy = next(n for n in found if n.node == "c1")
    assert busy.jobs == 100
    assert busy.score > 0.1


def test_below_five_jobs_a_node_is_greyed_whatever_it_did():
    rows = [(f"c{n}", 5, False) for n in range(1, 10) for _ in range(10)] + [("c99", 1, True)] * 4
    found = node_health(jobs_frame(rows))
    last = found[-1]
    assert (last.node, last.greyed, last.lemon) == ("c99", True, False)


def test_users_exclusions_are_read_from_submit_lines():
    lines = pl.DataFrame(
        {
            "user": ["a", "b", "a", "c"],
            "submit_line": [
                "sbatch -x c[1-2] job.sh", "srun --exclude=c2 true", "sbatch --exclude c2 x",
                "sbatch --exclusive job.sh",
            ],
        }
    )  # fmt: skip
    assert excluded_nodes(lines) == {"c1": ["a"], "c2": ["a", "b"]}


def node(name, *, used=0, base="IDLE", flags=()):
    return NodeState(name=name, base=base, flags=flags, gpus=8, gpus_used=used, cpus=1,
                     cpus_idle=1, partitions=(), reason=None)  # fmt: skip


def queued(number, state, nodes, gpus, *, end=None, where=(), start=None, limit=None):
    return QueuedJob(raw_id=number, job_id=str(number), name=None, user="u", account=None,
                     partition=None, state=state, reason="Resources", nodes=nodes, gpus=gpus,
                     submit_ns=0, start_ns=start, end_ns=end, time_limit_s=limit, node_list=where,
                     excluded=(), restarts=0)  # fmt: skip


def test_free_windows_follow_time_limits_and_plans():
    nodes = [node("a"), node("b", base="ALLOCATED"), node("c", flags=("DRAIN",)), node("d")]
    queue = [
        queued(1, "RUNNING", 1, 8, end=5 * H, where=("b",), start=0),
        queued(2, "PENDING", 3, 24, start=6 * H, limit=7200),
    ]
    windows = idle.free_windows(nodes, queue, least=2, now_ns=1 * H)
    assert [(w.from_ns // H, w.until_ns and w.until_ns // H, w.nodes) for w in windows] == [
        (1, 6, 2), (8, None, 3),
    ]  # fmt: skip
    assert idle.idle_now(nodes, reserved=("d",)).idle == ("a",)


def test_scattered_gpus_do_not_fit_whole_nodes():
    nodes = [node(n, used=4, base="MIXED") for n in "abcd"]
    queue = [
        queued(1, "RUNNING", 1, 4, end=9 * H, where=("a",), start=0),
        queued(2, "RUNNING", 1, 4, end=5 * H, where=("b",), start=0),
        queued(3, "PENDING", 1, 8),
        queued(4, "PENDING", 4, 16),
        queued(5, "PENDING", 2, 16),
        queued(6, "PENDING", 3, 24),
    ]
    by_label = {f.label: f for f in idle.fits(nodes, queue, now_ns=H)}
    assert idle.idle_now(nodes).gpus_free == 16
    whole = by_label["job 3 (u)"]
    assert (whole.fits_now, whole.free_nodes, whole.starts_ns) == (False, 0, 5 * H)
    assert by_label["job 4 (u)"].fits_now
    assert by_label["job 5 (u)"].starts_ns == 9 * H
    assert by_label["job 6 (u)"].starts_ns is None


def test_idle_by_power_and_whose_gpus_idle():
    times = np.arange(4, dtype=np.int64) * H
    rows = (("a", "0"), ("a", "1"), ("b", "0"), ("b", "1"))
    values = np.array([[90, 90, 600, 90], [90, 90, 90, 90], [90, 500, 90, 90],
                       [np.nan, 500, 90, 90]], dtype=np.float32)  # fmt: skip
    windows = idle.power_windows(values, rows, times, H, below=150, least=2)
    assert [(w.from_ns // H, w.until_ns // H) for w in windows] == [(0, 1), (3, 4)]
    job = queued(9, "RUNNING", 2, 4, start=2 * H, end=99 * H, where=("a", "b"))
    (found,) = idle.idle_allocations(values, rows, times, H, [job], below=150, unit="W")
    assert (found.job_id, found.gpus, found.allocated) == ("9", 3, 4)


def read_png(data):
    """Decode our PNG by the standard alone: filters 0 and 2 of RGB."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body, size = 8, b"", None
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        chunk = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(
            kind + chunk
        )
        if kind == b"IHDR":
            size = struct.unpack(">II", chunk[:8])
        if kind == b"IDAT":
            body += chunk
        at += 12 + length
    width, height = size
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, width * 3 + 1)
    assert set(rows[:, 0]) == {2}
    return np.cumsum(rows[:, 1:], axis=0, dtype=np.uint8).reshape(height, width, 3)


def test_cells_are_means_and_missing_stays_missing():
    times = np.array([0, 1, 10, 11, 39], dtype=np.int64)
    series = [
        ("n2", "0", times, np.array([1.0, 3, 10, 20, 7])),
        ("n10", "1", times[:1], np.array([5.0])),
    ]
    matrix = matrix_from_samples(series, quantity=QUANTITIES["power"], since_ns=0, until_ns=40,
                                 columns=4, nodes=["n3"])  # fmt: skip
    assert matrix.rows == (("n2", "0"), ("n3", ""), ("n10", "1"))
    np.testing.assert_equal(matrix.values[0], np.array([2, 15, np.nan, 7], np.float32))
    assert np.isnan(matrix.values[1]).all()
    answer = heatmap_json(matrix)
    assert answer["values"][0] == [2, 15, None, 7]
    assert answer["values"][1] == [None] * 4


def test_jobs_are_framed_on_runs_of_their_nodes():
    matrix = synthetic_month(nodes=6, gpus=2, days=1, minutes=60)
    start = int(matrix.times_ns[0])
    jobs = pl.DataFrame(
        {"job_id": ["7"], "node_list": ["c[002-003,005]"], "start_ns": [start + 2 * H],
         "end_ns": [start + 5 * H], "gpus": [6]}
    )  # fmt: skip
    boxes = job_boxes(matrix, jobs)
    assert [(b.row_from, b.row_to, b.column_from, b.column_to) for b in boxes] == [
        (2, 5, 2, 4), (8, 9, 2, 4),
    ]  # fmt: skip


def test_png_is_a_png_of_that_map(tmp_path):
    matrix = replace(synthetic_month(nodes=20, gpus=8, days=2, minutes=30), boxes=())
    matrix.values[:80] = 100
    matrix.values[80:] = 600
    pixels = read_png(to_png(matrix))
    assert pixels.shape[0] > 160
    # Idle rows above are darker than busy rows below; ten pixels a row.
    bright = pixels[:, 100:-20].astype(int).sum(axis=2)
    assert bright[26 + 400].mean() < bright[26 + 1200].mean() / 2
    heatmap_png(matrix, tmp_path / "x.png")
    assert read_png((tmp_path / "x.png").read_bytes()).shape == pixels.shape
    assert io.BytesIO(to_png(matrix, width=300)).read(4) == b"\x89PNG"
    assert heatmap_view(matrix).blocks


@pytest.mark.parametrize(
    ("labels", "node_name", "device"),
    [
        ({"host.name": "c001", "hw.name": "gpu3"}, "c001", "3"),
        ({"Hostname": "c001.example.org", "gpu": "0"}, "c001", "0"),
        ({"instance": "10.0.0.7:9400", "gpu": "1"}, "10.0.0.7", "1"),
        ({"instance": "c002:9400", "UUID": "GPU-1"}, "c002", "GPU-1"),
        ({"gpu": "1"}, None, "1"),
    ],
)
def test_whose_series_it_is(labels, node_name, device):
    assert (node_of(labels), device_of(labels)) == (node_name, device)


def test_long_ranges_are_asked_in_parts():
    asked = []

    def answer(request):
        form = dict(p.split("=") for p in request.content.decode().split("&"))
        asked.append((int(form["start"]), int(form["end"])))
        result = [{"metric": {"host_name": "a", "gpu": "0"}, "values": [[int(form["start"]), "5"]]}]
        return httpx.Response(200, json={"status": "success", "data": {"result": result}})

    span = 25_000 * 60 * 10**9
    series = list(query_range("http://x/", "q", since_ns=0, until_ns=span, step_ns=60 * 10**9,
                              transport=httpx.MockTransport(answer)))  # fmt: skip
    assert len(asked) == len(series) == 3
    assert all(b[0] == a[1] + 60 for a, b in itertools.pairwise(asked))


def test_endpoints_that_fail_say_so():
    bad = httpx.MockTransport(
        lambda _: httpx.Response(422, json={"status": "error", "error": "no"})
    )
    none = httpx.MockTransport(lambda _: httpx.Response(502, text="<html>"))
    with pytest.raises(InputError, match="no"):
        list(query_range("http://x", "q", since_ns=0, until_ns=1, step_ns=1, transport=bad))
    with pytest.raises(PlatformError, match="query_range"):
        list(query_range("http://x", "q", since_ns=0, until_ns=1, step_ns=1, transport=none))


def test_without_a_store_nothing_is_created(tmp_path):
    matrix = heatmap(store=tmp_path / "none", jobs=False)
    assert not (tmp_path / "none").exists()
    assert "No GPU power" in heatmap_view(matrix).blocks[0].text


@pytest.mark.parametrize(("least", "words"), [(1, "1 node or more"), (2, "2 nodes or more")])
def test_the_screen_of_free_capacity_cuts_no_list_and_counts_rightly(least, words):
    """Twenty idle nodes: all are named, folded as Slurm writes them."""
    nodes = tuple(f"c{n:03}" for n in range(1, 21))
    now = idle.IdleNow(
        nodes=20, usable=20, idle=nodes, gpus=160, gpus_free=160, reserved=(), down=()
    )
    answer = IdleAnswer(
        time_ns=H, least=least, now=now,
        windows=(idle.FreeWindow(from_ns=H, until_ns=None, nodes=20),), power=None,
        allocations=None, fits=(), notes=(),
    )  # fmt: skip
    facts, windows = idle_view(answer).blocks[:2]
    assert dict(facts.items)["Idle"] == "c[001-020]"
    assert windows.title == f"{words} free, by Slurm's time limits"
    assert windows.rows[0][1] == "no end known"
