"""A series of pre-trainings: refused before the first one runs, kept when a later one fails."""

import dataclasses

import pytest

import kansoku.app.bench_run as bench
from kansoku.bench.score import score_run
from kansoku.errors import InputError, PlatformError
from kansoku.formats.mllog import read_log


def case(ranks=2, batch=16, nodes=1, *arguments):
    return bench.PretrainCase(
        nodes=nodes, ranks_per_node=ranks, global_batch=batch, arguments=arguments
    )


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Stand in for the trainings: the names of those that ran, and what became of them."""
    log = tmp_path / "log"
    log.write_text("")
    names, fates = [], {}
    empty = score_run(read_log(log), None)

    def one(case, out, sbatch, say):
        names.append(case.name)
        fate = fates.get(case.name, "success")
        if fate == "no log":
            raise PlatformError("the training wrote no log (exit code 1)")
        return bench.PretrainResult(
            case=case, score=dataclasses.replace(empty, status=fate, minutes=1.0), mfu=None,
            mfu_reason="a reason", step_ms=1.0, verdict="none", folder=out / case.name,
            exit_code=0 if fate in {"success", "aborted"} else 1, hosts=("here",),
        )  # fmt: skip

    monkeypatch.setattr(bench, "_one", one)
    return names, fates


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (case(2, 16, 2), "2 nodes need a scheduler"),
        (case(2, 7), "n1x2-b7: global batch 7 does not divide"),
        (case(2, 16, 1, "--tp", "3"), "--tp 3 does not divide 2 ranks"),
        (case(2, 16, 1, "--bogus"), "flags of the training: unrecognized arguments: --bogus"),
        (case(2, 16, 1, "--steps", "many"), "invalid int value: 'many'"),
    ],
)
def test_a_bad_last_case_costs_no_first_one(ran, tmp_path, last, words):
    with pytest.raises(InputError, match=words):
        bench.bench_run([case(1), last], out=tmp_path / "out")
    assert ran[0] == []
    assert not (tmp_path / "out").exists()


def test_an_earlier_result_is_never_written_over(ran, tmp_path):
    (tmp_path / "n1x2-b16").mkdir()
    with pytest.raises(InputError, match="exists already"):
        bench.bench_run([case(1), case(2)], out=tmp_path)
    assert ran[0] == []


def test_a_folder_that_cannot_be_made(ran, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be made: .*another --out"):
        bench.bench_run([case()], out=tmp_path / "file")
    assert ran[0] == []


def test_the_same_case_twice_runs_once(ran, tmp_path):
    bench.bench_run([case(), case()], out=tmp_path)
    assert ran[0] == ["n1x2-b16"]


@pytest.mark.parametrize(
    ("fate", "words"), [("no log", "wrote no log"), ("incomplete", "ended before its end")]
)
def test_what_ran_before_a_failure_is_kept(ran, tmp_path, fate, words):
    names, fates = ran
    fates["n1x2-b16"] = fate
    result = bench.bench_run([case(1), case(2), case(4)], out=tmp_path)
    assert names == ["n1x1-b16", "n1x2-b16"]
    assert result.results[0].score.status == "success"
    assert words in result.unfinished[0]
    assert result.unfinished[1] == "n1x4-b16: not run"
    assert result.to_json()["unfinished"] == list(result.unfinished)


def test_a_missed_target_does_not_end_the_series(ran, tmp_path):
    names, fates = ran
    fates["n1x1-b16"] = "aborted"
    assert bench.bench_run([case(1), case(2)], out=tmp_path).unfinished == ()
    assert len(names) == 2


def test_the_first_failure_is_an_error(ran, tmp_path):
    ran[1]["n1x2-b16"] = "no log"
    with pytest.raises(PlatformError, match="wrote no log"):
        bench.bench_run([case(2), case(4)], out=tmp_path)


def test_ctrl_c_while_slurm_works_says_how_to_end_the_job(monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("subprocess.run", interrupted)
    with pytest.raises(PlatformError, match=r"goes on in Slurm .*scancel --user="):
        bench.bench_run([case(2, 16, 2)], out=tmp_path, sbatch=[])
