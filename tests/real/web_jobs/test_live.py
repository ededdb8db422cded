"""Pages that follow: a real training goes on while its run's and job's pages are open; incidents."""

import subprocess
import sys
import textwrap
import time

import polars as pl
import pytest
from tests.labs.training import ROOT, bare_environment

from kansoku.app.agent_rings import RingFollower
from kansoku.app.serve import Server, ServeSettings
from kansoku.app.store import open_store

pytestmark = pytest.mark.real
PATIENCE_S = 120
# Steps go on until the test says stop, at most for as long as it has patience.
TRAIN = """
import pathlib, sys, time, torch
stop, model = pathlib.Path(sys.argv[1]), torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
deadline = time.monotonic() + 300
while not stop.exists() and time.monotonic() < deadline:
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""


class Live:
    """A training under observation, whose rows go to a server as its node's agent sends them."""

    def __init__(self, server, folder):
        self.server, self.folder = server, folder
        self.store = open_store(server.url)
        self.follower = RingFollower(folder / "rings", sample_every=10)

    def send(self):
        for name, rows in self.follower.read().tables.items():
            self.store.append(name, rows)

    def until(self, page, what):
        """Send rows until ``what()`` holds; the browser goes on meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, page and page.locator("main").inner_text()[:2000]
            self.send()
            if page is None:
                time.sleep(0.1)
            else:
                page.wait_for_timeout(100)

    def run(self):
        """Return the id of the run once its first steps are in the store."""
        self.until(None, lambda: len(self.store.table("steps")) >= 3)
        return self.store.table("steps")["run"][0]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    script, stop = folder / "train.py", folder / "stop"
    script.write_text(textwrap.dedent(TRAIN))
    out = folder / "store" / "runs" / "live"
    settings = ServeSettings(folder=folder / "store", port=0, otlp_port=None, grpc_port=None)
    with Server(settings) as server:
        training = subprocess.Popen(
            [sys.executable, "-m", "kansoku", "run", "--out", str(out), "--", sys.executable,
             str(script), str(stop)],
            env=bare_environment(KANSOKU_RING_DIR=folder / "rings", SLURM_JOB_ID="77"),
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            found = Live(server, folder)
            yield found
            found.store.close()
        finally:
            stop.touch()
            training.wait(60)


def complete(page):
    """Return how many complete steps the page speaks of."""
    text = page.locator(".card", has_text="steps complete").first.inner_text()
    return int(text.split("steps complete")[0].split()[-1].replace(",", ""))


def test_run_and_job_pages_follow_a_training_that_goes_on(live, show):
    run = live.run()
    now = time.time_ns()
    live.store.append(
        "jobs",
        pl.DataFrame({"cluster": ["c"], "raw_id": [77], "job_id": ["77"], "state": ["RUNNING"],
                      "submit_ns": [now - 60 * 10**9], "start_ns": [now - 30 * 10**9],
                      "node_list": ["c001"], "nodes": [1], "gpus": [8]}),
    )  # fmt: skip
    for path in (f"/runs/{run}", "/jobs/77"):
        watched = show(f"{live.server.url}{path}")
        page = watched.page
        page.wait_for_selector("#pulse[data-state=live]", timeout=PATIENCE_S * 1000)
        live.until(page, lambda page=page: page.locator(".card", has_text="complete").count() > 0)
        before = complete(page)
        live.until(page, lambda page=page, before=before: complete(page) > before)
        page.wait_for_selector("html[data-updates]", state="attached", timeout=PATIENCE_S * 1000)
        assert watched.errors == []
        page.close()


def test_incident_pages_follow(live, show):
    def say(state, seconds):
        now = time.time_ns()
        row = {"id": ["inc-live"], "onset_ns": [now - 10**9], "time_ns": [now + seconds * 10**9],
               "kind": ["hang"], "subject": ["node:c042"], "domain": ["network"],
               "state": [state]}  # fmt: skip
        live.store.append("incidents", pl.DataFrame(row))

    listed = show(f"{live.server.url}/incidents").page
    listed.wait_for_selector("#pulse[data-state=live]", timeout=PATIENCE_S * 1000)
    say("open", 0)
    listed.wait_for_selector("td a:has-text('inc-live')", timeout=PATIENCE_S * 1000)
    listed.close()
    page = show(f"{live.server.url}/incidents/inc-live").page
    page.wait_for_selector("#pulse[data-state=live]", timeout=PATIENCE_S * 1000)
    say("closed", 1)
    page.wait_for_selector("dd:has-text('closed')", timeout=PATIENCE_S * 1000)
    page.close()
