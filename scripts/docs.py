"""Write docs/commands.md from the help of every command, and check the links between pages.

``--check`` writes nothing and fails if the page is stale or a link is dead.
"""

import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "commands.md"
LINK = re.compile(r"\[[^\]]*\]\(([^)#:]+)(?:#[^)]*)?\)")


def help_text(words: tuple[str, ...]) -> str:
    """Return what ``kansoku WORDS --help`` prints, 80 columns wide."""
    from kansoku.cli._main import app

    out = io.StringIO()
    with redirect_stdout(out):
        app([*words, "--help"], prog_name="kansoku", standalone_mode=False)
    return out.getvalue().rstrip()


def commands_page() -> str:
    """Return the whole reference page."""
    os.environ.update({"COLUMNS": "90", "TERMINAL_WIDTH": "90", "NO_COLOR": "1"})
    from kansoku.cli._main import command_modules

    sections = [
        f"## kansoku {' '.join(words)}\n\n```text\n{help_text(words)}\n```\n"
        for words in sorted(command_modules())
    ]
    head = "# Commands\n\nWritten by `make docs` from the commands' own help.\n"
    return "\n".join([head, *sections])


def dead_links() -> list[str]:
    """Return ``page: target`` for every relative link that leads nowhere."""
    pages = [ROOT / "README.md", ROOT / "README.ja.md", *(ROOT / "docs").rglob("*.md")]
    return [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        if page.exists()
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]


def main() -> int:
    """Write or check."""
    text = commands_page()
    problems = [f"dead link in {line}" for line in dead_links()]
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            problems.append("docs/commands.md is stale: run `make docs`")
    else:
        PAGE.write_text(text, encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
