"""The compiler that native parts will be made with: whether it works, and what to do if not."""

import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kansoku.capture.payload import building
from kansoku.node import CommandResult

__all__ = ["working_compiler"]

# As the parts are compiled, with a header that comes with the compiler's library.
_TRIALS = {
    "CC": ("trial.c", "#include <stdint.h>\nint32_t one(void) { return 1; }\n", "-std=gnu11"),
    "CXX": (
        "trial.cpp",
        "#include <vector>\nstd::vector<int> one() { return {1}; }\n",
        "-std=c++17",
    ),
}
_PACKAGES = {"CC": "gcc libc6-dev", "CXX": "g++"}
_PATIENCE_S = 20


class _Run(Protocol):
    def __call__(self, command: Sequence[str], *, timeout_s: float) -> CommandResult: ...


def _why_it_fails(command: Sequence[str], variable: str, run: _Run) -> str | None:
    """Compile one function; return the compiler's first complaint, None where it works."""
    name, text, standard = _TRIALS[variable]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / name
        source.write_text(text, encoding="utf-8")
        answer = run(
            [*command, standard, "-shared", "-fPIC", str(source), "-o", f"{folder}/trial.so"],
            timeout_s=_PATIENCE_S,
        )
    if answer.code == 0:
        return None
    said = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    worst = next((line for line in said if "error" in line.lower()), said[0] if said else "")
    return worst[:160] or f"it ended with {answer.code}"


def _instead(
    names: tuple[str, ...], environment: Mapping[str, str], find: Callable[[str], str | None]
) -> str:
    """Return how to do without what the variable names: another compiler may be there."""
    variable, install = names[0], f"apt install {_PACKAGES[names[0]]}"
    rest = {name: value for name, value in environment.items() if name != variable}
    try:
        building.compiler(*names, environment=rest, find=find)
    except FileNotFoundError:
        return f"unset {variable} and {install}"
    return f"unset {variable}"


def working_compiler(
    names: tuple[str, ...],
    *,
    environment: Mapping[str, str],
    find: Callable[[str], str | None],
    run: _Run | None,
) -> tuple[str | None, str, str]:
    """Return the command of the compiler, what is wrong with it, and the remedy.

    ``names`` are ``building.C`` or ``building.CXX``. The command is None where there is none that
    works; the other two are empty where it works. Without ``run`` it is looked for, not tried.
    """
    variable, install = names[0], f"apt install {_PACKAGES[names[0]]}"
    given = environment.get(variable, "").strip()
    try:
        command = building.compiler(*names, environment=environment, find=find)
    except FileNotFoundError as error:
        if not given:
            return None, "none", install
        no_command = "is no command" in str(error)
        why = str(error).removeprefix("no compiler: ") if no_command else "no such program"
        remedy = f"set {variable} to one that works, or {_instead(names, environment, find)}"
        return None, f"{variable}={given} names no compiler: {why}", remedy
    why_not = None if run is None else _why_it_fails(command, variable, run)
    if why_not is None:
        return shlex.join(command), "", ""
    if not given:
        return None, f"{shlex.join(command)} does not work: {why_not}", install
    instead = _instead(names, environment, find)
    remedy = f"set {variable} to a compiler and arguments that work, or {instead}"
    return None, f"{variable}={given} does not work: {why_not}", remedy
