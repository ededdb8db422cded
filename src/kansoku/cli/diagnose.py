"""Say what is wrong, whose fault it is, and what to do: application or infrastructure."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit


def command(
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A folder of whatever there is.")
    ],
    rules: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own signatures (CSV).")
    ] = None,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Rank causes with evidence for and against. Exit 1 if trouble was found."""
    from kansoku.app.diagnose import diagnose_folder, diagnosis_json, diagnosis_view
    from kansoku.catalog.signatures import read_signatures

    extra = read_signatures(rules) if rules else ()
    result = diagnose_folder(target, extra=extra)
    emit(diagnosis_json(result), diagnosis_view(result), as_json=as_json, html=html)
    if result.incidents:
        raise typer.Exit(1)
