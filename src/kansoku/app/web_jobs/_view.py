"""Views of the command line made fit for a page: links, UTC stamps, no canvas of another form."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from kansoku.jobs.edge.slurm import local_zone
from kansoku.view import Block, Column, Facts, Heatmap, Sentence, Table, Timeline

__all__ = ["drawable"]

_LINKS: Mapping[str, str] = {
    "node": "/nodes/{}",
    "job": "/jobs/{}",
    "run": "/runs/{}",
    "user": "/jobs?user={}&window=30d",
    "account": "/jobs?account={}&window=30d",
    "partition": "/jobs?partition={}&window=30d",
}
_LOCAL = re.compile(r"\b(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?![\dZ.+-])")


def drawable(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks that a page draws, with links and UTC stamps.

    Views for terminals write times in this machine's zone; pages show the reader's, so they become
    UTC here.
    """
    zone = ZoneInfo(local_zone())

    def utc(text: str) -> str:
        def one(match: re.Match[str]) -> str:
            try:
                moment = datetime.fromisoformat(match[1]).replace(tzinfo=zone)
            except ValueError:
                return match[1]
            return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

        return _LOCAL.sub(one, text)

    found: list[Block] = []
    for block in blocks:
        if isinstance(block, Heatmap | Timeline):
            continue
        if isinstance(block, Facts):
            found.append(Facts(items=[(label, utc(text)) for label, text in block.items]))
        elif isinstance(block, Sentence):
            detail = None if block.detail is None else utc(block.detail)
            found.append(replace(block, text=utc(block.text), detail=detail))
        elif isinstance(block, Table):
            rows = [[utc(v) if isinstance(v, str) else v for v in row] for row in block.rows]
            columns = [_linked(column) for column in block.columns]
            found.append(replace(block, rows=rows, columns=columns))
        else:
            found.append(block)
    return found


def _linked(column: Column) -> Column:
    link = column.link or _LINKS.get(column.title)
    return column if link is None else replace(column, link=link)
