"""A real streaming server of known pace: lower bounds hold exactly, failures are counted."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

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


def test_load_from_a_notebook_whose_loop_runs_already():
    async def cell(url):
        return bench_endpoint(url, rate_per_s=10, duration_s=0.5, output_tokens=2).summary

    # In a thread: a loop of the browser's may run in this one.
    with serving(endpoint_app(first_s=0, per_token_s=0)) as url, ThreadPoolExecutor(1) as pool:
        summary = pool.submit(asyncio.run, cell(url)).result()
    assert (summary.failed, summary.requests) == (0, len(arrivals(10, 0.5, 0)))


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


def test_what_cannot_be_loaded_is_refused_at_the_door(tmp_path):
    binary = tmp_path / "prompts"
    binary.write_bytes(b"\xff\xfe\x00")
    good = "http://127.0.0.1:9/v1"
    for url, more, words in (
        ("127.0.0.1", {}, "is no URL"),
        ("http://", {}, "is no URL"),
        ("http://[bad/v1", {}, "is no URL"),
        ("http://127.0.0.1:99999999/v1", {}, "is no URL"),
        (good, {"prompts": binary}, "not UTF-8"),
        (good, {"prompts": tmp_path / "none"}, "No such file"),
        (good, {"rate_per_s": 1e12, "duration_s": 1e9}, "above 1,000,000"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            bench_endpoint(url, model="m", **more)
        assert caught.value.remedy


def strange_app(lines):
    """Answer every request with these lines."""

    async def app(scope, receive, send):
        assert scope["type"] in {"http", "lifespan"}
        if scope["type"] == "lifespan":
            return
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": lines})

    return app


@pytest.mark.parametrize(
    "lines",
    [b"data: [1]\n\n", b'data: {"choices": [7]}\n\n', b'data: {"choices": 7}\n\n', b"data: {\n\n"],
)
def test_a_server_of_another_protocol_fails_requests_not_the_load(lines):
    with serving(strange_app(lines)) as url:
        summary = bench_endpoint(url, model="m", rate_per_s=20, duration_s=0.3).summary
    assert summary.failed == summary.requests > 0


def test_ctrl_c_keeps_what_was_measured():
    inner, seen = endpoint_app(first_s=0, per_token_s=0), []

    async def counting(scope, receive, send):
        await inner(scope, receive, send)
        seen.append(scope["path"])

    with serving(counting) as url:
        ours = subprocess.Popen(
            [sys.executable, "-m", "kansoku", "bench", "serve", url, "--rate", "50", "--seconds",
             "300", "--output-tokens", "1", "--json"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        end = time.monotonic() + 60
        while seen.count("/v1/chat/completions") < 10:
            assert time.monotonic() < end
            time.sleep(0.02)
        ours.send_signal(signal.SIGINT)
        out, _ = ours.communicate(timeout=30)
    told = json.loads(out)
    assert ours.returncode == 130
    assert told["interrupted"]
    assert told["requests"] > 0
