"""Load an inference endpoint and report first token, per token, end to end, throughput."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from kansoku.bench.edge.endpoint_client import EndpointSettings, send_load
from kansoku.bench.endpoint import EndpointSummary, Percentiles, arrivals, summarise
from kansoku.errors import InputError
from kansoku.view import Block, Column, Facts, Sentence, Table, Tone, View

__all__ = ["EndpointReport", "bench_endpoint", "only_model"]

SCHEMA = "kansoku.bench.serve/1"
_SLOW_CLIENT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReport:
    """What the load showed."""

    url: str
    model: str
    summary: EndpointSummary
    interrupted: bool = False
    """Ctrl-C ended the load early; the requests that had ended by then count."""

    def to_json(self) -> dict[str, Any]:
        """Return the versioned answer."""
        return {
            "schema": SCHEMA,
            "url": self.url,
            "model": self.model,
            "interrupted": self.interrupted,
            **asdict(self.summary),
        }

    def view(self) -> View:
        """Return what a person reads."""
        s = self.summary
        rows = [
            ("time to first token", s.time_to_first_token),
            ("time per output token", s.time_per_output_token),
            ("end to end", s.end_to_end),
        ]
        blocks: list[Block] = [
            Facts(
                items=[
                    ("endpoint", f"{self.url}, model {self.model}"),
                    ("load", f"{s.offered_per_s:g} requests/s offered, open loop"),
                    ("requests", f"{s.requests}, {s.failed} failed, {s.duration_s:.1f} s"),
                    ("throughput", _throughput(s)),
                ]
            ),
            Table(
                title="Latency, ms",
                columns=[
                    Column(title=""),
                    *(Column(title=t, numeric=True) for t in ("p50", "p90", "p99", "mean")),
                ],
                rows=[(name, *_cells(values)) for name, values in rows],
            ),
        ]
        blocks += [
            Sentence(text=f"{count} requests failed: {what}", tone=Tone.BAD)
            for what, count in s.errors.items()
        ]
        if self.interrupted:
            blocks.append(
                Sentence(
                    text="Interrupted: only requests that had ended by then count.",
                    tone=Tone.NOTICE,
                )
            )
        if s.lateness_p99_s > _SLOW_CLIENT_S:
            blocks.append(
                Sentence(
                    text=f"Requests were sent up to {s.lateness_p99_s * 1e3:.0f} ms late: this "
                    "client is the bottleneck.",
                    tone=Tone.NOTICE,
                )
            )
        return View(title="Inference endpoint", blocks=blocks)


def _throughput(s: EndpointSummary) -> str:
    tokens = "" if s.output_tokens_per_s is None else f", {s.output_tokens_per_s:,.1f} tokens/s"
    return f"{s.completed_per_s:.2f} requests/s{tokens}"


def _cells(values: Percentiles | None) -> tuple[str | None, ...]:
    if values is None:
        return (None, None, None, None)
    return tuple(f"{1e3 * v:,.2f}" for v in (values.p50, values.p90, values.p99, values.mean))


def only_model(url: str, token: str | None) -> str:
    """Return the endpoint's model; raise InputError where it has several or none."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/models", headers=headers, timeout=10, trust_env=False
        )
        names = [str(row["id"]) for row in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"no list of models: {type(error).__name__}", where=url, remedy="name one with --model"
        ) from None
    if len(names) != 1:
        raise InputError(
            f"the endpoint has {len(names)} models: {', '.join(names)}", remedy="--model NAME"
        )
    return names[0]


def _prompts(file: Path | None, words: int) -> list[str]:
    if file is None:
        return [" ".join(["observe"] * words)]
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(
            f"cannot be read: {why}", where=str(file), remedy="--prompts FILE, one prompt a line"
        ) from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError("no prompt in the file", where=str(file), remedy="one prompt a line")
    return lines


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        right = parts.scheme in {"http", "https"} and bool(parts.hostname)
        right = right and (parts.port is None or parts.port > 0)
    except ValueError:
        right = False
    if not right:
        raise InputError(f"{url!r} is no URL", remedy="such as http://127.0.0.1:8000/v1")


def bench_endpoint(  # noqa: PLR0913 - one keyword a flag
    url: str,
    *,
    model: str | None = None,
    rate_per_s: float = 1.0,
    duration_s: float = 30.0,
    output_tokens: int = 128,
    prompt_words: int = 128,
    prompts: Path | None = None,
    chat: bool = True,
    token: str | None = None,
    seed: int = 0,
) -> EndpointReport:
    """Send open-loop load and sum it up."""
    _check_url(url)
    texts = _prompts(prompts, prompt_words)
    due = arrivals(rate_per_s, duration_s, seed)
    name = model or only_model(url, token)
    settings = EndpointSettings(
        url=url,
        model=name,
        prompts=texts,
        output_tokens=output_tokens,
        chat=chat,
        token=token,
    )
    results, interrupted = send_load(settings, [float(t) for t in due])
    if interrupted and not results:
        raise InputError("interrupted before any request had ended", where=url)
    summary = summarise(results, offered_per_s=rate_per_s)
    return EndpointReport(url=url, model=name, summary=summary, interrupted=interrupted)
