"""What a response does to a real cluster, by Slurm's own commands."""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kansoku.diagnose.response import NodeFacts
from kansoku.errors import PlatformError

__all__ = ["ClusterControl", "JobFacts", "SlurmControl"]

# Drain reasons that we set begin so; Slurm keeps them, so nobody else's drain is ever undone.
REASON_PREFIX = "kansoku: "


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A job as Slurm sees it."""

    state: str
    partition: str
    restarts: int
    excluded: str
    output: str | None = None
    """File of its standard output, as Slurm names it."""


class ClusterControl(Protocol):
    """The deeds; each may be done twice without harm, and raises PlatformError when it fails."""

    def nodes(self) -> list[NodeFacts]:
        """Return every node."""

    def job(self, job: str) -> JobFacts | None:
        """Return a job, or None when Slurm no longer knows it."""

    def drain(self, node: str, reason: str) -> None:
        """Take a node out of service."""

    def validate(self, node: str) -> str | None:
        """Run the node check there; return why it failed, or None."""

    def admit(self, node: str) -> None:
        """Let jobs run on a reserved node."""

    def give_back(self, node: str) -> None:
        """Return a node that we drained to service; refuse where somebody else drained it."""

    def requeue(self, job: str, exclude: str, *, prepare: Callable[[], None]) -> None:
        """Requeue a job so that it starts again without a node.

        ``prepare`` is called when it no longer runs and has not started again.
        """


@dataclass(frozen=True, kw_only=True)
class SlurmControl:
    """A live Slurm.

    ``reserved`` are nodes kept free: drained with the reason ``reserved``, or in the Slurm
    reservation ``reservation``. ``check`` is the command that validates a node; ``{node}`` in it is
    replaced by its name.
    """

    reserved: frozenset[str]
    check: str
    reservation: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0

    def _run(self, *words: str) -> str:
        try:
            answer = subprocess.run(
                words,
                capture_output=True,
                text=True,
                timeout=self.timeout_s,
                check=False,
                env={**os.environ, **self.environment},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PlatformError(
                f"{words[0]}: {error}", remedy="run where Slurm's commands are"
            ) from None
        if answer.returncode != 0:
            raise PlatformError(f"{' '.join(words)}: {(answer.stderr or answer.stdout).strip()}")
        return answer.stdout

    def nodes(self) -> list[NodeFacts]:
        """Return every node with its states and reason."""
        found = []
        for line in self._run("scontrol", "show", "node", "-o").splitlines():
            row = _words(line)
            if "NodeName" not in row:
                continue
            states = row.get("State", "").upper().replace("*", "+NOT_RESPONDING").split("+")
            name = row["NodeName"]
            found.append(
                NodeFacts(
                    name=name,
                    states=tuple(s for s in states if s),
                    reserved=name in self.reserved,
                    drained_by_us="DRAIN" in states
                    and line.partition("Reason=")[2].startswith(REASON_PREFIX),
                )
            )
        return found

    def job(self, job: str) -> JobFacts | None:
        """Return the job from the controller."""
        try:
            text = self._run("scontrol", "show", "job", job, "-o")
        except PlatformError as error:
            if "Invalid job id" in str(error):
                return None
            raise
        row = _words(text)
        return JobFacts(
            state=row.get("JobState", "UNKNOWN"),
            partition=row.get("Partition", ""),
            restarts=int(row.get("Restarts", "0")),
            excluded=row.get("ExcNodeList", ""),
            output=_path_after(text, "StdOut="),
        )

    def drain(self, node: str, reason: str) -> None:
        """Drain with our reason, so that we know our own drains again."""
        text = f"{REASON_PREFIX}{reason}"[:250]
        self._run("scontrol", "update", f"nodename={node}", "state=drain", f"reason={text}")

    def validate(self, node: str) -> str | None:
        """Run the check command; its output is the reason when it fails."""
        words = [word.replace("{node}", node) for word in shlex.split(self.check)]
        try:
            self._run(*words)
        except PlatformError as error:
            return str(error)
        return None

    def admit(self, node: str) -> None:
        """Resume a node that is drained as reserved; take it out of its reservation."""
        if self.reservation:
            kept = sorted(self.reserved - {node})
            if kept:
                self._run(
                    "scontrol", "update", f"reservationname={self.reservation}",
                    f"nodes={','.join(kept)}",
                )  # fmt: skip
            else:
                self._run("scontrol", "delete", f"reservationname={self.reservation}")
        self._resume(self._settled(node))

    def give_back(self, node: str) -> None:
        """Resume a node that is drained with our reason; nobody else's drain is undone."""
        facts = self._settled(node)
        if "DRAIN" in facts.states and not facts.drained_by_us:
            raise PlatformError(
                f"{node} is drained by somebody else", remedy="ask them; see sinfo -R"
            )
        self._resume(facts)

    def _resume(self, facts: NodeFacts) -> None:
        if "DRAIN" in facts.states or "DOWN" in facts.states:
            self._run("scontrol", "update", f"nodename={facts.name}", "state=resume")

    def _settled(self, node: str) -> NodeFacts:
        """Return the node once the controller knows its state.

        For some seconds after a controller came back its nodes are UNKNOWN, and it refuses to
        change them.
        """
        end = time.monotonic() + self.timeout_s
        while True:
            facts = next((facts for facts in self.nodes() if facts.name == node), None)
            if facts is None:
                raise PlatformError(f"Slurm has no node {node}")
            if "UNKNOWN" not in facts.states:
                return facts
            if time.monotonic() > end:
                raise PlatformError(f"{node} has not registered with the controller")
            time.sleep(1.0)

    def requeue(self, job: str, exclude: str, *, prepare: Callable[[], None]) -> None:
        """Hold, exclude and release, so that the job cannot start in between on the bad node.

        A job that is pending already, because somebody requeued it or an earlier try got this far,
        only gets the exclusion.
        """
        facts = self.job(job)
        if facts is None:
            raise PlatformError(f"Slurm no longer knows job {job}: submit it again")
        if facts.state not in {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}:
            self._run("scontrol", "requeuehold", job)
        else:
            self._run("scontrol", "hold", job)
        others = [] if facts.excluded in {"", "(null)"} else [facts.excluded]
        self._run(
            "scontrol", "update", f"jobid={job}", f"excnodelist={','.join([*others, exclude])}"
        )
        self._ended(job)
        prepare()
        # Slurm lets a requeued job wait two minutes; its replacement node is ready now.
        self._run("scontrol", "update", f"jobid={job}", "starttime=now")
        self._run("scontrol", "release", job)

    def _ended(self, job: str) -> None:
        """Wait until the processes of a requeued job are gone; a dead node's never report that."""
        end = time.monotonic() + self.timeout_s
        while time.monotonic() < end:
            facts = self.job(job)
            if facts is None or facts.state not in {"RUNNING", "COMPLETING"}:
                return
            time.sleep(0.5)


def _words(line: str) -> dict[str, str]:
    """Read ``Key=value`` words; values with blanks keep their first word, which is all we use."""
    pairs: Sequence[str] = line.split()
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _path_after(text: str, key: str) -> str | None:
    """Return a path that may hold blanks: it ends where the next ``Key=`` begins."""
    _, found, rest = text.partition(key)
    path = re.split(r"\s+[A-Z]\w*=", rest, maxsplit=1)[0].strip()
    return path if found and path.startswith("/") else None
