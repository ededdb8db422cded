"""Drain a bad node, put a reserved one in, requeue the job; a dry run unless told."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag, DryRunFlag, JsonFlag, SlurmJobFlag, StoreFlag

# What else is done with a node, beside a response: its options stand here for length alone.
_MarkFlag = Annotated[
    str | None,
    typer.Option(
        metavar="STAGE", help="Move --node on in its life: repaired, validated or returned."
    ),
]
_EvidenceFlag = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the vendor's evidence bundle of --node (.tar.gz)."),
]
_LogsFlag = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="With --evidence: dmesg, nvidia-smi -q of the node."),
]


def command(
    incident: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output of kansoku diagnose --json.")
    ] = None,
    node: Annotated[str | None, typer.Option(help="The node, by your own word.")] = None,
    reason: Annotated[
        str, typer.Option(help="Why, where --node names it; what was done, with --mark.")
    ] = "operator",
    slurm_job: SlurmJobFlag = None,
    cluster: ClusterFlag = None,
    spare: Annotated[list[str] | None, typer.Option(help="A reserved node; repeat it.")] = None,
    reservation: Annotated[
        str | None, typer.Option(help="Slurm reservation that holds the reserved nodes.")
    ] = None,
    check: Annotated[
        str, typer.Option(help="Command that validates a node; {node} is its name.")
    ] = "ssh {node} kansoku guard",
    progress: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Grows while the job gets on; default: its output."),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The job's checkpoints: broken ones are set aside."),
    ] = None,
    policy: Annotated[Path | None, typer.Option(metavar="FILE", help="Limits (TOML).")] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where responses are kept.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take up what was interrupted.")] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Show responses, breakers and nodes' lives.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Close the circuit breaker.")] = False,
    mark: _MarkFlag = None,
    evidence: _EvidenceFlag = None,
    logs: _LogsFlag = None,
    store: StoreFlag = None,
    dry_run: DryRunFlag = True,
    as_json: JsonFlag = False,
) -> None:
    """Respond to an incident. Exit 1 if the response was refused or escalated."""
    from kansoku.app.respond_ways import Ways
    from kansoku.app.store import default_store
    from kansoku.cli import _respond
    from kansoku.diagnose.edge.journal import Journal

    ways = Ways(
        spares=_reserved(spare or (), cluster),
        reservation=reservation,
        check=check,
        progress=_absolute(progress),
        checkpoints=_absolute(checkpoints),
        policy=_absolute(policy),
    )
    journal = Journal(state or default_store() / "respond")
    driver = ways.driver(journal, _respond.say)
    if status or clear:
        code = _respond.status(driver, clear=clear, as_json=as_json)
    elif evidence is not None:
        code = _respond.evidence(driver, node, incident, evidence, logs, store, as_json=as_json)
    elif mark is not None:
        code = _respond.mark(driver, node, mark, reason, dry_run=dry_run, as_json=as_json)
    elif resume:
        code = _respond.resume(
            driver,
            lambda begun: ways.over(begun.ways).driver(journal, _respond.say),
            as_json=as_json,
        )
    else:
        target = _respond.target(incident, node, slurm_job, reason)
        code = _respond.act(driver, target, dry_run=dry_run, as_json=as_json)
    raise typer.Exit(code)


def _reserved(named: Iterable[str], cluster: str | None) -> tuple[str, ...]:
    """Return the reserved nodes: those that were named, and the cluster file's."""
    from kansoku.catalog import load_cluster

    of_file = () if cluster is None else load_cluster(cluster).nodes
    return tuple(sorted({*named, *(node.name for node in of_file if node.reserved)}))


def _absolute(path: Path | None) -> str | None:
    """Return a path that holds wherever the response is taken up."""
    return str(path.absolute()) if path is not None else None
