"""A real streaming server of known pace: lower bounds hold exactly, failures are counted."""

import json
import subprocess
import sys

import pytest
from tests.labs.openai_endpoint import endpoint_app, serving

from kansoku.app.bench_serve import bench_endpoint
from kansoku.bench.endpoint import RequestResult, arrivals, summarise
from kansoku.errors import InputError

pytestmark = pytest.mark.real


def test_pace_of_a_server():
    with serving(endpoint_app(first_s=0.05, per_token_s=0.01)) as url:
        summary = bench_endpoint(url, rate_per_s=10, duration_s=1.5, output_tokens=8).summary
    assert summary.failed == 0
    # A timer never fires early; a busy machine only makes it late.
    assert summary.time_to_first_token.p50 >= 0.05
    assert summary.time_per_output_token.p50 >= 0.01
    assert summary.end_to_end.p50 >= 0.05 + 7 * 0.01
    assert summary.requests == len(arrivals(10, 1.5, 0))


def test_failures_are_counted_and_exit_1():
    with serving(endpoint_app(first_s=0, per_token_s=0, fail_every=3)) as url:
        answer = subprocess.run(
            [sys.executable, "-m", "kansoku", "bench", "serve", url, "--rate", "20", "--seconds",
             "0.5", "--output-tokens", "2", "--json"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    told = json.loads(answer.stdout)
    assert answer.returncode == 1
    assert told["errors"] == {"HTTP 503": told["failed"]}
    assert told["failed"] == told["requests"] // 3


def test_a_dead_endpoint_names_the_remedy():
    with pytest.raises(InputError, match="--model"):
        bench_endpoint("http://127.0.0.1:9/v1")


def test_percentiles_and_rates_by_hand():
    results = [
        RequestResult(planned_s=i, sent_s=i, first_token_s=i + 0.1, end_s=i + 0.5, output_tokens=5)
        for i in range(10)
    ]
    summary = summarise(results, offered_per_s=1)
    assert summary.time_to_first_token.p50 == pytest.approx(0.1)
    assert summary.time_per_output_token.p99 == pytest.approx(0.1)  # 0.4 s over 4 tokens
    assert summary.duration_s == pytest.approx(9.5)
    assert summary.output_tokens_per_s == pytest.approx(50 / 9.5)


def test_arrivals_have_the_rate_and_are_reproducible():
    times = arrivals(100, 50, seed=1)
    assert len(times) == pytest.approx(5000, abs=5 * 5000**0.5)
    assert (times == arrivals(100, 50, seed=1)).all()
