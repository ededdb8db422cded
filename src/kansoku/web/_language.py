"""English and Japanese: texts are keyed by their English form, ``{}`` standing for figures.

``texts/ja/*.toml`` hold ``"English" = "日本語"`` lines; every file of the folder is read. A text
with figures in it ("12 of 100 nodes idle") is found by its pattern ("{} of {} nodes idle") and its
parts are put in order into the Japanese one (``{0}`` and so on change the order). ``{#}`` stands
for a number only, for texts so short that they would match others, ``{=}`` for a name of someone's
own, which stays as it is. What has no entry stays English.
"""

import re
import tomllib
from functools import cache, lru_cache
from importlib import resources

__all__ = ["languages_texts", "translate"]

_PLACE = re.compile(r"(\{[#=]?\})")
_ANY = {"{}": "(.+?)", "{=}": "(.+?)", "{#}": r"([\d.,]+)"}


@cache
def languages_texts(language: str) -> dict[str, str]:
    """Return English to the language's text; empty for English."""
    if language == "en":
        return {}
    folder = resources.files("kansoku.web") / "texts" / language
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            found |= tomllib.loads(file.read_text("utf-8"))
    return found


@cache
def _patterns(language: str) -> list[tuple[re.Pattern[str], str, list[bool]]]:
    """Return patterns, the most literal first, so that a loose one does not take its place.

    With each its text, and which of its places are translated themselves.
    """
    found = []
    for english, other in languages_texts(language).items():
        parts = _PLACE.split(english)
        if len(parts) > 1:
            expression = "".join(_ANY.get(part, re.escape(part)) for part in parts)
            weight = len(_PLACE.sub("", english))
            spoken = [part != "{=}" for part in parts if part in _ANY]
            found.append((weight, (re.compile(expression, re.DOTALL), other, spoken)))
    return [entry for _, entry in sorted(found, key=lambda f: -f[0])]


@lru_cache(maxsize=20_000)
def translate(text: str, language: str) -> str:
    """Return a text in the reader's language."""
    if language == "en" or not text:
        return text
    exact = languages_texts(language).get(text)
    if exact is not None:
        return exact
    for pattern, other, spoken in _patterns(language):
        match = pattern.fullmatch(text)
        if match is not None:
            parts = zip(match.groups(), spoken, strict=True)
            return other.format(*(translate(p, language) if said else p for p, said in parts))
    # Facts in a row: each is a sentence of its own.
    return (
        "; ".join(translate(part, language) for part in text.split("; ")) if "; " in text else text
    )
