"""Drain a bad node, put a reserved one in, requeue the job; a dry run unless told."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import ClusterFlag, DryRunFlag, JsonFlag, SlurmJobFlag
from kansoku.cli._output import emit


def command(
    incident: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output of kansoku diagnose --json."),
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="The node to take out, by your own word.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, where --node names it.")] = "operator",
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
        Path | None, typer.Option(metavar="DIR", help="Checkpoint or run folder of the job.")
    ] = None,
    policy: Annotated[Path | None, typer.Option(metavar="FILE", help="Limits (TOML).")] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where responses are kept.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take up what was interrupted.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show responses and breakers.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Close the circuit breaker again.")
    ] = False,
    dry_run: DryRunFlag = True,
    as_json: JsonFlag = False,
) -> None:
    """Respond to an incident. Exit 1 if the response was refused or escalated."""
    from kansoku.app.respond import (
        Driver,
        Target,
        clear_breaker,
        progress_of_path,
        read_policy,
        respond_json,
        respond_view,
        target_of_incident,
    )
    from kansoku.app.store import default_store
    from kansoku.catalog import load_cluster
    from kansoku.diagnose.edge.cluster import SlurmControl
    from kansoku.diagnose.edge.journal import Journal
    from kansoku.diagnose.response import State
    from kansoku.errors import InputError

    journal = Journal(state or default_store() / "respond")
    if clear:
        clear_breaker(journal, time.time_ns())
    if status or clear:
        refusal = journal.breaker().open_reason
        known = journal.responses()
        emit(
            respond_json(known, refusal=refusal),
            respond_view(known, refusal=refusal),
            as_json=as_json,
        )
        return
    reserved = set(spare or ())
    if cluster is not None:
        reserved |= {n.name for n in load_cluster(cluster).nodes if n.reserved}
    driver = Driver(
        control=SlurmControl(
            reserved=frozenset(reserved),
            check=shlex.join(shlex.split(check)),
            reservation=reservation,
        ),
        journal=journal,
        policy=read_policy(policy),
        progress=(lambda _job: progress_of_path(progress)) if progress else (lambda _job: None),
        say=lambda text: print(text, file=sys.stderr),
    )
    if resume:
        done = driver.resume()
        emit(respond_json(done), respond_view(done), as_json=as_json)
        raise typer.Exit(any(r.state is State.ESCALATED for r in done))
    if incident is not None:
        answer = json.loads(incident.read_text(encoding="utf-8"))
        target = target_of_incident(answer, job=slurm_job, where=str(incident))
    elif node is not None:
        target = Target(incident="operator", node=node, job=slurm_job, reason=reason)
    else:
        raise InputError("nothing to respond to", remedy="give --incident FILE or --node NAME")
    if dry_run:
        lines, refusal = driver.dry_run(target)
        emit(
            respond_json([], plan_lines=lines, refusal=refusal),
            respond_view([], plan_lines=lines, refusal=refusal),
            as_json=as_json,
        )
        raise typer.Exit(refusal is not None)
    response = driver.begin(target)
    emit(respond_json([response]), respond_view([response]), as_json=as_json)
    raise typer.Exit(response.state is State.ESCALATED)
