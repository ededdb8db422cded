"""English that is left on a page in another language: sentences that nobody translated.

Names, units, commands and the field's own words stay as they are ("forward", "GPU", "MFU"), so one
word says nothing; what reads as a sentence does: several lower-case words in a row.
"""

import re
from html.parser import HTMLParser

__all__ = ["english_left"]

_RUN = re.compile(r"(?<![\w/.:=&?-])[A-Za-z][a-z]+(?:[ ,;:]+(?:[A-Za-z][a-z']+|a|I))+(?![\w/=])")
_SMALL = frozenset(
    re.findall(r"\w+", """a about above after again all already also an and any are as at be because been before being
    below between but by can cannot come comes could did do does each either else enough ever every
    few fewer first for found from given had has have here how if in into is it its last later least
    less like many may more most much must named needs never new newest next no none not nothing now
    of off on once one only or other others out over own per same says see seen several shown since
    so some still such than that the their them then there these they this those to too under until
    up upon use used was were what when where whether which while who whose why will with within
    without would you your""")
)  # fmt: skip
_SILENT = frozenset({"script", "style", "code", "pre", "kbd"})


class _Texts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self._silent = [], 0

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self._silent += tag in _SILENT or "data-name" in given
        self.found += [
            given[n] for n in ("title", "aria-label", "placeholder", "alt") if given.get(n)
        ]

    def handle_endtag(self, tag):
        self._silent = max(0, self._silent - (tag in _SILENT))

    def handle_data(self, data):
        if not self._silent and data.strip():
            self.found.append(" ".join(data.split()))


def english_left(page):
    """Return the texts of a page in Japanese that hold an English sentence or a part of one."""
    parser = _Texts()
    parser.feed(page)
    return [text for text in dict.fromkeys(parser.found) if _is_english(text)]


def _is_english(text):
    return any(
        len(words := run.group().replace(",", " ").split()) >= 2
        and any(word.strip(";:").lower() in _SMALL for word in words)
        for run in _RUN.finditer(text)
    )
