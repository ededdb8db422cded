"""What works on this machine, what does not, why, and the remedy.

Exit 0 when nothing is broken (missing hardware is no fault), 1 when something that should work
here does not.
"""

from pathlib import Path

import typer

from kansoku.app.doctor import Situation, doctor, doctor_answer
from kansoku.cli._flags import JsonFlag, StoreFlag
from kansoku.cli._output import emit

__all__ = ["command"]


def command(store: StoreFlag = None, json: JsonFlag = False) -> None:
    """Check this machine."""
    on_disk = store is not None and not store.startswith(("http://", "https://"))
    situation = Situation(store=Path(store)) if store and on_disk else Situation()
    answer, view = doctor_answer(doctor(situation))
    emit(answer, view, as_json=json)
    if answer["verdict"] == "found":
        raise typer.Exit(1)
