"""Node agent: GPU, NIC, RDMA, storage, host, kernel log, Slurm, switches, capture rings.

Runs until told to stop and sends what it sees to ``--to``. With ``--once`` it collects one round,
prints it and sends nothing: the quickest way to see what this machine offers.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kansoku.app._agent_process import replace_process
from kansoku.app.agent import DEFAULT_ENDPOINT, AgentSettings, agent_once, check_endpoint
from kansoku.cli._flags import JsonFlag
from kansoku.cli._output import emit

__all__ = ["command"]


def command(
    *,
    to: Annotated[
        str, typer.Option("--to", metavar="URL", envvar="KANSOKU_ENDPOINT", help="Receiver.")
    ] = DEFAULT_ENDPOINT,
    protocol: Annotated[
        str, typer.Option("--protocol", help="arrow (kansoku serve), http or grpc (OTLP).")
    ] = "arrow",
    interval: Annotated[
        float,
        typer.Option(
            "--interval", metavar="SECONDS", min=0.1, max=86400, help="Time between rounds."
        ),
    ] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="One round, printed, nothing sent.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="This collector; repeatable.")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="Node name; default the host's.")
    ] = None,
    root: Annotated[
        str, typer.Option("--root", metavar="DIR", help="Where /proc and /sys are, in a container.")
    ] = "/",
    spool: Annotated[
        Path | None,
        typer.Option("--spool", metavar="DIR", help="Spool; default the XDG state folder."),
    ] = None,
    dcgm: Annotated[
        str | None, typer.Option("--dcgm", metavar="URL", help="A DCGM exporter's /metrics.")
    ] = None,
    switches: Annotated[
        Path | None, typer.Option("--switches", metavar="FILE", help="Switches to ask.")
    ] = None,
    slurm_node: Annotated[
        str | None, typer.Option("--slurm-node", metavar="NAME", help="Name in Slurm.")
    ] = None,
    from_boot: Annotated[
        bool, typer.Option("--from-boot", help="Kernel log from boot on, not from now on.")
    ] = False,
    profile_to: Annotated[
        str | None, typer.Option("--profile-to", metavar="URL", help="Pyroscope for CPU profiles.")
    ] = None,
    bursts: Annotated[
        float | None,
        typer.Option("--bursts", metavar="MS", help="Find microbursts: counters so often, 1."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Observe this node. The token for --to is read from KANSOKU_TOKEN."""
    settings = AgentSettings(
        only=tuple(only or ()),
        interval_s=interval,
        node=node,
        root=root,
        dcgm_url=dcgm,
        slurm_node=slurm_node,
        switches_file=switches,
        from_boot=from_boot,
        profile_to=profile_to,
        burst_interval_s=None if bursts is None else bursts / 1000,
    )
    if once:
        answer, view = agent_once(settings)
        emit(answer, view, as_json=json)
        return
    check_endpoint(to, protocol)
    print(f"kansoku agent: every {interval:g} s to {to} ({protocol})", file=sys.stderr)
    replace_process(settings, to=to, protocol=protocol, spool=spool)
