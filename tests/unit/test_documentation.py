"""Documents and commands agree; the words are the glossary's; nothing is left to do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Words that mean something the glossary has another word for, in code names and documents.
SYNONYMS = {
    r"\bworker rank\b": "rank",
    r"\bslow node rank\b": "straggler",
    r"\bMFU of \d+ ?%(?![^.]*\b(convention|peak)\b)": "MFU with convention, peak and window",
    r"\bbackpropagation phase\b": "backward",
    r"\bweight update phase\b": "optimizer",
    r"\bcomms group\b": "process group",
}
LEFTOVERS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b|\bNotImplemented" + r"Error")


def sources():
    return sorted((ROOT / "src").rglob("*.py"))


def pages():
    found = [ROOT / "README.md", ROOT / "README.ja.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.exists()]


def test_reference_is_current_and_links_lead_somewhere():
    answer = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "docs.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_command_has_a_page_of_its_own():
    from kansoku.cli._main import command_modules

    prose = "\n".join(
        page.read_text(encoding="utf-8") for page in pages() if page.name != "commands.md"
    )
    missing = [w for w in command_modules() if f"kansoku {' '.join(w)}" not in prose]
    assert missing == []


@pytest.mark.parametrize("pattern", SYNONYMS)
def test_words_are_the_glossarys(pattern):
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*sources(), *pages()]
        for match in re.finditer(pattern, path.read_text(encoding="utf-8"))
    ]
    assert found == [], f"say {SYNONYMS[pattern]!r}"


def test_nothing_is_left_to_do():
    found = [
        str(path.relative_to(ROOT))
        for path in sources()
        if LEFTOVERS.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_modules_stay_short():
    """600 lines at most."""
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 600
    }
    assert long == {}
