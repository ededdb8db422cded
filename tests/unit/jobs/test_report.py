"""The report's figures by hand, and the published mix of a real cluster's year."""

import polars as pl
import pytest

from kansoku.app.jobs import report_json, report_view
from kansoku.formats.slurm import JOB_SCHEMA
from kansoku.jobs.report import report
from kansoku.jobs.runs import in_window, with_outcomes

H = 3600 * 10**9
DAY = 24 * H


def analyse(rows, since=0, until=1000 * DAY, **options):
    full = [{"cluster": "c", "job_id": str(r["raw_id"]), "state": "COMPLETED", **r} for r in rows]
    frame = pl.DataFrame(full, schema=JOB_SCHEMA, orient="row")
    ready = with_outcomes(in_window(frame.lazy(), since, until)).collect()
    return report(ready, since_ns=since, until_ns=until, **options)


def job(n, gpus, hours, state="COMPLETED", *, wait=0, submit=DAY, **more):
    return {
        "raw_id": n, "gpus": gpus, "nodes": max(gpus // 8, 1), "submit_ns": submit, "state": state,
        "eligible_ns": submit + wait * H // 2, "start_ns": submit + wait * H,
        "end_ns": submit + wait * H + round(hours * H), **more,
    }  # fmt: skip


def test_count_and_gpu_time_disagree_as_they_should():
    """One long cancelled job of 64 GPUs, nine short failures of one."""
    result = analyse(
        [job(1, 64, 100, "CANCELLED"), *[job(n, 1, 0.1, "FAILED") for n in range(2, 11)]]
    )
    answer = report_json(result)
    assert answer["outcomes"]["by_count"]["FAILED"] == {"jobs": 9, "share": 0.9}
    assert answer["outcomes"]["by_gpu_time"]["CANCELLED"]["share"] == pytest.approx(6400 / 6400.9)
    assert sum(s["job_share"] for s in answer["sizes"]) == pytest.approx(1)
    assert sum(s["gpu_hour_share"] for s in answer["sizes"]) == pytest.approx(1)
    small = answer["sizes"][0]
    assert (small["gpus_min"], small["gpus_max"], small["jobs"], small["failed_share"]) == (
        1,
        1,
        9,
        1,
    )


def test_json_has_the_contract_keys():
    answer = report_json(analyse([job(1, 8, 1)]))
    assert answer["schema"] == "kansoku.jobs.report/1"
    assert {"window", "jobs", "quarantined", "outcomes", "sizes", "waits"} <= set(answer)
    assert {
        "gpus_min", "gpus_max", "jobs", "job_share", "gpu_hours", "gpu_hour_share", "failed_share",
    } <= set(answer["sizes"][0])  # fmt: skip


def test_waits_felt_and_planned():
    result = analyse([job(n, 8, 1, wait=w) for n, w in enumerate((1, 2, 3), 1)])
    (row,) = result.waits
    assert (row.started, row.felt_p50_s, row.planned_p50_s) == (3, 7200, 3600)
    assert row.felt_p95_s == pytest.approx(7200 + 0.9 * 3600)


def test_utilisation_is_a_median_over_jobs():
    known = pl.DataFrame(
        {"raw_id": [1, 2, 3], "submit_ns": [DAY] * 3, "utilisation": [0.2, 0.9, 1.0]}
    )
    result = analyse([job(n, 8, 1) for n in range(1, 5)], utilisation=known)
    (row,) = result.sizes
    assert (row.utilisation_p50, row.utilisation_jobs, row.jobs) == (0.9, 3, 4)


def test_phases_find_the_week_the_mix_changed():
    """20 weeks of 8-GPU jobs, then 20 weeks of 256-GPU jobs: one change, at week 20."""
    rows = []
    for week in range(40):
        size = 8 if week < 20 else 256
        rows += [job(week * 10 + k, size, 5, submit=(week * 7 + k) * DAY) for k in range(7)]
    result = analyse(rows, until=40 * 7 * DAY)
    assert [p.from_ns // (7 * DAY) for p in result.phases] == [0, 20]
    assert result.phases[0].mix == {"5–8": 1.0}
    assert result.phases[1].mix == {"129–256": 1.0}


def test_nothing_on_gpus_is_said_not_divided_by():
    result = analyse([job(1, 0, 1)])
    assert result.sizes[0].gpu_hour_share is None
    assert "AccountingStorageTRES" in result.notes[0]
    assert report_view(result).blocks
