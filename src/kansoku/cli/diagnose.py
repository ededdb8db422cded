"""Say what is wrong, whose fault it is, and what to do: application or infrastructure."""

from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import (
    ClusterFlag,
    HtmlFlag,
    JsonFlag,
    SinceFlag,
    SlurmJobFlag,
    StoreFlag,
    UntilFlag,
)
from kansoku.cli._output import emit


def command(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A run or a folder of whatever there is; job:ID; or live, the store.",
        ),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own signatures (CSV).")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own thresholds (TOML).")
    ] = None,
    cluster: ClusterFlag = None,
    slurm_job: SlurmJobFlag = None,
    store: StoreFlag = None,
    since: SinceFlag = None,
    until: UntilFlag = None,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Rank causes with evidence for and against. Exit 1 if trouble was found."""
    from kansoku.app.diagnose import (
        diagnose_folder,
        diagnose_store,
        diagnosis_json,
        diagnosis_view,
    )
    from kansoku.app.jobs._context import resolve_window
    from kansoku.app.store import open_store
    from kansoku.catalog.signatures import read_signatures
    from kansoku.diagnose.edge.bundle import read_policy
    from kansoku.errors import InputError

    chosen = read_policy(policy)
    job = slurm_job or (target[4:] if target and target.startswith("job:") else None)
    if job is None and target is None:
        raise InputError("nothing to diagnose", remedy="name a folder, job:ID, or live")
    if job is None and target not in {"live", None}:
        extra = read_signatures(rules) if rules else ()
        folder = Path(target or "")
        result = diagnose_folder(folder, extra=extra, policy=chosen, cluster=cluster)
    else:
        window = resolve_window(since or "1h", until or "now", None)
        opened = open_store(store)
        try:
            result = diagnose_store(
                opened, since_ns=window.since_ns, until_ns=window.until_ns, job=job, policy=chosen,
                cluster=cluster,
            )  # fmt: skip
        finally:
            opened.close()
    emit(diagnosis_json(result), diagnosis_view(result), as_json=as_json, html=html)
    if result.incidents:
        raise typer.Exit(1)
