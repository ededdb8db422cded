"""The whole live chain with a real training: rings, agent, store, incident, webhook, alerts."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import polars as pl
import pytest
from tests.labs.faulty_training import BAD, Lab

from kansoku.app.agent_rings import RingFollower
from kansoku.app.watch import LiveWatch, WatchSettings
from kansoku.diagnose.live import LivePolicy
from kansoku.model import table_schema
from kansoku.store import LocalStore

pytestmark = pytest.mark.real


class Inbox:
    """An HTTP server that keeps what is posted to it."""

    def __init__(self):
        self.got = []
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                inbox.got.append((self.path, json.loads(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def of(self, path):
        return [body for where, body in self.got if where == path]

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def inbox():
    inbox = Inbox()
    yield inbox
    inbox.close()


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path / "lab")
    yield lab
    lab.close()


def wait_for(what, seconds=30):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "did not come"
        time.sleep(0.1)
    return found


def samples(found):
    rows = [
        {"metric": s.metric, "labels": json.dumps(dict(s.labels) | {"host.name": "lab"},
         separators=(",", ":")), "time_ns": time.time_ns(), "value": s.value}
        for s in found
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=table_schema("metrics"))


def test_a_hanging_training_is_looked_at_from_outside_before_anybody_kills_it(lab, inbox, tmp_path):
    store = LocalStore(tmp_path / "store")
    settings = WatchSettings(
        policy=LivePolicy(stall_least_ns=2_000_000_000), tick_s=0.2, webhook=inbox.url + "/hook",
        alertmanager=inbox.url, ring_folder=lab.folder / "stop", collections=tmp_path / "kept",
    )  # fmt: skip
    watch = LiveWatch(store, settings)
    watch.start()
    try:
        lab.run("stop")
        follower = RingFollower(lab.folder / "stop")

        def follow():
            found = follower.read()
            if "steps" in found.tables:
                # The lab names its runs FOLDER/run; the watch looks in that folder.
                store.append("steps", found.tables["steps"].with_columns(run=pl.lit("run")))
            rows = samples(found.samples)
            text = pl.col("labels").str.replace('"kansoku.run":"[^"]*"', '"kansoku.run":"run"')
            store.append("metrics", rows.with_columns(labels=text))
            return [b for b in inbox.of("/hook") if b["incident"]["verdict"] == "found"]

        told = wait_for(follow)
        first = told[-1]["incident"]["hypotheses"][0]
        assert first["domain"] == "host"
        assert f"rank {BAD} is stopped" in first["evidence_for"][0]["sentence"]
        kept = sorted(p.name for p in (tmp_path / "kept").rglob("*.txt"))
        assert kept, "no stacks were kept"
        alert = inbox.of("/api/v2/alerts")[0][0]
        assert {"labels", "annotations", "startsAt"} <= set(alert)
        assert alert["labels"]["alertname"] == "KansokuIncident"
        rows = wait_for(lambda: store.table("incidents").to_dicts())
        assert {r["kind"] for r in rows} == {"hang"}
    finally:
        lab.end()
        watch.stop()
        store.close()
