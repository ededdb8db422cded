"""Run the reference pre-training over sizes and batches, observed; sum it up as MLPerf would."""

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from kansoku.app.report import report
from kansoku.app.run import run
from kansoku.bench.edge.pretrain_flags import pretrain_parser, pretrain_problem
from kansoku.bench.scaling import Measurement
from kansoku.bench.score import RunScore, score_run
from kansoku.catalog.mlperf import benchmark_rule
from kansoku.errors import InputError, PlatformError
from kansoku.formats.mllog import read_log
from kansoku.model import Mfu
from kansoku.view import Block, Column, Facts, Sentence, Table, Tone, View

__all__ = ["BenchRun", "PretrainCase", "PretrainResult", "bench_run", "sbatch_script"]

SCHEMA = "kansoku.bench.run/1"
_EDGE = Path(__file__).parent.parent / "bench" / "edge"
_SCRIPT, _BOUND = _EDGE / "pretrain.py", _EDGE / "bound.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainCase:
    """One size: nodes, local ranks, batch, and what else the script is told."""

    nodes: int
    ranks_per_node: int
    global_batch: int
    arguments: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """Folder name of the case."""
        return f"n{self.nodes}x{self.ranks_per_node}-b{self.global_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainResult:
    """What one case gave."""

    case: PretrainCase
    score: RunScore
    mfu: Mfu | None
    mfu_reason: str | None
    step_ms: float | None
    """Median step of the observed run."""
    verdict: str
    """Of the straggler search: found, none or unknown."""
    folder: Path
    exit_code: int
    hosts: tuple[str, ...]
    """Nodes that the ranks ran on."""
    slurm_job: str | None = None
    """The job that ran it, where Slurm did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """All cases with the environment they ran in."""

    results: tuple[PretrainResult, ...]
    environment: dict[str, str] = field(default_factory=dict)
    unfinished: tuple[str, ...] = ()
    """Sentences: cases that gave no result, and why."""

    def measurements(self) -> list[Measurement]:
        """Return the successful cases for ``bench scaling``."""
        return [
            Measurement(
                nodes=r.case.nodes,
                gpus=r.case.ranks,
                minutes=r.score.minutes,
                tokens=r.score.tokens,
                tokens_per_s_per_gpu=(
                    r.score.tokens_per_s / r.case.ranks if r.score.tokens_per_s else None
                ),
                mfu=None if r.mfu is None else r.mfu.value,
                source=str(r.folder),
            )
            for r in self.results
            if r.score.status == "success" and r.score.minutes
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer."""
        return {
            "schema": SCHEMA,
            "label": "unverified",
            "environment": self.environment,
            "unfinished": list(self.unfinished),
            "runs": [
                {
                    "nodes": r.case.nodes,
                    "ranks": r.case.ranks,
                    "global_batch_size": r.case.global_batch,
                    "minutes": r.score.minutes,
                    "status": r.score.status,
                    "samples": r.score.samples,
                    "tokens": r.score.tokens,
                    "tokens_per_s": r.score.tokens_per_s,
                    "evaluation_share": r.score.evaluation_share,
                    "step_ms": r.step_ms,
                    "mfu": None if r.mfu is None else r.mfu.to_json(),
                    "mfu_reason": r.mfu_reason,
                    "stragglers": r.verdict,
                    "exit_code": r.exit_code,
                    "hosts": list(r.hosts),
                    "slurm_job": r.slurm_job,
                    "run": str(r.folder),
                    "mllog": str(r.folder.parent / f"{r.folder.name}.log"),
                }
                for r in self.results
            ],
        }

    def view(self) -> View:
        """Return what a person reads."""
        names = (
            "nodes", "ranks", "batch", "minutes", "samples", "tokens/s", "step ms", "eval %",
            "MFU %",
        )  # fmt: skip
        rows = [
            (
                r.score.status,
                r.case.nodes,
                r.case.ranks,
                r.case.global_batch,
                _text(r.score.minutes, 3),
                _text(r.score.samples, 0),
                _text(r.score.tokens_per_s, 0),
                _text(r.step_ms, 1),
                _text(_percent(r.score.evaluation_share), 1),
                _text(_percent(None if r.mfu is None else r.mfu.value), 1),
            )
            for r in self.results
        ]
        blocks: list[Block] = [
            Facts(items=list(self.environment.items())),
            Table(
                title="Reference pre-training",
                columns=[Column(title="status"), *(Column(title=n, numeric=True) for n in names)],
                rows=rows,
                tones=[
                    Tone.PLAIN if r.score.status == "success" else Tone.BAD for r in self.results
                ],
            ),
        ]
        blocks += [Sentence(text=text, tone=Tone.BAD) for text in self.unfinished]
        blocks += [
            Sentence(text=f"{r.case.name}: no MFU: {r.mfu_reason}", tone=Tone.NOTICE)
            for r in self.results
            if r.mfu is None and r.mfu_reason
        ]
        known = next((r.mfu for r in self.results if r.mfu is not None), None)
        if known is not None:
            blocks.append(
                Sentence(text=f"MFU: {known.convention}, peak {known.peak_source}", tone=Tone.MUTED)
            )
        blocks.append(
            Sentence(text="Result not verified by MLCommons Association.", tone=Tone.MUTED)
        )
        return View(title="Benchmark run", blocks=blocks)


def _text(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _environment(*, submitted: bool) -> dict[str, str]:
    """Return the facts of this machine: of one that only submits, what its jobs share with it."""
    facts = {"submitted from" if submitted else "host": platform.node()}
    if not submitted:
        facts |= {"kernel": platform.release(), "cores": str(os.cpu_count())}
    facts["python"] = platform.python_version()
    for package in ("torch", "kansoku"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _training(case: PretrainCase, mllog: Path) -> list[str]:
    batch = ["--global-batch", str(case.global_batch)]
    return [str(_SCRIPT), *batch, "--mllog", str(mllog), *case.arguments]


def _command(case: PretrainCase, mllog: Path) -> list[str]:
    """Return the local launch of a case, which does not outlive this process."""
    return [
        sys.executable, str(_BOUND), str(os.getpid()),
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={case.ranks_per_node}", *_training(case, mllog),
    ]  # fmt: skip


def sbatch_script(case: PretrainCase, out: Path, options: Sequence[str] = ()) -> str:
    """Return the batch script of a case: one torchrun a node, observed.

    ``options`` come after the defaults, one ``#SBATCH`` line each, and sbatch takes the last word.
    """
    folder = (out / case.name).absolute()
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={case.nodes}",
        f"--nproc-per-node={case.ranks_per_node}", *_training(case, Path(f"{folder}.log")),
    ]  # fmt: skip
    observed = [sys.executable, "-m", "kansoku", "run", "--out", str(folder), "--", *torchrun]
    lines = "\n".join(
        f"#SBATCH {option}"
        for option in (
            "--job-name=kansoku-bench",
            f"--nodes={case.nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={case.ranks_per_node}",
            *options,
        )
    )
    # Slurm's own address of the first node, since a node's name need not resolve; a port of the
    # job's own, below those the kernel hands out, since jobs may share a node. Ranks follow the
    # order of the nodes. srun hears of --cpus-per-task only by its own variable (since 22.05), and
    # one torchrun that fails must not leave the others waiting for it. torchrun reads PET_…
    return f"""#!/bin/bash
{lines}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
export PET_MASTER_ADDR=${{address:-$first}} PET_MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun --kill-on-bad-exit=1 bash -c 'PET_NODE_RANK=$SLURM_NODEID exec "$0" "$@"' \\
  {shlex.join(observed)}
"""


def _submit(case: PretrainCase, out: Path, options: Sequence[str]) -> tuple[int, str | None]:
    """Submit a case and wait for its end; return exit code and job."""
    script = out / f"{case.name}.sh"
    try:
        script.write_text(sbatch_script(case, out, options), encoding="utf-8")
    except OSError as error:
        raise PlatformError(
            f"cannot be written: {error.strerror or error}", where=str(script), remedy="--out"
        ) from None
    try:
        answer = subprocess.run(
            ["sbatch", "--wait", "--parsable", "-o", str(out / f"{case.name}.out"), str(script)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise PlatformError("no sbatch here", remedy="run where Slurm's commands are") from None
    except KeyboardInterrupt:
        raise PlatformError(
            "interrupted while waiting; the job goes on in Slurm",
            where=case.name,
            remedy="scancel --user=$USER --name=kansoku-bench ends it; bench score reads its log",
        ) from None
    job = answer.stdout.strip().partition(";")[0]
    if not job:
        raise PlatformError(
            f"sbatch: {answer.stderr.strip()}", remedy="the options given with --sbatch"
        )
    return answer.returncode, job


def _one(
    case: PretrainCase, out: Path, sbatch: Sequence[str] | None, say: Callable[[str], None] | None
) -> PretrainResult:
    folder, mllog = out / case.name, out / f"{case.name}.log"
    job, said = None, "its own output says why"
    if sbatch is not None:
        if say is not None:
            say(f"{case.name}: submitted to Slurm, waiting for its end\n")
        code, job = _submit(case, out, sbatch)
        said = f"the job's output: {out / case.name}.out"
    else:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        code = run(
            _command(case, mllog), out=folder, base_environment=environment, say=say
        ).exit_code
    if not mllog.exists():
        raise PlatformError(
            f"the training wrote no log (exit code {code})", where=case.name, remedy=said
        )
    seen = report(folder)
    median_ns = seen.throughput.median_step_ns
    return PretrainResult(
        case=case,
        score=score_run(read_log(mllog), benchmark_rule("kansoku_pretrain")),
        mfu=seen.mfu,
        mfu_reason=seen.mfu_reason,
        step_ms=None if median_ns is None else median_ns / 1e6,
        verdict=seen.stragglers.verdict.value,
        folder=folder,
        exit_code=code,
        hosts=tuple(sorted({rank.node for rank in seen.run.facts.ranks})),
        slurm_job=job,
    )


class _Flags(argparse.ArgumentParser):
    """A parser whose complaint is an error of ours."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"flags of the training: {message}", remedy="kansoku bench run --help")


def _check(case: PretrainCase, out: Path, *, scheduler: bool) -> None:
    """Refuse a case that cannot run, before any case has."""
    parser = _Flags(parents=[pretrain_parser()], add_help=False, allow_abbrev=False)
    settings = parser.parse_args(["--global-batch", str(case.global_batch), *case.arguments])
    if problem := pretrain_problem(settings, case.ranks):
        raise InputError(problem, where=case.name, remedy="flags of the training stand after --")
    if case.nodes > 1 and not scheduler:
        raise InputError(
            f"{case.nodes} nodes need a scheduler", remedy="--sbatch with Slurm's options"
        )
    folder = out / case.name
    if folder.exists() or (out / f"{case.name}.log").exists():
        raise InputError(f"{folder} exists already", remedy="another --out, or remove it")


def _stopped(result: PretrainResult) -> str | None:
    """Return why the series ends with this case: its log has no end, so something killed it."""
    if result.exit_code == 0 or result.score.status != "incomplete":
        return None
    return f"the training was ended before its end (exit code {result.exit_code})"


def bench_run(
    cases: Sequence[PretrainCase],
    *,
    out: Path,
    sbatch: Sequence[str] | None = None,
    say: Callable[[str], None] | None = None,
) -> BenchRun:
    """Run every case, observed, below ``out``; with ``sbatch`` through Slurm.

    A case that leaves no log, Ctrl-C and SIGTERM end the series; what had run by then is kept.
    Raises InputError for cases that cannot run here, before the first has run, and PlatformError
    where the first training leaves no log.
    """
    if not cases:
        raise InputError("no case to run", remedy="--ranks and --batch")
    cases = list(dict.fromkeys(cases))
    for case in cases:
        _check(case, out, scheduler=sbatch is not None)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot be made: {error.strerror or error}", where=str(out), remedy="another --out"
        ) from None
    results: list[PretrainResult] = []
    unfinished: list[str] = []
    for number, case in enumerate(cases):
        try:
            results.append(_one(case, out, sbatch, say))
            why = _stopped(results[-1])
        except PlatformError as error:
            if not results:
                raise
            why = str(error)
        if why is not None:
            unfinished.append(f"{case.name}: {why}")
            unfinished += [f"{other.name}: not run" for other in cases[number + 1 :]]
            break
    environment = _environment(submitted=sbatch is not None)
    return BenchRun(results=tuple(results), environment=environment, unfinished=tuple(unfinished))
