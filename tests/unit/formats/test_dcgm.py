"""DCGM exporter text: old and new names, sentinels, labels."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kansoku.catalog.metrics import metrics
from kansoku.formats.dcgm import FIELDS, is_sentinel, parse_dcgm, parse_exposition

GPU = '{gpu="3",UUID="GPU-aa",device="nvidia3"}'


def one(text):
    readings, blanks, bad = parse_dcgm(text)
    assert (blanks, bad) == (0, 0)
    (reading,) = readings
    return reading


def test_old_and_new_names_are_one_metric():
    new = one(f"DCGM_FI_DEV_POWER_USAGE{GPU} 612.5")
    old = one('dcgm_power_usage{gpu="3",uuid="GPU-aa"} 612.5')
    assert new.field is old.field
    assert (new.value, old.value, old.uuid) == (612.5, 612.5, "GPU-aa")


def test_the_newest_name_wins_where_both_are_there():
    text = f"DCGM_FI_DEV_BOARD_POWER{GPU} 1\nDCGM_FI_DEV_POWER_USAGE{GPU} 2\n"
    assert one(text).value == 2
    assert one("\n".join(reversed(text.splitlines()))).value == 2


def test_units():
    assert one(f"DCGM_FI_DEV_FB_USED{GPU} 1024").value == 2**30
    assert one(f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{GPU} 5000").value == 5
    assert one(f"DCGM_FI_DEV_SM_CLOCK{GPU} 1755").value == 1.755e9


# dcgm_fields.h: DCGM_INT32_BLANK, DCGM_INT64_BLANK, DCGM_FP64_BLANK and the NOT_* variants
@pytest.mark.parametrize(
    "blank",
    [0x7FFFFFF0, 0x7FFFFFF2, 0x7FFFFFFFFFFFFFF0, 0x7FFFFFFFFFFFFFF3, 140737488355328.0,
     140737488355330.0, math.nan, math.inf, 9223372036854775794],
)  # fmt: skip
def test_sentinels_are_missing(blank):
    assert is_sentinel(float(blank))
    readings, blanks, _ = parse_dcgm(f"DCGM_FI_DEV_GPU_TEMP{GPU} {blank}")
    assert (readings, blanks) == ([], 1)


@pytest.mark.parametrize("value", [0, 1, 97.5, 85520809984, 2**40, 10**15])
def test_plausible_values_are_no_sentinels(value):
    assert not is_sentinel(float(value))


def test_rates_labelled_as_counters_stay_rates():
    text = f"# TYPE DCGM_FI_PROF_NVLINK_TX_BYTES counter\nDCGM_FI_PROF_NVLINK_TX_BYTES{GPU} 7"
    reading = one(text)
    assert reading.field.is_rate
    assert metrics()[reading.field.metric].kind == "gauge"


def test_mig_instances_are_apart():
    text = "\n".join(
        f'DCGM_FI_DEV_FB_USED{{gpu="0",UUID="u",GPU_I_PROFILE="1g.10gb",GPU_I_ID="{i}"}} {i}'
        for i in (7, 8)
    )
    assert sorted(r.mig for r in parse_dcgm(text)[0]) == ["7", "8"]


def test_every_field_is_in_the_catalogue():
    for field in FIELDS:
        declared = metrics()[field.metric]
        assert {key for key, _ in field.labels} <= set(declared.attributes)


def test_labels_with_commas_quotes_and_braces():
    line = 'x{a="1,2",b="say \\"}\\" \\\\ \\n",} 3 1700000000000'
    assert list(parse_exposition(line)) == [("x", {"a": "1,2", "b": 'say "}" \\ \n'}, 3.0)]


@given(st.text() | st.from_regex(r"DCGM_FI_DEV_[A-Z_]+\{.*\} .*", fullmatch=True))
def test_any_text_is_survived(text):
    parse_dcgm(text)
