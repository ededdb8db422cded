"""The command line: one file a command, found by its name.

``cli/report.py`` is ``kansoku report``; ``cli/trace_critical_path.py`` is ``kansoku trace
critical-path``. A module holds a function ``command`` with typer annotations; its docstring is
the help. Only the module of the command that runs is imported, so ``kansoku --help`` is quick.
"""

import os
import sys

__all__ = ["main"]

_GIVE_BACK = "dirty_decay_ms:20,muzzy_decay_ms:0"
"""Setting of polars' allocator: memory that is no longer needed goes back within 20 ms."""


def main() -> None:
    """Run the command line. The node guard goes past the command line library: it has 1.5 s."""
    from kansoku.cli._streams import open_standard_streams

    open_standard_streams()
    words = sys.argv[1:]
    if words[:1] == ["guard"] and "--help" not in words:
        from kansoku.cli._guard import run
        from kansoku.errors import KansokuError

        try:
            sys.exit(run(words[1:]))
        except KansokuError as error:
            print(f"kansoku: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        except OSError as error:  # stdout on a full disk: a node is not blocked by it
            print(f"kansoku: {error.strerror or error}", file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(3)
    if words[:1] == ["report"]:  # a thousand ranks: give back at once what a step no longer needs
        # Polars puts its own before what stands here; what a parent with polars left stands too.
        known = os.environ.get("_RJEM_MALLOC_CONF", "")
        os.environ["_RJEM_MALLOC_CONF"] = f"{known},{_GIVE_BACK}".lstrip(",")
    from kansoku.cli._main import main as whole

    whole()
