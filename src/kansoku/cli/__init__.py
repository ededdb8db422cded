"""The command line: one file a command, found by its name.

``cli/report.py`` is ``kansoku report``; ``cli/trace_critical_path.py`` is ``kansoku trace
critical-path``. A module holds a function ``command`` with typer annotations; its docstring is
the help. Only the module of the command that runs is imported, so ``kansoku --help`` is quick.
"""

from kansoku.cli._main import main

__all__ = ["main"]
