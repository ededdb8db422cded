"""Who may see what: operators, tenants, agents; and what a provider sees of a job.

Policy (docs/serve.md says it for people):

- **local**: whoever reaches a server that listens on loopback only and knows no principals;
- **operator** sees every job, metric, event, probe, burst, step, finding and incident. Of the
  inside of a job (names and attributes of spans, stacks of profiles) only what runs show whose
  user consented (``kansoku.consent`` = true among the resource attributes);
- **tenant** sees all of the jobs of its Slurm user and accounts, and metrics of their nodes while
  they ran there; nothing of others, and not the fabric;
- **agent** may send, and read nothing.
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kansoku.errors import ConfigurationError

__all__ = ["LOCAL", "Access", "Principal", "hide_inside", "is_loopback", "rows_of"]

_ROLES = ("operator", "tenant", "agent")
_BY_RUN = ("spans", "steps", "profiles")
_BY_SUBJECT = ("events", "findings", "incidents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """One who asks."""

    name: str
    role: str
    """``local``, ``operator``, ``tenant`` or ``agent``."""
    user: str | None = None
    accounts: tuple[str, ...] = ()

    @property
    def may_send(self) -> bool:
        """Whether it may add rows."""
        return self.role in {"local", "operator", "agent"}

    @property
    def may_read(self) -> bool:
        """Whether it may ask at all."""
        return self.role != "agent"


LOCAL = Principal(name="local", role="local")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address."""
    return host in {"localhost", "::1"} or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


class Access:
    """The principals of one server; without any, everybody is ``local``."""

    def __init__(self, tokens: Mapping[str, Principal], certificates: Mapping[str, Principal]):
        self._tokens = dict(tokens)
        self._certificates = dict(certificates)

    @property
    def open(self) -> bool:
        """Whether nobody needs to say who they are."""
        return not self._tokens and not self._certificates

    @classmethod
    def load(cls, path: Path | None) -> "Access":
        """Read a principals file; raise ConfigurationError naming what is wrong in it."""
        if path is None:
            return cls({}, {})
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigurationError(str(error), where=str(path)) from None
        rows = data.get("principal")
        if not isinstance(rows, list) or not rows or set(data) != {"principal"}:
            raise ConfigurationError(
                "expected [[principal]] tables and nothing else", where=str(path),
                remedy="see docs/serve.md",
            )  # fmt: skip
        tokens: dict[str, Principal] = {}
        certificates: dict[str, Principal] = {}
        for number, row in enumerate(rows, 1):
            principal = _principal(row, f"{path}: principal {number}")
            if "token_sha256" in row:
                tokens[row["token_sha256"].lower()] = principal
            if "certificate" in row:
                certificates[row["certificate"]] = principal
        return cls(tokens, certificates)

    def identify(self, authorization: str | None, certificate: str | None) -> Principal | None:
        """Return who asks, or None where nobody known does."""
        if self.open:
            return LOCAL
        if certificate is not None and certificate in self._certificates:
            return self._certificates[certificate]
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return None
        # Looked up by digest: timing tells nothing about the token itself.
        digest = hashlib.sha256(token.strip().encode()).hexdigest()
        return self._tokens.get(digest)


def _principal(row: Any, where: str) -> Principal:
    known = {"name", "role", "user", "accounts", "token_sha256", "certificate"}
    if not isinstance(row, dict) or not {"name", "role"} <= set(row) <= known:
        raise ConfigurationError(
            f"needs name and role, and knows {', '.join(sorted(known))}", where=where
        )
    if row["role"] not in _ROLES:
        raise ConfigurationError(f"role {row['role']!r} is not {', '.join(_ROLES)}", where=where)
    if not ({"token_sha256", "certificate"} & set(row)):
        raise ConfigurationError("has neither token_sha256 nor certificate", where=where)
    if not re.fullmatch(r"[0-9a-fA-F]{64}", str(row.get("token_sha256", "0" * 64))):
        raise ConfigurationError("token_sha256 must be 64 hex digits", where=where,
                                 remedy="printf %s TOKEN | sha256sum")  # fmt: skip
    accounts = row.get("accounts", [])
    texts = [row["name"], row.get("user", ""), row.get("certificate", "")]
    if not isinstance(accounts, list) or not all(isinstance(t, str) for t in [*texts, *accounts]):
        raise ConfigurationError("accounts must be a list, the rest texts", where=where)
    if row["role"] == "tenant" and not row.get("user") and not accounts:
        raise ConfigurationError("a tenant needs a user or accounts", where=where)
    return Principal(
        name=row["name"], role=row["role"], user=row.get("user"), accounts=tuple(accounts)
    )


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _mine(principal: Principal, prefix: str = "") -> str:
    """Return an SQL condition on columns ``user`` and ``account``."""
    parts = []
    if principal.user:
        parts.append(f'{prefix}"user" = {_text(principal.user)}')
    if principal.accounts:
        accounts = ", ".join(_text(one) for one in principal.accounts)
        parts.append(f"{prefix}account IN ({accounts})")
    return f"({' OR '.join(parts)})" if parts else "false"


def rows_of(principal: Principal) -> dict[str, str] | None:
    """Return table to the SQL condition on rows a principal sees; None where it sees all."""
    if principal.role in {"local", "operator"}:
        return None
    mine = _mine(principal)
    # A run is a tenant's by what its sender said, or by the Slurm job that it names.
    own_jobs = f"SELECT j.job_id FROM main.jobs j WHERE {_mine(principal, 'j.')}"
    own_runs = (
        f"SELECT o.run FROM main.owners o WHERE {_mine(principal, 'o.')} OR o.job IN ({own_jobs})"
    )
    subjects = f"SELECT 'job:' || s.name FROM ({own_jobs} UNION ALL {own_runs}) s(name)"
    conditions = {"jobs": mine}
    conditions |= dict.fromkeys(_BY_RUN, f"run IN ({own_runs})")
    conditions |= dict.fromkeys(_BY_SUBJECT, f"subject IN ({subjects})")
    conditions |= dict.fromkeys(("metrics", "probes", "bursts"), "false")
    return conditions


def hide_inside(
    frame: pl.DataFrame, principal: Principal, owners: Mapping[str, bool | None]
) -> pl.DataFrame:
    """Blank the inside of runs whose user did not consent, for operators.

    ``owners`` maps a run to its consent. Applies to frames with a ``run`` column.
    """
    if principal.role != "operator" or "run" not in frame.columns:
        return frame
    shown = [run for run, consent in owners.items() if consent]
    visible = pl.col("run").is_in(shown)
    columns = set(frame.columns)
    hidden = []
    if {"name", "kind"} <= columns:
        hidden.append(pl.when(visible).then("name").otherwise("kind").alias("name"))
    for name in ("attributes", "stack"):
        if name in columns:
            hidden.append(pl.when(visible).then(name).alias(name))  # noqa: PERF401 - two kinds
    return frame.with_columns(hidden) if hidden else frame
