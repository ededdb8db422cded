"""The report joined: store, run folder, spans by node, driver counters; flags."""

import threading

import polars as pl
import pytest

from kansoku.app import burst
from kansoku.app.burst import line_rates, report, report_json, report_view
from kansoku.app.store import open_store
from kansoku.burst.detect import Burst, PortWindow
from kansoku.burst.edge.ports import Port
from kansoku.burst.edge.sampler import Sampler
from kansoku.burst.rows import PortBursts, burst_rows, window_rows
from kansoku.catalog import load_cluster
from kansoku.cli.burst_watch import command as watch_command
from kansoku.errors import InputError
from kansoku.formats.run_directory import RunData
from kansoku.model import RankFacts, RunFacts, table_schema

MS = 1_000_000
T0 = 1_767_225_600_000_000_000
RATE = 125_000_000  # 1 Gb/s


def port_bursts(node, at_ms, size=1_000_000):
    found = [
        Burst(
            start_ns=T0 + ms * MS, duration_ns=8 * MS, peak_ratio=1.0, mean_ratio=1.0, bytes=size,
            samples=8, raw=((-MS, 0.0), (MS, 1.0)), beside={"tx_dropped": 2},
        )
        for ms in at_ms
    ]  # fmt: skip
    window = PortWindow(
        start_ns=T0, end_ns=T0 + 10_000 * MS, samples=9990, missed=10, bytes=2 * size * len(found),
        burst_bytes=size * len(found), bursts=len(found), observed_ns=10_000 * MS, peak_ratio=1.0,
        beside={"tx_dropped": 2 * len(found)},
    )  # fmt: skip
    return PortBursts(
        node=node, port="mlx5_0", direction="transmit", line_rate_bytes_per_s=RATE,
        sampling_ns=MS, window=window, bursts=found,
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    found = [port_bursts("n0", [100, 200, 300, 400]), port_bursts("n1", [500])]
    opened = open_store(tmp_path / "store")
    opened.commit({"bursts": burst_rows(found), "metrics": window_rows(found)})
    opened.close()
    return tmp_path / "store"


def span(rank, name, kind, start_ms, length_ms, group=None):
    return {"run": "r", "rank": rank, "step": 1, "kind": kind, "name": name, "group": group,
            "start_ns": T0 + start_ms * MS, "duration_ns": length_ms * MS}  # fmt: skip


@pytest.fixture
def run(monkeypatch):
    """A run of two ranks on two nodes; rank 1's all_gather must not explain node 0's bursts."""
    rows = [
        span(0, "backward", "backward", 90, 260),
        span(0, "all_reduce", "collective", 95, 20, "dp"),
        span(0, "all_reduce", "collective", 195, 20, "dp"),
        span(1, "all_gather", "collective", 290, 20, "tp"),
        span(1, "all_gather", "collective", 495, 20, "tp"),
    ]
    ranks = tuple(
        RankFacts(rank=n, local_rank=0, world_size=2, node=f"n{n}", pid=n, device=None,
                  torch_version=None, python_version=None)
        for n in (0, 1)
    )  # fmt: skip
    facts = RunFacts(
        run="r", command=(), start_ns=T0, end_ns=T0 + 1000 * MS, exit_code=0, slurm_job=None,
        nodes=("n0", "n1"), ranks=ranks,
    )  # fmt: skip

    class Read:
        spans = pl.DataFrame(rows, schema=table_schema("spans"))

    Read.facts = facts
    monkeypatch.setattr("kansoku.formats.run_directory.read_run", lambda _: Read)
    assert {"facts", "spans"} <= set(RunData.__dataclass_fields__)
    return "run-folder"


def test_each_nodes_bursts_are_laid_to_its_own_ranks(store, run):
    answer = report_json(report(run, store=store))
    causes = {(c["collective"], c["group"]): c["bursts"] for c in answer["collectives"]}
    # 100 and 200 ms: all_reduce; 300 (phase backward) and 400 ms: none on n0; 500 ms on n1.
    assert causes[("all_reduce", "dp")] == 2
    assert causes[("all_gather", "tp")] == 1
    assert sum(c["bursts"] for c in answer["collectives"] if c["collective"] is None) == 2
    phases = {c["phase"]: c["bursts"] for c in answer["collectives"] if c["collective"] is None}
    assert phases == {"backward": 1, None: 1}


def test_figures_by_hand_in_the_order_of_the_format(store):
    answer = report_json(report(store=store, since="2026-01-01T00:00:00+00:00"))
    n0, n1 = answer["ports"]
    assert list(n0)[:9] == [
        "node", "port", "direction", "bursts", "duration_ms", "peak_ratio", "mean_ratio",
        "bytes_in_bursts_ratio", "missed_ratio",
    ]  # fmt: skip
    assert (n0["node"], n0["bursts"], n1["bursts"]) == ("n0", 4, 1)
    assert n0["duration_ms"] == {"p50": 8.0, "p90": 8.0, "max": 8.0}
    assert n0["gap_ms"] == {"p50": 92.0, "p90": 92.0, "max": 92.0}
    assert n0["bytes_in_bursts_ratio"] == 0.5
    assert n0["mean_ratio"] == pytest.approx(8e6 / 10 / RATE)
    assert n0["missed_ratio"] == 0.001
    assert n0["beside"] == {"tx_dropped": 8}
    assert n1["gap_ms"]["p50"] is None
    assert answer["verdict"] == "found"
    only = report_json(report(store=store, since="2026-01-01T00:00:00+00:00", node="n1"))
    assert [port["node"] for port in only["ports"]] == ["n1"]


def test_the_view_says_what_grew_beside(store):
    view = report_view(report(store=store, since="2026-01-01T00:00:00+00:00"))
    texts = [getattr(block, "text", "") for block in view.blocks]
    assert any("tx_dropped +8" in text for text in texts)
    assert any("5 bursts above 50% of line rate" in text for text in texts)


def test_nothing_watched_is_unknown_not_none(tmp_path):
    answer = report_json(report(store=tmp_path / "empty"))
    assert (answer["verdict"], answer["ports"]) == ("unknown", [])


def test_line_rates_of_flags_and_cluster_file():
    cluster = load_cluster("sakuraone-h100")
    node = cluster.nodes[0]
    rates = line_rates(["eth0=2.5"], cluster, node.name)
    assert rates["eth0"] == 2.5e9
    assert all(
        rates[nic.device] == nic.line_rate_bits_per_s
        for nic in node.kind.nics
        if nic.line_rate_bits_per_s
    )
    assert line_rates([], cluster, "stranger") == {}
    for text in ("eth0", "eth0=fast", "=1", "eth0=0"):
        with pytest.raises(InputError, match="NAME=GBPS"):
            line_rates([text])


def test_pause_frames_of_the_driver_stand_beside(tmp_path, monkeypatch):
    net = tmp_path / "net" / "ens1" / "device"
    net.mkdir(parents=True)
    (net / "driver").symlink_to("/bus/pci/drivers/mlx5_core")
    (tmp_path / "infiniband" / "mlx5_0" / "device" / "net" / "ens1").mkdir(parents=True)
    counters = {"rx_prio3_pause": 7, "rx_discards_phy": 1, "rx_bytes": 99, "ch0_events": 5}
    monkeypatch.setattr(burst, "_statistics", lambda: lambda _: counters)
    expected = {"rx_prio3_pause": 7, "rx_discards_phy": 1}
    assert burst._driver_counters("mlx5_0", root=tmp_path) == expected
    assert burst._driver_counters("ens1", root=tmp_path) == expected
    assert burst._driver_counters("veth0", root=tmp_path) == {}


def test_a_watch_without_a_time_goes_on_until_it_is_stopped(tmp_path):
    files = {side: tmp_path / side for side in ("receive", "transmit")}
    for file in files.values():
        file.write_text("1000\n")
    port = Port(name="p", line_rate_bits_per_s=8e9, rate_source="given", files=files)
    stop = threading.Event()

    class Counting(Sampler):
        polls = 0

        def poll(self):
            self.polls += 1
            if self.polls == 4:
                stop.set()
            return super().poll()

    sampler = Counting([port], node="n", real_time=False, native=False)
    burst.watch(sampler, stop=stop)
    assert sampler.polls > 4


def test_a_watch_ends_when_its_ports_have_gone():
    gone = Port(name="gone0", line_rate_bits_per_s=1e9, rate_source="given", index=999_999)
    sampler = Sampler([gone], node="n", real_time=False)
    result = burst.watch(sampler, clock=lambda: 0)
    assert result.notes[0].startswith("gone0 went away at ")
    assert "from then on nothing was read of it" in result.notes[0]
    assert result.verdict == "unknown"


@pytest.mark.parametrize("text", ["eth0=1.2.3", "eth0=.", "eth0=0", "eth0=1e3", "eth0", "=1"])
def test_a_line_rate_is_a_number_above_zero(text):
    with pytest.raises(InputError, match="is not a line rate"):
        line_rates([text])


@pytest.mark.parametrize("interval_s", [float("nan"), float("inf")])
def test_a_time_between_readings_is_a_number(interval_s):
    with pytest.raises(InputError, match="no time between readings"):
        burst.make_sampler("n", interval_s=interval_s)


def test_a_rate_for_a_port_that_is_not_watched_is_no_slip_of_the_pen_to_pass_over(monkeypatch):
    port = Port(name="nic", line_rate_bits_per_s=1e9, rate_source="given", index=1)
    monkeypatch.setattr(burst, "find_ports", lambda *_, **__: [port])
    with pytest.raises(InputError, match="nic1 is not among the ports to watch") as caught:
        watch_command(line_rate=["nic=1", "nic1=1"])
    assert caught.value.remedy == "they are nic"
