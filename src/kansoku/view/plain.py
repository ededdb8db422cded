"""Names out of foreign files without what a terminal would obey."""

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

__all__ = ["plain_line", "plain_text", "plain_view"]

T = TypeVar("T")

# Control characters but tab and line feed, what turns the direction of reading, other ends of
# lines, and halves of characters that no encoding writes.
_STEERS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_OBEYED = re.compile(f"[{_STEERS}]")
_OBEYED_OR_BREAK = re.compile(f"[\t\n{_STEERS}]")


def plain_text(text: str) -> str:
    r"""Return the text with control characters written out (``\x1b``, ``\u202e``)."""
    return _OBEYED.sub(_written, text)


def plain_line(text: str) -> str:
    r"""Return the text on one line: as ``plain_text``, with ``\t`` and ``\n`` written out too."""
    return _OBEYED_OR_BREAK.sub(_written, text)


def _written(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


def plain_view(view: T) -> T:
    """Return a view whose every text is plain: kernels, groups and files are named by others."""
    plain: T = _plain(view)
    return plain


def _plain(part: Any) -> Any:
    if type(part) is str:  # a Tone is one of ours
        return plain_text(part)
    if isinstance(part, (list, tuple)):
        return [_plain(item) for item in part]
    if is_dataclass(part) and not isinstance(part, type):
        changes = {field.name: _plain(getattr(part, field.name)) for field in fields(part)}
        return replace(part, **changes)
    return part
