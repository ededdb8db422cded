"""Numbers against peers and past: who stands out, who does not, whatever the exporter's names."""

import polars as pl
import pytest

from kansoku.catalog.quantities import quantity_of
from kansoku.diagnose.edge.numbers import is_prometheus, read_numbers
from kansoku.diagnose.measures import MEASURE_COLUMNS, read_measures
from kansoku.diagnose.tables import measures_of_prometheus, measures_of_table
from kansoku.model import Domain

S = 1_000_000_000
T = 1_790_000_000 * S


def table(metric, value, *, nodes=4, devices=4, samples=40):
    rows = [
        (metric, f"n{n}", f"{d}", None, None, T + i * 15 * S, float(value(n, d, i)))
        for n in range(nodes) for d in range(devices) for i in range(samples)
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=MEASURE_COLUMNS, orient="row")


def test_a_clock_that_drops_on_one_gpu_is_named_with_its_time():
    frame = table("sm_clock_mhz", lambda n, d, i: 1200 if (n, d) == (2, 1) and i >= 20 else 1980)
    (seen,) = read_measures(frame)
    assert (seen.domain, seen.node, seen.device) == (Domain.GPU_HARDWARE, "n2", "1")
    assert seen.time_ns == pytest.approx(T + 20 * 15 * S, abs=20 * S)


@pytest.mark.parametrize(
    "metric", ["sm_clock_mhz", "temp_c", "power_w", "rx_discards_phy", "step_time_ms"]
)
def test_equal_peers_are_quiet(metric):
    assert read_measures(table(metric, lambda n, d, i: 100 + (n + 3 * d + i) % 3)) == []


@pytest.mark.parametrize(
    ("metric", "device", "domain"),
    [
        ("kansoku.gpu.pcie.width", "gpu4", Domain.GPU_HARDWARE),
        ("pcie.link.width.current", "4", Domain.GPU_HARDWARE),
        ("pcie.link.width.current", "00000000:18:00.0", Domain.GPU_HARDWARE),
        ("DCGM_FI_DEV_PCIE_LINK_WIDTH", "0000:18:00.0", Domain.GPU_HARDWARE),
        ("pcie_link_width", "mlx5_4", Domain.NETWORK),
        ("pcie_link_width", "nvme2", Domain.STORAGE),
        ("pcie_link_width", "0000:18:00.0", Domain.HOST),
    ],
)
def test_lost_lanes_are_first_the_devices_at_the_end_of_the_link(metric, device, domain):
    frame = table(metric, lambda n, d, i: 8 if (n, i >= 20) == (2, True) else 16, devices=1)
    (seen,) = read_measures(frame.with_columns(device=pl.lit(device)))
    assert (seen.component, seen.domain, seen.node) == ("pcie", domain, "n2")


def test_one_bad_sample_is_no_outlier():
    frame = table("sm_clock_mhz", lambda n, d, i: 300 if (n, d, i) == (1, 1, 9) else 1980)
    assert read_measures(frame) == []


def test_a_counter_counts_by_its_growth_not_by_its_history():
    old = table("rx_symbol_err_phy", lambda n, d, i: 5000 if n == 0 else 0)
    assert read_measures(old) == []
    grows = table("rx_symbol_err_phy", lambda n, d, i: 50 * i if (n, d) == (3, 0) else 7)
    (seen,) = read_measures(grows)
    assert (seen.domain, str(seen.subject)) == (Domain.NETWORK, "nic:n3/0")


def test_storage_slow_for_all_clients_is_the_targets():
    frame = table("read_latency_ms", lambda n, d, i: (2 if i < 20 else 60) + (n + i) % 2, devices=1)
    frame = frame.with_columns(target=pl.lit("/scratch"), device=pl.lit(None, pl.String))
    (seen,) = read_measures(frame)
    assert (seen.domain, str(seen.subject)) == (Domain.STORAGE, "storage:/scratch")


def test_a_node_that_falls_silent_alone():
    frame = table("temp_c", lambda n, d, i: 60)
    frame = frame.filter((pl.col("node") != "n3") | (pl.col("time_ns") < T + 200 * S))
    assert [o.node for o in read_measures(frame)] == ["n3"]


def test_no_number_in_the_loss():
    frame = table("loss", lambda n, d, i: float("nan") if i == 30 else 2.0, nodes=1, devices=1)
    assert [o.rule for o in read_measures(frame)] == ["app-nan-loss"]


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        ("DCGM_FI_DEV_SM_CLOCK", "clock of the GPU"),
        ("clocks.current.sm [MHz]", "clock of the GPU"),
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "failed row remapping"),
        ("pcie.link.width.current", "PCIe link width or generation"),
        ("node_memory_MemAvailable_bytes", "host memory left"),
        ("np_cnp_sent", "congestion marks"),
        ("kansoku.gpu.throttle.active", "clocks held down by heat or power"),
        ("pcie.link.width.max", "limit"),
    ],
)
def test_names_of_any_exporter(name, quantity):
    found = quantity_of(name)
    assert found is not None
    assert found.name == quantity


def test_nvidia_smis_csv_with_units_words_and_masks():
    lazy = pl.LazyFrame(
        {
            "timestamp": ["2026/03/04 05:06:07.250"],
            "index": [" 3"],
            "clocks.current.sm [MHz]": ["1410 MHz"],
            "clocks_throttle_reasons.active": ["0x0000000000000044"],
            "clocks_throttle_reasons.hw_thermal_slowdown": ["Active"],
        }
    )
    rows = {r["metric"]: r for r in measures_of_table(lazy, node="n7").to_dicts()}
    clock = rows["clocks.current.sm [MHz]"]
    assert (clock["node"], clock["device"], clock["value"]) == ("n7", "3", 1410.0)
    assert clock["time_ns"] == 1772600767250000000  # date -u -d '2026-03-04 05:06:07.25' +%s%N
    # The power cap's bit (4) is no fault; the thermal one (0x40) is.
    assert rows["clocks_throttle_reasons.active"]["value"] == 64.0
    assert rows["clocks_throttle_reasons.hw_thermal_slowdown"]["value"] == 1.0


def test_prometheus_text():
    text = (
        "# HELP DCGM_FI_DEV_SM_CLOCK MHz\n"
        'DCGM_FI_DEV_SM_CLOCK{gpu="3",UUID="GPU-1",Hostname="n1",modelName="H100"} 1980\n'
        "not a sample\n"
    )
    (row,) = measures_of_prometheus(text).to_dicts()
    assert (row["metric"], row["node"], row["device"]) == ("DCGM_FI_DEV_SM_CLOCK", "n1", "3")


def test_what_was_counted_over_a_devices_life_says_less_than_what_is_new():
    """One scrape of an aggregate does not say when."""
    now, life = (
        read_measures(measures_of_prometheus(f'DCGM_FI_DEV_ECC_DBE_{kind}_TOTAL{{gpu="1"}} 1\n'))[0]
        for kind in ("VOL", "AGG")
    )
    assert life.strength < now.strength / 2


def test_samples_are_known_by_their_form_not_by_the_files_name(tmp_path):
    scrape, log = tmp_path / "dcgm.txt", tmp_path / "rank0.txt"
    scrape.write_text('# TYPE temp_c gauge\ntemp_c{gpu="0",Hostname="b31"} 41\n\nup{job="x"} 1.0\n')
    log.write_text('temp_c{gpu="0"} 41\nstep 3 loss 2.1\n')
    assert is_prometheus(scrape)
    assert not is_prometheus(log)
    assert read_numbers(scrape).row(0)[1] == "b31"
