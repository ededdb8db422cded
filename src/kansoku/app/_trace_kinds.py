"""Which of the formats that are no Kineto traces the paths hold, told by content."""

from collections.abc import Callable, Sequence
from pathlib import Path

from kansoku.formats.trace_heads import is_execution_trace, is_inspector

__all__ = ["files_of"]

_SUFFIXES = (".log", ".json", ".jsonl", ".txt")
_TESTS: dict[str, Callable[[bytes], bool]] = {
    "inspector": is_inspector,
    "execution": is_execution_trace,
}
_HEAD_BYTES = 4096


def files_of(kind: str, paths: Sequence[Path | str]) -> list[Path]:
    """Return the files of a kind (``inspector`` or ``execution``) if all paths hold such.

    Empty where some named file, or some folder, has none.
    """
    test = _TESTS[kind]
    found: list[Path] = []
    for path in map(Path, paths):
        inside = [path]
        if path.is_dir():
            inside = [e for e in sorted(path.rglob("*")) if e.suffix.lower() in _SUFFIXES]
        files = [entry for entry in inside if test(_head(entry))]
        if not files:
            return []
        found += files
    return found


def _head(path: Path) -> bytes:
    # A pipe can be read once only, and that is for the reader of traces.
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""
