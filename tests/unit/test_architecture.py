"""What import-linter cannot see: calls with effects outside the places allowed."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "kansoku"
# Rows 4-8: analysis. Effects live in edge/, store, telemetry, capture, app and the UIs.
PURE = (
    "trace",
    "node",
    "jobs",
    "fabric",
    "burst",
    "plan",
    "bench",
    "diagnose",
    "view",
    "stats",
    "model",
)
EFFECTS = {
    "open", "print", "input", "time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns",
    "time.sleep", "os.getenv", "datetime.now", "datetime.datetime.now", "subprocess.run",
    "subprocess.Popen", "socket.socket",
}  # fmt: skip


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return ""


def _effects(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno} calls {_name(node.func)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _name(node.func) in EFFECTS
    ]
    found += [
        f"{path.relative_to(SOURCE)}:{node.lineno} reads os.environ"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _name(node) == "os.environ"
    ]
    return found


@pytest.mark.parametrize("package", PURE)
def test_analysis_has_no_effects(package):
    files = [p for p in (SOURCE / package).rglob("*.py") if "edge" not in p.parts]
    assert [line for path in files for line in _effects(path)] == []


def test_only_cli_prints():
    files = [p for p in SOURCE.rglob("*.py") if p.relative_to(SOURCE).parts[0] != "cli"]
    calls = [line for path in files for line in _effects(path) if line.endswith("calls print")]
    # Code injected into a user's job has no logger; it may say one line on stderr.
    assert [line for line in calls if not line.startswith("capture/")] == []


def test_the_scan_sees_effects(tmp_path, monkeypatch):
    """A check that cannot fail is no check."""
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    bad = tmp_path / "bad.py"
    bad.write_text("import os, time\nprint(open('x'))\ntime.time_ns()\nos.environ['A']\n")
    assert len(_effects(bad)) == 4
