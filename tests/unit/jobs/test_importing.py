"""Importing files end to end: kinds of files, the command line, quarantine, same file twice."""

import json
import subprocess
import sys

import pytest

from kansoku.app import jobs as api
from kansoku.errors import InputError

HEAD = "JobIDRaw|JobID|Cluster|JobName|User|State|Submit|Start|End|AllocTRES|NodeList"
ROW = (
    "{n}|{n}|c|{name}|ann|{state}|2026-01-0{d}T00:00:00|2026-01-0{d}T00:00:05|2026-01-0{d}T01:00:05"
    "|gres/gpu=8,node=1|c001"
)


def export(path, *rows):
    path.write_text("\n".join([HEAD, *(ROW.format(**r) for r in rows)]) + "\n")
    return path


def row(n, name="x", state="COMPLETED", d=1):
    return {"n": n, "name": name, "state": state, "d": d}


def test_files_are_told_apart_and_twice_is_once(tmp_path, corpus):
    folder = corpus / "slurm"
    files = [folder / "sacct_all.json", folder / "sacct_core_parsable2.txt",
             folder / "slurm_sacctmgr_event.txt"]  # fmt: skip
    first = api.import_jobs(files, store=tmp_path, timezone="UTC")
    assert (first.jobs.new, first.steps.new, first.node_events.new) == (49, 70, 4)
    assert first.quarantined == ()
    again = api.import_jobs(files, store=tmp_path, timezone="UTC")
    assert (again.jobs.new, again.steps.new, again.node_events.new) == (0, 0, 0)
    answer = api.report_json(api.report(store=tmp_path))
    assert (answer["jobs"], answer["logical_runs"]) == (49, 46)


def test_json_and_text_give_the_same_report(tmp_path, corpus):
    answers = []
    for name in ("sacct_all.json", "sacct_all_parsable2.txt"):
        store = tmp_path / name
        api.import_jobs([corpus / "slurm" / name], store=store, timezone="UTC")
        answers.append(api.report_json(api.report(store=store)))
    assert rounded(answers[0]) == rounded(answers[1])


def rounded(value):
    """Sums of floats depend on the order of rows in the twelfth digit."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 9) if isinstance(value, float) else value


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_file_without_its_cluster_adds_nothing_twice(tmp_path, corpus, order):
    files = [corpus / "slurm" / n for n in ("sacct_all_parsable2.txt", "sacct_core_parsable2.txt")]
    for k in order:
        api.import_jobs([files[k]], store=tmp_path, timezone="UTC")
    frame = api.load_jobs(store=tmp_path).collect()
    assert frame.height == 49
    assert frame["cluster"].unique().to_list() == ["aisc"]


def test_quarantined_rows_are_named_and_kept_for_the_report(tmp_path):
    path = export(tmp_path / "a.txt", row(1), row(2, state="NONSENSE"))
    result = api.import_jobs([path], store=tmp_path, timezone="UTC")
    assert (result.jobs.new, result.quarantined_count) == (1, 1)
    kept = api.kept_quarantined(tmp_path)
    assert [(q.file, q.row) for q in kept] == [(str(path), 3)]
    api.import_jobs([path], store=tmp_path, timezone="UTC")
    assert len(api.kept_quarantined(tmp_path)) == 1
    answer = api.report_json(api.report(store=tmp_path), quarantined=kept)
    assert answer["quarantined"][0]["reason"].startswith("State")


def test_the_cluster_of_files_that_do_not_say(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("JobIDRaw|State|Submit\n1|FAILED|2026-01-01T00:00:00\n")
    api.import_jobs([path], store=tmp_path, timezone="UTC", cluster="mine")
    assert api.load_jobs(store=tmp_path, cluster="mine").collect()["cluster"].to_list() == ["mine"]
    with pytest.raises(InputError, match="no jobs of cluster 'other'"):
        api.load_jobs(store=tmp_path, cluster="other")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "nothing to import"),
        (["/nope"], "No such file"),
        (["--timezone", "Mars/Base", "{file}"], "no time zone"),
        (["--every", "60", "{file}"], "--live"),
    ],
)
def test_usage_errors_say_what_to_give(tmp_path, words, text):
    path = export(tmp_path / "a.txt", row(1))
    answer = kansoku(tmp_path, "import", *[w.format(file=path) for w in words])
    assert answer.returncode == 2
    assert text in answer.stderr


def kansoku(store, *words):
    return subprocess.run(
        [sys.executable, "-m", "kansoku", "jobs", *words, "--store", str(store)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_the_command_line(tmp_path):
    """Exit 1 for quarantined rows, JSON on stdout, pages where asked."""
    path = export(tmp_path / "a.txt", row(1, "a|b"), row(2, d=2), row(3, state="NONSENSE"))
    answer = kansoku(tmp_path, "import", str(path), "--timezone", "UTC", "--json")
    assert answer.returncode == 1
    said = json.loads(answer.stdout)
    assert (said["jobs"]["new"], said["repaired"], said["quarantined"][0]["row"]) == (2, 1, 4)
    page = tmp_path / "page.html"
    window = ("--since", "2026-01-02T00:00+00:00", "--until", "2026-01-03T00:00+00:00")
    answer = kansoku(tmp_path, "report", "--json", "--html", str(page), *window)
    assert json.loads(answer.stdout)["jobs"] == 1
    assert "<html" in page.read_text(encoding="utf-8").lower()
    empty = kansoku(tmp_path / "none", "report")
    assert (empty.returncode, "jobs import" in empty.stderr) == (2, True)


@pytest.mark.parametrize("junk", [b"[]", b"\x00\xff\x8a junk", b"\x1f\x8b\x08\x00"])
def test_a_file_of_another_kind_is_named(tmp_path, junk):
    file = tmp_path / "junk"
    file.write_bytes(junk)
    with pytest.raises(InputError, match=r"junk: the first line holds no sacct column names"):
        api.import_jobs([file], store=tmp_path / "store")
