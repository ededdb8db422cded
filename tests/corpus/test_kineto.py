"""Traces of other systems: figures to the precision that the corpus prints."""

import pytest

from kansoku.app.trace import breakdown, stragglers

WHOLE = {
    # span, busy, idle, compute, comm, comm∩compute: the corpus README, µs
    "nccl_data": (660551.005, 157500.014, 503050.991, 115655.847, 46876.493, 7317.025),
    "ns_resolution": (480029.179, 472454.441, 7574.738, 468153.602, 0.0, 0.0),
    "b200_eager": (84487.178, 11596.482, 72890.696, 10771.685, 21.953, 0.0),
}
DLRM = {
    0: (13009, 6590, 6419, 1034, 5798, 261),
    1: (18749, 12321, 6428, 1246, 11336, 280),
    2: (11350, 4304, 7046, 1068, 3492, 275),
    3: (18853, 10708, 8145, 1240, 9774, 324),
    4: (16589, 7702, 8887, 1126, 6587, 37),
    5: (16392, 7271, 9121, 1041, 6251, 40),
    6: (11410, 4359, 7051, 1051, 3558, 269),
    7: (10967, 2659, 8308, 1059, 1746, 166),
}


def figures(row):
    names = ("span_us", "busy_us", "idle_us", "compute_us", "comm_us", "overlap_us")
    return tuple(row[name] for name in names)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_files(corpus, name):
    row = breakdown([corpus / "kineto" / f"{name}.json.gz"]).to_json()["ranks"][0]
    assert figures(row) == WHOLE[name]
    assert row["incomplete"] == []
    assert row["exposed_comm_us"] == pytest.approx(row["comm_us"] - row["overlap_us"])


def test_memory_copies_stand_apart(corpus):
    row = breakdown([corpus / "kineto" / "b200_eager.json.gz"]).to_json()["ranks"][0]
    assert row["memory_us"] == 802.844


def test_eight_ranks_in_one_archive(corpus):
    answer = breakdown([corpus / "kineto" / "dlrm_8ranks.tar.gz"]).to_json()
    assert {row["rank"]: figures(row) for row in answer["ranks"]} == DLRM
    assert answer["missing_ranks"] == []


@pytest.mark.parametrize("name", ["cpu_only", "rank_non_gpu"])
def test_without_gpu_rows_no_figure_is_invented(corpus, name):
    answer = breakdown([corpus / "kineto" / f"{name}.json.gz"]).to_json()
    (row,) = answer["ranks"]
    assert set(figures(row)) == {None}
    assert any("no GPU rows" in why for why in row["incomplete"])
    assert answer["kernels"] == []
    assert answer["host"][0]["span_us"] > 0


def test_rocm_kernels_by_category(corpus):
    answer = breakdown([corpus / "kineto" / "mi250_rocm62.json.gz"]).to_json()
    assert sum(row["calls"] for row in answer["kernels"] if row["kind"] == "compute") == 14
    assert answer["copies"][0]["bytes"] == 2 * 2560  # ROCm writes it on the call
    assert any("rank unknown" in why for why in answer["ranks"][0]["incomplete"])


def test_two_ranks_of_128(corpus):
    answer = breakdown(sorted((corpus / "kineto").glob("sampled_rank-*.json.gz"))).to_json()
    assert answer["missing_ranks"] == list(range(2, 128))
    assert [row["busy_us"] for row in answer["ranks"]] == [547656.0, 580050.0]


def test_last_arrivals_of_the_eight_ranks(corpus):
    answer = stragglers([corpus / "kineto" / "dlrm_8ranks.tar.gz"]).to_json()
    assert [row["last_rank"] for row in answer["collectives"]] == [7, 7, 7, 7, 7, 5, 5, 4]
    assert [row["rank"] for row in answer["stragglers"]] == [7]
    assert max(row["end_spread_us"] for row in answer["arrivals"]) <= 7


def test_steps_and_the_rest_sum_to_the_whole(corpus):
    for path in sorted((corpus / "kineto").glob("*.gz")):
        answer = breakdown([path]).to_json()
        for row, outside in zip(answer["ranks"], answer["outside_steps"], strict=True):
            if row["busy_us"] is None:
                continue
            inside = sum(s["busy_us"] for s in answer["steps"] if s["rank"] == row["rank"])
            assert inside + outside["busy_us"] == pytest.approx(row["busy_us"], abs=0.002)
            assert row["busy_us"] + row["idle_us"] == pytest.approx(row["span_us"], abs=0.002)
            assert min(v for k, v in row.items() if k.endswith("_us")) >= 0
