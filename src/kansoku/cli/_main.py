"""Find, load and run a command; turn errors into messages and exit codes."""

import ast
import errno
import importlib
import importlib.util
import logging
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

import kansoku.cli
from kansoku import __version__
from kansoku.errors import KansokuError

__all__ = ["app", "command_modules", "main"]

# Commands of one word; every other module name is NOUN_VERB.
_NOUN_HELP = {
    "trace": "Traces from anywhere: breakdown, stragglers, hangs, what-if, comparison.",
    "jobs": "Slurm job history: outcomes, heat map, idle capacity, reliability, nodes.",
    "fabric": "Active probing of the RoCE network after R-Pingmesh.",
    "burst": "Microbursts below the polling interval.",
    "plan": "Parallelism planner: FLOPs, memory, time, search.",
    "bench": "MLPerf-style benchmarks and scores.",
    "deploy": "Configuration of the fleet's back ends.",
}

# Without a file name these still speak of the machine, not of a mistake of ours.
_MACHINE_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)


def command_modules() -> dict[tuple[str, ...], str]:
    """Map the words of every command to the module that holds it."""
    found: dict[tuple[str, ...], str] = {}
    for info in pkgutil.iter_modules(kansoku.cli.__path__):
        if info.name.startswith("_"):
            continue
        noun, _, verb = info.name.partition("_")
        words = (noun, verb.replace("_", "-")) if verb else (noun,)
        found[words] = f"kansoku.cli.{info.name}"
    return found


def _short_help(module: str) -> str:
    """Return the first line of a module's docstring without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return text.splitlines()[0] if text else ""


def _load(module: str, name: str) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    function = importlib.import_module(module).command
    settings = getattr(function, "context_settings", None)
    single.command(name=name, context_settings=settings)(function)
    return typer.main.get_command(single)


class _LazyGroup(TyperGroup):
    """A group that imports a command's module only when that command runs."""

    words: tuple[str, ...] = ()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the framework's signature
        depth = len(self.words)
        return sorted({w[depth] for w in command_modules() if w[:depth] == self.words})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - the same
        modules = command_modules()
        words = (*self.words, cmd_name)
        if words in modules:
            return _load(modules[words], cmd_name)
        if not self.words and any(w[0] == cmd_name for w in modules):
            group = _LazyGroup(
                name=cmd_name,
                help=_NOUN_HELP.get(cmd_name),
                no_args_is_help=True,
                rich_markup_mode=None,
            )
            group.words = words
            return group
        return None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        modules = command_modules()
        rows = []
        for name in self.list_commands(ctx):
            words = (*self.words, name)
            text = _short_help(modules[words]) if words in modules else _NOUN_HELP.get(name, "")
            rows.append((name, text))
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


app = typer.Typer(
    cls=_LazyGroup, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)


def _print_version(value: bool) -> None:
    if value:
        print(f"kansoku {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(  # noqa: ARG001 - its callback prints
        False, "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what happens, on stderr."),
) -> None:
    """Measure LLM training and observe the AI supercomputer it runs on.

    Exit codes: 0 fine, 1 finding, 2 usage, 3 environment, 70 internal error; 141 when the reader of
    stdout went away, as head does.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )


def main() -> None:
    """Run the command line; its exit codes are those of ``kansoku --help``."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where what it meets is still answered
    except KansokuError as error:
        from rich.console import Console  # here, not above: most runs print no error (50 ms)

        from kansoku.view.plain import plain_text

        Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(
            f"kansoku: {plain_text(str(error))}", markup=False
        )
        sys.exit(error.exit_code)
    except OSError as error:
        from kansoku.view.plain import plain_text

        if error.filename is None and error.errno not in _MACHINE_ERRORS:
            _internal_error(error)
        # A file or the disk, not our fault: one line. --verbose shows where.
        logging.getLogger("kansoku").info("where it happened", exc_info=True)
        place = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        print(f"kansoku: {plain_text(f'{place}{error.strerror or error}')}", file=sys.stderr)
        if error.filename is None:
            # What stdout still holds cannot be written at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(3)
    except Exception as error:  # noqa: BLE001 - the last net: say it, with its own exit code
        _internal_error(error)


def _internal_error(error: Exception) -> NoReturn:
    logging.getLogger("kansoku").error(
        "internal error; please report it with this text", exc_info=error
    )
    sys.exit(70)
