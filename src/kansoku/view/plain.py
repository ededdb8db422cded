"""Names out of foreign files without what a terminal would obey."""

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

__all__ = ["plain_text", "plain_view"]

T = TypeVar("T")

# Control characters but tab and line feed, and what turns the direction of reading.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain_text(text: str) -> str:
    r"""Return the text with control characters written out (``\x1b``, ``\u202e``)."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


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
