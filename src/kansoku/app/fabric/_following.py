"""Service tracing of a run from its folder: told while it runs, ended when it ends."""

import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kansoku.app._processes import still_runs
from kansoku.app.fabric._control import service_end, service_start
from kansoku.errors import PlatformError

if TYPE_CHECKING:
    from kansoku.formats.run_directory import RunData

__all__ = ["follow"]

_EVERY_S = 2.0
_LEASE_S = 30.0  # the controller ends the service itself when this process dies
_RENEW_TURNS = 5
_READ_TURNS = 30


def follow(
    run: str | Path,
    controller: str,
    cluster: str | Path,
    *,
    stop: threading.Event | None = None,
    say: Callable[[str], None] = lambda _: None,
    every_s: float = _EVERY_S,
) -> str:
    """Have the paths of a run probed until it ends or ``stop`` is set; return why it is over.

    ``run`` is the folder of ``kansoku run``. The run has ended when its ``run.json`` says so, or
    when all of its processes are gone, as far as they can be seen from here. While the controller
    is away, or no process group is known yet, the next turn tries again. ``say`` gets a sentence
    for every change. Raises InputError for a folder without a run.
    """
    from kansoku.formats.run_directory import read_run

    folder, stop = Path(run), stop or threading.Event()
    data = read_run(folder)
    job = data.facts.slurm_job or data.facts.run
    told, said = 0, ""
    for turn in itertools.count():
        ended = _ended(folder, data)
        if ended is not None or (turn and stop.wait(every_s)):
            break
        # Ranks join and make their groups during the first seconds; elastic ones later too.
        again = turn % _READ_TURNS == 0 or (told == 0 and turn < _READ_TURNS)
        if not again and turn % _RENEW_TURNS:
            continue
        if again:
            data = read_run(folder)
        try:
            told = service_start(controller, data.facts, cluster, lease_s=_LEASE_S)
            sentence = f"{job}: probing {told} paths"
        except PlatformError as error:
            sentence = f"{error}; trying again"
        if sentence != said:
            say(sentence)
            said = sentence
    if told:
        service_end(controller, job)
    return ended or "stopped"


def _ended(folder: Path, data: "RunData") -> str | None:
    """Return why the run is over; None while it runs."""
    try:
        facts = json.loads((folder / "run.json").read_bytes())
        if isinstance(facts, dict) and facts.get("end_ns") is not None:
            return f"the run ended with exit code {facts.get('exit_code')}"
    except (OSError, ValueError):
        pass  # being written anew; the processes say as much
    here = os.uname().nodename
    if data.processes and all(
        process.state == "closed"
        or (process.node == here and not still_runs(process.pid, process.process_start))
        for process in data.processes
    ):
        return "all processes of the run are gone"
    return None
