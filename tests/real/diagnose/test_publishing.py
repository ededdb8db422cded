"""Incidents told to others: OTLP, a webhook, a real Alertmanager; by a clock that the test turns."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import polars as pl
import pytest
from tests.labs.otel_gateway import Gateway
from tests.real.diagnose.test_live import Inbox

from kansoku.app.watch import LiveWatch, WatchSettings
from kansoku.model import table_schema
from kansoku.store import LocalStore

pytestmark = pytest.mark.real

MS, S = 1_000_000, 1_000_000_000


class Watched:
    """A run of four ranks and 200 ms a step, fed to a watch without a thread."""

    def __init__(self, folder, **settings):
        self.now = time.time_ns() - 600 * S
        self.store = LocalStore(folder)
        self.watch = LiveWatch(
            self.store, WatchSettings(ring_folder=None, **settings), clock_ns=lambda: self.now
        )
        self.step = 0

    def steps(self, count):
        for _ in range(count):
            self.step += 1
            rows = [
                dict.fromkeys(table_schema("steps"))
                | {"run": "r1", "rank": rank, "step": self.step, "start_ns": self.now,
                   "duration_ns": 200 * MS, "forward_ns": 150 * MS, "complete": True}
                for rank in range(4)
            ]  # fmt: skip
            self.now += 200 * MS
            self.watch.take("steps", pl.DataFrame(rows, schema=table_schema("steps")))
            self.watch.tick()

    def seconds(self, count):
        """Let time pass with signs of life alone; return when the first incident was opened."""
        for second in range(1, count + 1):
            self.now += S
            label = '{"host.name":"n1","kansoku.run":"r1"}'
            rows = [{"metric": "kansoku.run.ring.records", "labels": label, "time_ns": self.now,
                     "value": 1.0}]  # fmt: skip
            self.watch.take("metrics", pl.DataFrame(rows, schema=table_schema("metrics")))
            self.watch.tick()
            if self.watch.counts["changes"]:
                return second
        return None

    def hang_and_go_on(self):
        """Open an incident within ten seconds of the last step, and close it by the next step."""
        self.steps(20)
        took = self.seconds(60)
        assert took is not None
        assert took <= 10
        self.steps(2)
        assert self.watch.detector.open_incidents == []

    def close(self):
        self.watch.stop()
        self.store.close()


@pytest.fixture
def watched(tmp_path):
    made = []

    def make(**settings):
        made.append(Watched(tmp_path / "store", **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def inbox():
    inbox = Inbox()
    yield inbox
    inbox.close()


def test_otlp_log_records_by_the_name_of_the_event(watched):
    gateway = Gateway()
    try:
        watched(otlp=gateway.url).hang_and_go_on()
        events = [log for log in gateway.logs if log["event.name"] == "kansoku.incidents"]
    finally:
        gateway.close()
    assert [event["kansoku.state"] for event in events] == ["open", "closed"]
    assert len({event["kansoku.id"] for event in events}) == 1
    assert {event["kansoku.kind"] for event in events} == {"hang"}
    assert {event["kansoku.subject"] for event in events} == {"job:r1"}
    assert all(int(event["kansoku.onset_ns"]) > 0 for event in events)


def test_a_webhook_gets_each_version(watched, inbox):
    watched(webhook=inbox.url + "/hook").hang_and_go_on()
    opened, closed = inbox.of("/hook")
    assert opened["schema"] == "kansoku.incident/1"
    assert [opened["state"], closed["state"]] == ["open", "closed"]
    assert opened["run"] == "r1"
    assert {"id", "onset_ns", "kind", "verdict", "hypotheses"} <= set(opened["incident"])


def test_alerts_keep_their_labels_and_end(watched, inbox):
    watched(alertmanager=inbox.url).hang_and_go_on()
    (opened,), (closed,) = inbox.of("/api/v2/alerts")
    assert opened["labels"] == closed["labels"]
    assert "endsAt" not in opened
    assert closed["endsAt"] > closed["startsAt"] == opened["startsAt"]


def test_receivers_that_refuse_or_are_gone_are_counted_and_cost_no_incident(watched):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening: refused at once
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        one = watched(otlp=url, webhook=url, alertmanager=url)
        one.hang_and_go_on()
    assert one.watch.counts["publish_failed"] == 6  # three receivers, opened and closed
    rows = one.store.table("incidents").sort("time_ns")
    assert rows["state"].to_list() == ["open", "closed"]


@pytest.fixture
def alertmanager(tmp_path):
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if program is None:
        pytest.skip("no Alertmanager is installed (Debian: prometheus-alertmanager)")
    config = tmp_path / "alertmanager.yml"
    config.write_text("route: {receiver: nobody}\nreceivers: [{name: nobody}]\n")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    process = subprocess.Popen(
        [program, f"--config.file={config}", f"--storage.path={tmp_path / 'am'}",
         f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
            break
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < end, "Alertmanager did not start"
            time.sleep(0.1)
    yield url
    process.terminate()
    process.wait(30)


def test_a_real_alertmanager_takes_the_alert_and_its_end(watched, alertmanager):
    def active():
        with urllib.request.urlopen(f"{alertmanager}/api/v2/alerts?active=true") as answer:
            return json.load(answer)

    one = watched(alertmanager=alertmanager)
    one.steps(20)
    assert one.seconds(60) is not None
    (alert,) = active()
    assert alert["labels"]["alertname"] == "KansokuIncident"
    assert (alert["labels"]["kind"], alert["labels"]["run"]) == ("hang", "r1")
    assert alert["annotations"]["summary"]
    one.steps(2)
    assert one.watch.counts["publish_failed"] == 0
    assert active() == []
