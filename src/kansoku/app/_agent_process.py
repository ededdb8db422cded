"""The process of a running agent: ``python -m kansoku.app._agent_process SETTINGS``.

``kansoku agent`` replaces itself by this module, so that the command line's libraries are gone
from memory and the allocators below start with one arena: together 35 MB of the 120 that the
agent may have.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kansoku.app.agent import AgentSettings, run_agent
from kansoku.errors import KansokuError

# httpx brings a command line of its own where click and rich are installed, and goes without
# where they are not: 5 MB that an agent has no use for.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

__all__ = ["LEAN", "replace_process"]

LEAN = {
    "MALLOC_ARENA_MAX": "1",
    "POLARS_MAX_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_PATHS = ("switches_file", "ring_folder", "samples_folder")


def replace_process(settings: AgentSettings, *, to: str, protocol: str, spool: Path | None) -> None:
    """Become the agent; does not return. The token travels in the environment."""
    given = {**asdict(settings), "only": list(settings.only)}
    del given["collector_settings"]
    words = {"settings": given, "to": to, "protocol": protocol, "spool": spool}
    command = [sys.executable, "-m", "kansoku.app._agent_process", json.dumps(words, default=str)]
    sys.stderr.flush()
    os.execve(sys.executable, command, {**LEAN, **os.environ})  # noqa: S606 - itself, no shell


def _settings(given: dict[str, Any]) -> AgentSettings:
    for name in _PATHS:
        given[name] = None if given[name] is None else Path(given[name])
    return AgentSettings(**{**given, "only": tuple(given["only"])})


def _main(text: str) -> int:
    words = json.loads(text)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    spool = words["spool"]
    try:
        run_agent(
            _settings(words["settings"]),
            to=words["to"],
            protocol=words["protocol"],
            token=os.environ.get("KANSOKU_TOKEN"),
            spool=None if spool is None else Path(spool),
            stop=stop,
        )
    except KansokuError as error:
        sys.stderr.write(f"kansoku: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1]))
