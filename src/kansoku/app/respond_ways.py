"""By which ways a response works: its reserved nodes, check, progress, checkpoints and limits.

They are kept with the response, so that whoever takes it up need not know how it was begun.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kansoku.app.respond import Driver, progress_of_path, read_policy
from kansoku.diagnose.edge.cluster import SlurmControl
from kansoku.diagnose.edge.journal import Journal

__all__ = ["CHECK", "Ways"]

CHECK = "ssh {node} kansoku guard"
"""Validates a node where nothing else is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What the command's options say; paths absolute."""

    spares: tuple[str, ...] = ()
    reservation: str | None = None
    check: str = CHECK
    progress: str | None = None
    checkpoints: str | None = None
    policy: str | None = None

    def over(self, kept: Mapping[str, Any]) -> "Ways":
        """Return these, and what was kept where these say nothing."""
        known = {key: value for key, value in kept.items() if key in asdict(self)}
        old = replace(Ways(), **{**known, "spares": tuple(known.get("spares", ()))})
        given = {k: v for k, v in asdict(self).items() if v != getattr(Ways(), k)}
        return replace(old, **given)

    def driver(self, journal: Journal, say: Callable[[str], None]) -> Driver:
        """Return who carries responses out by these ways."""
        progress = Path(self.progress) if self.progress else None
        return Driver(
            control=SlurmControl(
                reserved=frozenset(self.spares),
                check=shlex.join(shlex.split(self.check)),
                reservation=self.reservation,
            ),
            journal=journal,
            policy=read_policy(Path(self.policy) if self.policy else None),
            progress=(lambda _job: progress_of_path(progress)) if progress else None,
            checkpoints=Path(self.checkpoints) if self.checkpoints else None,
            ways=asdict(self),
            say=say,
        )
