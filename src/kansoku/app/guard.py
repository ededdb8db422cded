"""The node guard: may a job start here? Fails open when it breaks itself."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kansoku.errors import ConfigurationError
from kansoku.node.edge.guard import Readings, policy_in_time, process_age_s, run_checks
from kansoku.node.edge.machine import Machine
from kansoku.node.guard import Check, GuardPolicy, guard_policy
from kansoku.node.host import Host

__all__ = ["BUDGETS_S", "GuardAnswer", "drain", "guard", "guard_json", "read_guard_policy"]

SCHEMA = "kansoku.guard/1"
BUDGETS_S = {"prolog": 1.5, "epilog": 5.0, "health": 20.0, "check": 20.0}
"""From the start of the process to its end, by occasion."""
_ENDING_S = 0.15
"""Kept back for saying what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardAnswer:
    """Whether a job may start on this node."""

    node: str
    occasion: str
    checks: tuple[Check, ...]
    took_s: float
    """From the start of the process."""
    broken: str | None = None
    """Why the guard itself failed; then nothing is blocked."""

    @property
    def reasons(self) -> list[str]:
        """Why the node is blocked; empty where it is not."""
        return [check.sentence for check in self.checks if check.status == "block"]

    @property
    def blocked(self) -> bool:
        """The node must not run jobs."""
        return bool(self.reasons)


def read_guard_policy(path: Path | None, *, cluster: str | None = None) -> GuardPolicy:
    """Read what nodes must have, from a TOML file and, for GPUs and NICs, a cluster file."""
    policy = GuardPolicy()
    if path is not None:
        import tomllib  # the quickest guard is one without a file

        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigurationError(str(error), where=str(path)) from None
        policy = guard_policy(table, str(path))
    if cluster is None:
        return policy
    from kansoku.catalog import load_cluster  # heavy: a file alone is the quick way

    name = Machine().name
    node = next((n for n in load_cluster(cluster).nodes if n.name == name), None)
    if node is None:
        raise ConfigurationError(f"the cluster has no node {name}", where=cluster)
    return replace(
        policy,
        gpus=policy.gpus if policy.gpus is not None else node.kind.gpus,
        nics=policy.nics or tuple(nic.device for nic in node.kind.nics),
    )


def guard(
    policy: Callable[[], GuardPolicy] | GuardPolicy,
    *,
    occasion: str = "check",
    budget_s: float | None = None,
    host: Host | None = None,
    readings: Readings | None = None,
) -> GuardAnswer:
    """Check this node within the budget, counted from the start of the process.

    Never raises for ``prolog``, ``epilog`` and ``health``: what is wrong with the guard itself is
    said in ``broken``, and nothing is blocked.
    """
    host = host or Machine()
    began_s = process_age_s() if occasion != "check" else 0.0
    start = time.monotonic()
    budget = BUDGETS_S[occasion] if budget_s is None else budget_s
    checks: list[Check] = []
    broken = None
    try:
        left = budget - began_s - _ENDING_S
        if not callable(policy):
            rules = policy
        elif occasion == "check":
            rules = policy()
        else:
            rules = policy_in_time(policy, budget_s=max(left / 2, 0.05))
        left -= time.monotonic() - start
        checks = run_checks(rules, budget_s=max(left, 0.05), host=host, readings=readings)
    except Exception as error:
        if occasion == "check":
            raise
        broken = f"{type(error).__name__}: {error}"
    return GuardAnswer(
        node=host.name,
        occasion=occasion,
        checks=tuple(checks),
        took_s=began_s + time.monotonic() - start,
        broken=broken,
    )


def drain(answer: GuardAnswer) -> str | None:
    """Drain this node in Slurm with the reasons (HealthCheckProgram); return why it failed."""
    reason = f"kansoku: guard: {'; '.join(answer.reasons)}"[:250]
    words = ("scontrol", "update", f"nodename={answer.node}", "state=drain", f"reason={reason}")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()


def guard_json(answer: GuardAnswer) -> dict[str, Any]:
    """Return the versioned answer."""
    return {
        "schema": SCHEMA,
        "node": answer.node,
        "occasion": answer.occasion,
        "blocked": answer.blocked,
        "reasons": answer.reasons,
        "broken": answer.broken,
        "took_ms": round(answer.took_s * 1e3, 1),
        "checks": [asdict(check) for check in answer.checks],
    }
