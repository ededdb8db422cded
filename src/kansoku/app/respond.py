"""Respond to an incident as operators do: drain, replace, requeue, watch; dry run unless told."""

import os
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kansoku.app._respond_lives import lives_json, lives_table
from kansoku.app.checkpoints import checkpoint_json, checkpoints_of_folder
from kansoku.diagnose.checkpoints import CheckpointState, checkpoint_sentences
from kansoku.diagnose.edge.checkpoints import set_aside
from kansoku.diagnose.edge.cluster import ClusterControl
from kansoku.diagnose.edge.journal import Journal
from kansoku.diagnose.life import NodeLife, incidents_within, lives_of
from kansoku.diagnose.recognise import progress_of
from kansoku.diagnose.response import (
    FINAL,
    BreakerState,
    Deed,
    DeedKind,
    NodeFacts,
    Response,
    ResponsePolicy,
    State,
    after,
    allowed,
    next_deed,
    plan,
)
from kansoku.errors import ConfigurationError, InputError, PlatformError
from kansoku.model import Subject
from kansoku.view import Column, Facts, Sentence, Table, Tone, View

__all__ = [
    "Driver",
    "Target",
    "clear_breaker",
    "progress_of_output",
    "progress_of_path",
    "read_policy",
    "respond_json",
    "respond_view",
    "target_of_incident",
]

SCHEMA = "kansoku.respond/1"
_NODE_KINDS = {"node", "gpu", "nic"}
_UNSEEN = "but nothing shows whether it gets on: name a folder with --progress"
_GONE = {"FAILED", "CANCELLED", "COMPLETED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to respond to."""

    incident: str
    node: str
    job: str | None
    reason: str
    domain: str | None = None
    """None when an operator named the node."""
    confidence: float = 1.0


def target_of_incident(answer: Mapping[str, Any], *, job: str | None, where: str) -> Target:
    """Take the first hypothesis of a ``kansoku diagnose --json`` answer.

    Raises InputError where it names no node: then there is nothing to drain.
    """
    try:
        incident = answer["incidents"][0]
        first = incident["hypotheses"][0]
        subject = first["subject"]
        found = Target(
            incident=str(incident.get("id", incident["onset_ns"])),
            node="",
            job=job,
            reason=f"{first['domain']}: {first['component']}",
            domain=str(first["domain"]),
            confidence=float(first["confidence"]),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(
            f"no incident with a hypothesis: {error}",
            where=where,
            remedy="give the output of kansoku diagnose --json",
        ) from None
    parsed = Subject.parse(subject) if subject else None
    if parsed is None or parsed.kind not in _NODE_KINDS:
        raise InputError(
            f"the cause is {subject or 'the job'}, not a node: nothing is drained",
            where=where,
            remedy="name the node with --node if you know better",
        )
    return replace(found, node=parsed.name.split("/")[0])


def read_policy(path: Path | None) -> ResponsePolicy:
    """Read limits from a TOML file; refuse unknown keys and wrong types."""
    if path is None:
        return ResponsePolicy()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(str(error), where=str(path)) from None
    known = {field.name: getattr(ResponsePolicy(), field.name) for field in fields(ResponsePolicy)}
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigurationError(
                f"unknown key {key!r}", where=str(path), remedy=f"known: {', '.join(known)}"
            )
        if isinstance(known[key], tuple):
            changes[key] = tuple(str(item) for item in value)
        elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigurationError(f"{key} must be a number, not {value!r}", where=str(path))
        else:
            changes[key] = type(known[key])(value)
    return ResponsePolicy(**changes)


def progress_of_path(path: Path) -> int | None:
    """Return a number that grows with the job's progress: newest change below a folder, ns.

    The folder is the checkpoint or run folder of the job; None while it does not exist.
    """
    if not path.exists():
        return None
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    times = []
    for file in files:
        try:
            times.append(file.stat().st_mtime_ns)
        except OSError:
            continue  # a checkpoint being replaced at this moment
    return max(times, default=None)


_TAIL_BYTES = 16_384
_LAST_LINES = 5


def progress_of_output(path: Path) -> int | None:
    """Return when a job's output last grew, ns, while its newest lines state a step; else None.

    A job that only starts, or writes errors, makes no progress by that.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
            time_ns = os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
    newest = [line for line in lines if line.strip()][-_LAST_LINES:]
    return time_ns if any(progress_of(line) is not None for line in newest) else None


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Carries responses out, one deed after the other, keeping every state on disk."""

    control: ClusterControl
    journal: Journal
    policy: ResponsePolicy
    progress: Callable[[str], int | None] | None = None
    """A number that grows while the job gets on, None where it cannot be seen; without it the
    job's own output is read."""
    checkpoints: Path | None = None
    """Where the job keeps its checkpoints: those that are not whole are set aside."""
    ways: Mapping[str, Any] = field(default_factory=dict)
    """How the above was told; kept with each response that begins."""
    now_ns: Callable[[], int] = time.time_ns
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], None] = lambda _text: None

    def check(self, target: Target) -> str | None:
        """Return why nothing may be done, or None."""
        policy = self.policy
        if target.domain is not None and target.domain not in policy.domains:
            return (
                f"causes in {target.domain} take no node out (policy: {', '.join(policy.domains)})"
            )
        if target.confidence < policy.least_confidence:
            return f"confidence {target.confidence:.2f} is below {policy.least_confidence:.2f}"
        return allowed(
            self.journal.breaker(),
            policy,
            self._nodes(),
            node=target.node,
            job=target.job,
            now_ns=self.now_ns(),
        )

    def dry_run(self, target: Target) -> tuple[list[str], str | None]:
        """Return what would be done, and why it would be refused."""
        lines = plan(
            self._new(target), self._nodes(), self.policy, checkpoint=self.checkpoint_state()
        )
        return lines, self.check(target)

    def checkpoint_state(self) -> CheckpointState | None:
        """Return what the job could resume from; None where no folder was named."""
        if self.checkpoints is None:
            return None
        return checkpoints_of_folder(self.checkpoints, until_ns=self.now_ns())

    def _nodes(self) -> list[NodeFacts]:
        """Return every node with how often it was taken out."""
        lives, days, now = lives_of(self.journal.lives()), self.policy.lemon_days, self.now_ns()
        return [
            replace(
                facts, incidents=incidents_within(lives[facts.name].out_ns, days=days, now_ns=now)
            )
            if facts.name in lives
            else facts
            for facts in self.control.nodes()
        ]

    def _progress(self, job: str) -> int | None:
        if self.progress is not None:
            return self.progress(job)
        facts = self.control.job(job)
        return progress_of_output(Path(facts.output)) if facts and facts.output else None

    def _new(self, target: Target) -> Response:
        now = self.now_ns()
        return Response(
            id=f"{now}-{target.node}",
            incident=target.incident,
            node=target.node,
            job=target.job,
            reason=target.reason,
            begun_ns=now,
            changed_ns=now,
            ways=dict(self.ways),
        )

    def begin(self, target: Target) -> Response:
        """Start and carry out a response; raise PlatformError where the breakers forbid it.

        A response to the same node and job that somebody began is taken up instead.
        """
        with self.journal.owned():
            for response in self.journal.unfinished():
                if (response.node, response.job) == (target.node, target.job):
                    return self.drive(response)
            refusal = self.check(target)
            if refusal is not None:
                self.journal.audit(
                    {"time_ns": self.now_ns(), "refused": refusal, "node": target.node}
                )
                raise PlatformError(
                    f"no response: {refusal}", remedy="see --status; --clear resets"
                )
            response = self._new(target)
            breaker = self.journal.breaker()
            begun = (*breaker.begun_ns, response.begun_ns)[-100:]
            self.journal.save_breaker(replace(breaker, begun_ns=begun))
            self.journal.save(response)
            return self.drive(response)

    def resume(self, driver_of: Callable[[Response], "Driver"] | None = None) -> list[Response]:
        """Take up every response that somebody began and did not end.

        ``driver_of`` returns who works by the ways of that response; else this driver does.
        """
        with self.journal.owned():
            return [
                (driver_of(response) if driver_of else self).drive(response)
                for response in self.journal.unfinished()
            ]

    def drive(self, response: Response) -> Response:
        """Do one deed after the other until the response is over."""
        while response.state not in FINAL:
            deed = next_deed(response, self._nodes(), self.policy)
            if deed is None:
                response = replace(response, state=State.RECOVERED, changed_ns=self.now_ns())
                self.journal.save(response)
                break
            self.say(deed.sentence)
            if deed.kind is DeedKind.REQUEUE and response.job and response.step_before is None:
                response = replace(response, step_before=self._progress(response.job) or 0)
                self.journal.save(response)
            self.journal.audit(self._record(response, deed, "begin"))
            failure = self._do(response, deed)
            if deed.kind is DeedKind.REQUEUE and failure is None:
                response = replace(response, resumes_from=self._resumes_from())
            self.journal.audit(self._record(response, deed, failure or "done"))
            # Before the state is kept: who dies in between does the deed again and notes it then.
            self._remember(response, deed, failure)
            response = after(response, deed, failure=failure, now_ns=self.now_ns())
            self.journal.save(response)
        return response

    def _record(self, response: Response, deed: Deed, outcome: str) -> dict[str, Any]:
        return {
            "time_ns": self.now_ns(),
            "response": response.id,
            "deed": str(deed.kind),
            "node": deed.node,
            "job": deed.job,
            "sentence": deed.sentence,
            "outcome": outcome,
        }

    def _do(self, response: Response, deed: Deed) -> str | None:
        """Do one deed; return why it failed."""
        try:
            if deed.kind is DeedKind.DRAIN:
                self.control.drain(response.node, response.reason)
            elif deed.kind is DeedKind.VALIDATE and deed.node:
                return self.control.validate(deed.node)
            elif deed.kind is DeedKind.ADMIT and deed.node:
                self.control.admit(deed.node)
            elif deed.kind is DeedKind.REQUEUE and deed.job:
                self._still_drained(response)
                self.control.requeue(
                    deed.job, response.node, prepare=lambda: self._set_aside(response)
                )
            elif deed.kind is DeedKind.WATCH and deed.job:
                return self._watch(deed.job, response.step_before)
        except PlatformError as error:
            return str(error)
        return None

    def _still_drained(self, response: Response) -> None:
        """Drain again what a controller forgot that died before it saved its state."""
        known = {facts.name: facts for facts in self.control.nodes()}
        facts = known.get(response.node)
        if facts is not None and not {"DRAIN", "DRAINED", "DRAINING"} & set(facts.states):
            self.control.drain(response.node, response.reason)

    def _resumes_from(self) -> str | None:
        state = self.checkpoint_state()
        return state.last.name if state and state.last else None

    def _set_aside(self, response: Response) -> None:
        """Rename newer checkpoints that are not whole, so that the job finds the last good one."""
        state = self.checkpoint_state()
        for broken in state.incomplete if state and self.checkpoints else ():
            try:
                target = set_aside(self.checkpoints, broken)  # type: ignore[arg-type]
            except OSError as error:
                outcome = error.strerror or str(error)
            else:
                outcome = f"renamed {target.name}"
            self.journal.audit(
                {"time_ns": self.now_ns(), "response": response.id, "deed": "set_aside",
                 "node": None, "job": response.job, "outcome": outcome,
                 "sentence": f"set aside {broken.name}: {broken.problem}"}
            )  # fmt: skip

    def _watch(self, job: str, before: int | None) -> str | None:
        deadline = self.now_ns() + self.policy.progress_within_s * 1_000_000_000
        state, seen = "unknown", False
        while self.now_ns() < deadline:
            facts = self.control.job(job)
            state = facts.state if facts else "unknown"
            current = self._progress(job)
            seen |= current is not None
            went_on = current is not None and current > (before or 0)
            if state == "COMPLETED" or (went_on and state == "RUNNING"):
                return None
            if facts is None or state in _GONE:
                return f"job {job} is {state}"
            self.sleep(1.0)
        if state == "RUNNING" and not seen and not before:
            return f"job {job} runs, {_UNSEEN}"
        return f"job {job} made no progress within {self.policy.progress_within_s} s ({state})"

    def _remember(self, response: Response, deed: Deed, failure: str | None) -> None:
        """Write the node's life and let repeated failure open the breaker."""
        # A drain may be done twice, the node goes out once.
        known = any(life.get("response") == response.id for life in self.journal.lives())
        if deed.kind is DeedKind.DRAIN and failure is None and not known:
            self.journal.life(
                {
                    "time_ns": self.now_ns(),
                    "node": response.node,
                    "event": "serviced_out",
                    "reason": response.reason,
                    "response": response.id,
                }
            )
        if deed.kind is not DeedKind.WATCH or response.job is None:
            return
        if failure is not None and failure.endswith(_UNSEEN):
            return  # nobody knows: it counts neither for nor against the job
        breaker = self.journal.breaker()
        restarts = dict(breaker.restarts)
        restarts[response.job] = 0 if failure is None else restarts.get(response.job, 0) + 1
        reason = breaker.open_reason
        if restarts[response.job] >= self.policy.most_restarts_without_progress:
            reason = f"job {response.job} was restarted {restarts[response.job]} times in vain"
        self.journal.save_breaker(replace(breaker, restarts=restarts, open_reason=reason))


def clear_breaker(journal: Journal, now_ns: int) -> None:
    """Let responses begin again, after a person looked."""
    breaker = journal.breaker()
    journal.save_breaker(BreakerState(begun_ns=breaker.begun_ns, restarts={}))
    journal.audit({"time_ns": now_ns, "cleared": breaker.open_reason})


def respond_json(
    responses: list[Response],
    *,
    plan_lines: list[str] | None = None,
    refusal: str | None = None,
    checkpoint: CheckpointState | None = None,
    lives: Mapping[str, NodeLife] | None = None,
) -> dict[str, Any]:
    """Return the versioned answer."""
    return {
        "schema": SCHEMA,
        "dry_run": plan_lines is not None,
        "plan": plan_lines or [],
        "refused": refusal,
        "checkpoint": checkpoint_json(checkpoint),
        "responses": [response.to_json() for response in responses],
        "nodes": lives_json(lives or {}),
    }


def respond_view(
    responses: list[Response],
    *,
    plan_lines: list[str] | None = None,
    refusal: str | None = None,
    checkpoint: CheckpointState | None = None,
    lives: Mapping[str, NodeLife] | None = None,
) -> View:
    """Return what a person reads."""
    blocks: list[Sentence | Table | Facts] = []
    if plan_lines is not None:
        blocks += [Sentence(text=f"would {line}") for line in plan_lines]
        blocks.append(Sentence(text="Dry run: nothing was done (--no-dry-run).", tone=Tone.MUTED))
    if checkpoint is not None:
        blocks += [Sentence(text=text) for text in checkpoint_sentences(checkpoint)]
    if refusal:
        blocks.append(Sentence(text=f"It would be refused: {refusal}", tone=Tone.NOTICE))
    if responses:
        blocks.append(
            Table(
                title="Responses",
                columns=[Column(title=t) for t in ("node", "job", "state", "spare", "note")],
                rows=[(r.node, r.job, str(r.state), r.spare, r.note or None) for r in responses],
                tones=[Tone.BAD if r.state is State.ESCALATED else Tone.PLAIN for r in responses],
            )
        )
    if lives:
        blocks.append(lives_table(lives))
    return View(title="Response", blocks=blocks)
