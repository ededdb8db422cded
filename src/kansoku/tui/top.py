"""The live screen: jobs, ranks × phases, devices, incidents; keys to sort, filter, look in."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from kansoku.app.top import DeviceLine, RankLine, TopSnapshot, TopSource
from kansoku.errors import KansokuError
from kansoku.model import PHASES
from kansoku.tui._cells import LATE, PHASE_LETTERS, bar, number, phase_strip, rate, spark
from kansoku.tui._jobs import JOB_SORTS, job_cells, job_columns, job_head, kept_jobs
from kansoku.tui._table import SteadyTable
from kansoku.view.plain import plain_line

__all__ = ["TopApp"]

_NARROW_COLUMNS = 100
_MOST_ROWS = 60
"""Drawing a thousand rows each second would cost a quarter of a core; keys lead to the others."""
_MORE = "more"
_SORTS: dict[str, Callable[[RankLine], tuple[float, int]]] = {
    "rank": lambda line: (0.0, line.rank),
    "step time": lambda line: (-line.step_ms, line.rank),
    "late": lambda line: (float(not line.late), line.rank),
    "collective": lambda line: (line.phases.get(PHASES[4], 0.0), line.rank),
}


class _Detail(ModalScreen[None]):
    """One rank or device, in full."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss", "Close")]
    DEFAULT_CSS = "_Detail { align: center middle; } #detail { width: 70; border: round $accent; }"

    def __init__(self, text: Text) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(self._text, id="detail")


class TopApp(App[None]):
    """`kansoku top`."""

    TITLE = "kansoku top"
    CSS = """
    #head { height: auto; max-height: 3; padding: 0 1; }
    #jobs, #ranks { height: 2fr; }
    #devices { height: 1fr; }
    #incidents { height: auto; max-height: 5; padding: 0 1; }
    #filter { display: none; }
    #filter.shown { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort"),
        Binding("slash", "filter", "Filter"),
        Binding("space", "pause", "Pause"),
        Binding("escape", "leave", "Back"),
    ]

    def __init__(self, source: TopSource, *, every_s: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._every_s = every_s
        self._sort = self._job_sort = 0
        self._job: str | None = None
        """The job that is looked into."""
        self._filter = ""
        self._paused = False
        self._shown: TopSnapshot | None = None
        self._said: dict[str, Text] = {}
        self._narrow: bool | None = None
        self._jobs_narrow: bool | None = None

    def compose(self) -> ComposeResult:
        """Lay out head, jobs or ranks, devices, incidents."""
        yield Static(id="head")
        with Vertical():
            yield SteadyTable(id="jobs", cursor_type="row", zebra_stripes=True)
            yield SteadyTable(id="ranks", cursor_type="row", zebra_stripes=True)
            yield SteadyTable(id="devices", cursor_type="row", zebra_stripes=True)
        yield Static(id="incidents")
        yield Input(placeholder="job, name, user, node or rank", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        """Start reading at once and then every second."""
        self.query_one("#devices", SteadyTable).add_columns(
            "device", "power", "use", "memory", "temp", "traffic"
        )
        self.query_one("#ranks", SteadyTable).focus()
        self.tick()
        self.set_interval(self._every_s, self.tick)

    def tick(self) -> None:
        """Read the next snapshot beside the screen, so that a slow source never blocks a key."""
        if not self._paused:
            self._read(self._job)

    @work(thread=True, exclusive=True)
    def _read(self, job: str | None) -> None:
        try:
            snapshot = self._source.snapshot() if job is None else self._source.job(job)
        except KansokuError as error:
            now = self._shown.time_ns if self._shown else 0
            title = "kansoku top" if job is None else f"job {job}"
            snapshot = TopSnapshot(title=title, time_ns=now, note=str(error))
        self.call_from_thread(self._show_of, job, snapshot)

    def _show_of(self, job: str | None, snapshot: TopSnapshot) -> None:
        # What was asked before a key led elsewhere comes too late.
        if job == self._job:
            self.show(snapshot)

    def show(self, snapshot: TopSnapshot) -> None:
        """Draw a snapshot."""
        self._shown = snapshot
        self._say("#head", self._head(snapshot))
        self._fill_jobs(snapshot)
        self._fill_ranks(snapshot)
        self._fill_devices(snapshot)
        text = Text("\n").join(Text(plain_line(line), "yellow") for line in snapshot.incidents[:5])
        self._say("#incidents", text)

    def _say(self, place: str, text: Text) -> None:
        """Show a text; all else is laid out anew only where the text may need other lines."""
        before = self._said.get(place)
        if before == text:
            return
        self._said[place] = text
        static = self.query_one(place, Static)
        room = static.content_size.width
        fits = before is not None and all(
            line.cell_len <= room for one in (before, text) for line in one.split()
        )
        same = before is not None and before.plain.count("\n") == text.plain.count("\n")
        static.update(text, layout=not (fits and same))

    def _head(self, snapshot: TopSnapshot) -> Text:
        clock = datetime.fromtimestamp(snapshot.time_ns / 1e9, UTC).strftime("%H:%M:%S UTC")
        late = [line.rank for line in snapshot.ranks if line.late]
        first = Text.assemble(
            (plain_line(snapshot.title), "bold"), f"  {clock}", "  paused" * self._paused
        )
        if snapshot.jobs:
            line = job_head(snapshot.jobs, list(JOB_SORTS)[self._job_sort])
            return Text("\n").join([first, Text(line)])
        nodes = snapshot.job.nodes if snapshot.job is not None else ()
        where = [f"{len(nodes)} node{'s' * (len(nodes) != 1)}"] if nodes else []
        if snapshot.note and not snapshot.ranks:
            note = " · ".join([*where, snapshot.note])
            return Text("\n").join([first, Text(plain_line(note), "yellow")])
        parts = [
            *where,
            f"ranks {len(snapshot.ranks)}",
            f"step {max((line.step for line in snapshot.ranks), default=0)}",
            f"{number(snapshot.step_ms, ' ms', 1)} a step",
            f"slowest rank {late[0]}" if late else "no rank stands out",
            *([f"MFU {snapshot.mfu_ratio:.1%}"] if snapshot.mfu_ratio is not None else []),
            f"{number(snapshot.tokens_per_s)} tokens/s",
            f"sort: {list(_SORTS)[self._sort]}",
        ]
        return Text("\n").join([first, Text(" · ".join(parts))])

    def _fill_jobs(self, snapshot: TopSnapshot) -> None:
        table = self.query_one("#jobs", SteadyTable)
        table.display = bool(snapshot.jobs)
        self.query_one("#ranks", SteadyTable).display = not snapshot.jobs
        if not snapshot.jobs:
            return  # the row stays where it is for the way back
        narrow = self.size.width < _NARROW_COLUMNS
        at = table.key_at(table.cursor_row)
        if narrow != self._jobs_narrow:
            self._jobs_narrow = narrow
            table.clear(columns=True)
            table.add_columns(*job_columns(narrow=narrow))
        kept = kept_jobs(snapshot.jobs, self._filter, list(JOB_SORTS)[self._job_sort])
        now = snapshot.time_ns
        rows = [(line.key, job_cells(line, now, narrow=narrow)) for line in kept[:_MOST_ROWS]]
        keys = [key for key, _ in rows]
        if len(kept) > _MOST_ROWS:
            rest = ("",) * (len(table.columns) - 2)
            rows.append((_MORE, ("…", f"{len(kept) - _MOST_ROWS} more", *rest)))
        table.fill(rows)
        table.move_cursor(row=keys.index(at) if at in keys else 0)
        if self.focused is None or self.focused.id == "ranks":
            table.focus()

    def _fill_ranks(self, snapshot: TopSnapshot) -> None:
        table = self.query_one("#ranks", SteadyTable)
        narrow = self.size.width < _NARROW_COLUMNS
        if narrow != self._narrow:
            self._narrow = narrow
            table.clear(columns=True)
            legend = " ".join(f"{letter}={phase.value}" for phase, letter in PHASE_LETTERS.items())
            table.add_columns("rank", "node", "step", "ms", "trend", "phases" if narrow else legend)
        row = table.cursor_row
        kept = self._kept(snapshot)
        rows = [(str(line.rank), _rank_cells(line, narrow=narrow)) for line in kept[:_MOST_ROWS]]
        if len(kept) > _MOST_ROWS:
            more = f"{len(kept) - _MOST_ROWS} more"
            rows.append((_MORE, ("…", more, "", "", "s sorts", "")))
        table.fill(rows)
        if table.row_count:
            table.move_cursor(row=min(row, table.row_count - 1))

    def _kept(self, snapshot: TopSnapshot) -> list[RankLine]:
        wanted = self._filter.lower()
        kept = [
            line
            for line in snapshot.ranks
            if not wanted or wanted in line.node.lower() or wanted == str(line.rank)
        ]
        return sorted(kept, key=list(_SORTS.values())[self._sort])

    def _fill_devices(self, snapshot: TopSnapshot) -> None:
        table = self.query_one("#devices", SteadyTable)
        table.display = bool(snapshot.devices)
        wanted = self._filter.lower()
        kept = [line for line in snapshot.devices if wanted in line.node.lower()]
        rows = [
            (f"{line.node} {line.kind} {line.name}", _device_cells(line))
            for line in kept[:_MOST_ROWS]
        ]
        if len(kept) > _MOST_ROWS:
            more = f"… {len(kept) - _MOST_ROWS} more: / filters"
            rows.append((_MORE, (more, *("",) * (len(table.columns) - 1))))
        table.fill(rows)

    def action_sort(self) -> None:
        """Sort by the next column."""
        if self._shown and self._shown.jobs:
            self._job_sort = (self._job_sort + 1) % len(JOB_SORTS)
        else:
            self._sort = (self._sort + 1) % len(_SORTS)
        if self._shown:
            self.show(self._shown)

    def action_pause(self) -> None:
        """Hold the picture, or go on."""
        self._paused = not self._paused
        if self._shown:
            self.show(self._shown)

    def action_filter(self) -> None:
        """Ask which jobs, nodes or ranks to show."""
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def action_leave(self) -> None:
        """Show everything again, then the jobs again."""
        field = self.query_one("#filter", Input)
        if self._filter or field.has_class("shown"):
            self._apply("")
        elif self._job is not None:
            self._go(None)

    def _go(self, job: str | None) -> None:
        """Show a job, or all of them."""
        self._job, self._paused = job, False
        self._apply("")
        self._say("#head", Text("reading …"))
        self._read(job)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the filter."""
        self._apply(event.value)

    def _apply(self, text: str) -> None:
        self._filter = text.strip()
        field = self.query_one("#filter", Input)
        field.value = self._filter
        field.remove_class("shown")
        jobs = self._job is None and self.query_one("#jobs", SteadyTable).row_count > 0
        self.query_one("#jobs" if jobs else "#ranks", SteadyTable).focus()
        if self._shown:
            self.show(self._shown)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Look into a job, a rank, or the node of a device."""
        if self._shown is None:
            return
        table = event.data_table
        wanted = table.key_at(event.cursor_row) if isinstance(table, SteadyTable) else None
        if wanted is None or wanted == _MORE:
            return
        if table.id == "jobs":
            self._go(wanted)
            return
        if table.id == "devices":
            self.push_screen(_Detail(_node_text(wanted.split(" ")[0], self._shown)))
            return
        line = next((line for line in self._shown.ranks if str(line.rank) == wanted), None)
        if line is not None:
            self.push_screen(_Detail(_rank_text(line)))


def _rank_cells(line: RankLine, *, narrow: bool) -> tuple[Text | str, ...]:
    return (
        Text(f"{line.rank}{' ◀' if line.late else ''}", LATE if line.late else ""),
        line.node,
        str(line.step),
        number(line.step_ms, digits=1),
        spark(line.trend, 12 if narrow else 24),
        phase_strip(line.phases, 24 if narrow else 60),
    )


def _device_cells(line: DeviceLine) -> tuple[str, ...]:
    percent = None if line.utilization is None else 100 * line.utilization
    memory = None if line.memory is None else 100 * line.memory
    return (
        f"{line.node} {line.name}".strip(),
        number(line.watts, " W"),
        f"{bar(line.utilization, 8)} {number(percent, ' %')}" if percent is not None else "–",
        number(memory, " %"),
        number(line.celsius, " °C"),
        rate(line.bytes_per_s),
    )


def _node_text(node: str, shown: TopSnapshot) -> Text:
    """Return everything that is shown of one node: its ranks, devices and incidents."""
    text = Text(f"node {plain_line(node)}\n", "bold")
    for line in shown.ranks:
        if line.node == node:
            mark = "  the others wait for it" if line.late else ""
            text.append(f"rank {line.rank:<6} {line.step_ms:10.1f} ms a step{mark}\n", "")
    for device in shown.devices:
        if device.node == node:
            name, *cells = _device_cells(device)
            told = "  ".join(cell for cell in cells if cell != "–")
            text.append(f"{plain_line(name.removeprefix(node).strip()):<12} {told}\n", "")
    about = [one for one in shown.incidents if f":{node}" in one]
    for incident in about:
        text.append(f"{plain_line(incident)}\n", "yellow")
    if not about:
        text.append("no open incident\n", "")
    return text


def _rank_text(line: RankLine) -> Text:
    text = Text(
        f"rank {line.rank} on {plain_line(line.node) or 'this node'}, step {line.step}\n", "bold"
    )
    text.append(f"median step {line.step_ms:.2f} ms\n{spark(line.trend, 60)}\n\n", "")
    for phase in PHASES:
        share = line.phases.get(phase, 0.0)
        text.append(f"{phase.value:<11} {bar(share, 30)} {100 * share:5.1f} %\n", "")
    if line.late:
        text.append("\nThe others wait for this rank.", LATE)
    return text
