"""The node guard without the command line library: it starts in a third of the time.

Slurm runs it before every job. ``kansoku guard`` and its help describe the same options.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kansoku.app.guard import BUDGETS_S, GuardAnswer, drain, guard, guard_json, read_guard_policy

__all__ = ["run", "say"]

_MARKS = {"ok": "ok", "warn": "warn", "block": "BLOCK", "skipped": "-", "late": "late"}


def say(answer: GuardAnswer, *, as_json: bool, quiet: bool) -> None:
    """Write JSON or lines on stdout; reasons to block go to stderr as well, where Slurm looks."""
    if as_json:
        print(json.dumps(guard_json(answer), indent=2))
    elif not quiet:
        for check in answer.checks:
            print(f"{_MARKS.get(check.status, check.status):>6}  {check.name:<8} {check.sentence}")
        print(f"{answer.node}: {'blocked' if answer.blocked else 'fit'} ({answer.took_s:.2f} s)")
    if answer.broken:
        print(f"kansoku guard: broken, nothing is blocked: {answer.broken}", file=sys.stderr)
    for reason in answer.reasons:
        print(f"kansoku guard: {answer.node} blocked: {reason}", file=sys.stderr)


def run(words: Sequence[str]) -> int:
    """Run ``kansoku guard`` with these words; return the exit code."""
    parser = argparse.ArgumentParser(prog="kansoku guard", add_help=False)
    parser.add_argument("--for", dest="occasion", choices=sorted(BUDGETS_S), default="check")
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--cluster")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--drain", action="store_true")
    parser.add_argument("--json", dest="as_json", action="store_true")
    chosen = parser.parse_args(words)
    answer = guard(
        lambda: read_guard_policy(chosen.policy, cluster=chosen.cluster),
        occasion=chosen.occasion,
        budget_s=chosen.budget,
    )
    say(answer, as_json=chosen.as_json, quiet=chosen.occasion != "check")
    if answer.blocked and chosen.drain:
        failed = drain(answer)
        if failed:
            print(f"kansoku guard: not drained: {failed}", file=sys.stderr)
    sys.stdout.flush()
    return int(answer.blocked)
