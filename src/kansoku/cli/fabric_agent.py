"""Probe the fabric from this host and answer probes."""

import signal
import sys
from typing import Annotated

import typer


def command(
    rnic: Annotated[
        list[str],
        typer.Option("--rnic", metavar="DEVICE=ADDRESS", help="An RNIC; repeat for each."),
    ],
    node: Annotated[
        str | None, typer.Option(help="Node name in the cluster file; default the host name.")
    ] = None,
    controller: Annotated[
        str, typer.Option(metavar="URL", help="http://HOST:PORT or unix:/PATH.")
    ] = "http://127.0.0.1:8080",
    stamps: Annotated[str, typer.Option(help="hardware, kernel or application.")] = "kernel",
    port: Annotated[
        int | None, typer.Option(help="UDP port of probes; the same on every agent.")
    ] = None,
    bind_device: Annotated[
        bool, typer.Option(help="Bind sockets to the device: NICs that share a subnet.")
    ] = False,
    transport: Annotated[
        str, typer.Option(help="udp, or verbs: UD queue pairs of the RDMA devices named.")
    ] = "udp",
    learn: Annotated[
        bool, typer.Option("--learn", help="Probe the paths of jobs' queue pairs (kprobes, root).")
    ] = False,
) -> None:
    """Run prober and responder of every RNIC of this host until stopped.

    Keeps working from the last pinglist while the controller is away.
    """
    from kansoku.app.fabric import agent, learn_services
    from kansoku.errors import InputError

    pairs = []
    for text in rnic:
        device, _, address = text.partition("=")
        if not device or not address:
            raise InputError(f"--rnic {text!r} is not DEVICE=ADDRESS")
        pairs.append((device, address))
    if stamps not in {"hardware", "kernel", "application"}:
        raise InputError(f"--stamps {stamps!r} is not hardware, kernel or application")
    if transport not in {"udp", "verbs"}:
        raise InputError(f"--transport {transport!r} is not udp or verbs")
    import socket

    name = node or socket.gethostname()
    running = agent(
        name, pairs, controller,
        stamps=stamps, port=port, bind_device=bind_device, transport=transport,
    )  # fmt: skip
    learning = learn_services(name, [d for d, _ in pairs], controller) if learn else None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: running.stop())
    print(f"fabric agent: {', '.join(rnic)} to {controller}", file=sys.stderr)
    if learning is not None:
        learning.start()
    running.run()
    if learning is not None:
        learning.stop()
