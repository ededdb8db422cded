"""The reader's language, theme and time zone, and the headers every page carries."""

from dataclasses import dataclass
from typing import ClassVar

from starlette.requests import Request

__all__ = ["Settings", "security_headers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How this reader wants pages."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "language": ("en", "ja"),
        "theme": ("system", "light", "dark"),
        "zone": ("local", "utc"),
    }
    language: str = "en"
    theme: str = "system"
    zone: str = "local"
    here: str = "/"
    """Path and query of the page."""

    @classmethod
    def of(cls, request: Request) -> "Settings":
        """Read cookies; the language falls back to what the browser prefers."""
        chosen = {}
        for name, known in cls.CHOICES.items():
            value = request.cookies.get(f"kansoku_{name}")
            if value in known:
                chosen[name] = value
        if "language" not in chosen:
            chosen["language"] = _preferred(request.headers.get("accept-language", ""))
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return cls(here=here, **chosen)


def _preferred(header: str) -> str:
    """Return the first known language of an Accept-Language header, by its weights."""
    weighted = []
    for place, part in enumerate(header.split(",")[:20]):
        name, _, weight = part.strip().partition(";q=")
        try:
            weighted.append((-float(weight or 1), place, name[:2].lower()))
        except ValueError:
            continue
    for _, _, name in sorted(weighted):
        if name in Settings.CHOICES["language"]:
            return name
    return "en"


def security_headers(*, curves: bool = False) -> dict[str, str]:
    """Return the headers of a page: nothing from elsewhere, no script but our own files.

    BokehJS writes style elements, so a page with curves allows inline styles (never scripts).
    """
    styles = "'self' 'unsafe-inline'" if curves else "'self'"
    return {
        "content-security-policy": (
            f"default-src 'none'; script-src 'self'; style-src {styles}; img-src 'self' data: "
            "blob:; font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
            "frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",
        "cache-control": "no-store",
    }
