"""Load an inference endpoint: first token, per token, end to end, throughput."""

import os
from pathlib import Path
from typing import Annotated

import typer

from kansoku.cli._flags import HtmlFlag, JsonFlag
from kansoku.cli._output import emit


def command(
    url: Annotated[str, typer.Argument(help="Base URL, such as http://127.0.0.1:8000/v1.")],
    model: Annotated[str | None, typer.Option(help="Model; the only one by default.")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second, open loop.")] = 1.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the load.")] = 30.0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens asked for.")] = 128,
    prompt_words: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Words of the made-up prompt.")
    ] = 128,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts, one a line.")
    ] = None,
    completions: Annotated[
        bool, typer.Option("--completions", help="/completions instead of /chat/completions.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the arrival times.")] = 0,
    as_json: JsonFlag = False,
    html: HtmlFlag = None,
) -> None:
    """Benchmark an endpoint with the OpenAI protocol. Token: environment OPENAI_API_KEY.

    Exit 1 if any request failed, 130 if Ctrl-C ended the load: what had ended is printed.
    """
    from kansoku.app.bench_serve import bench_endpoint

    report = bench_endpoint(
        url,
        model=model,
        rate_per_s=rate,
        duration_s=seconds,
        output_tokens=output_tokens,
        prompt_words=prompt_words,
        prompts=prompts,
        chat=not completions,
        token=os.environ.get("OPENAI_API_KEY"),
        seed=seed,
    )
    emit(report.to_json(), report.view(), as_json=as_json, html=html)
    if report.interrupted:
        raise typer.Exit(130)
    raise typer.Exit(report.summary.failed > 0)
