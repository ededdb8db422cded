"""The answer of ``kansoku agent --once --json``, and settings that are refused."""

import json
import threading

import pytest

from kansoku.app.agent import Agent, AgentSettings, agent_once, check_endpoint, run_agent
from kansoku.catalog.metrics import metrics
from kansoku.errors import ConfigurationError
from kansoku.telemetry import ExporterCounts


def test_the_answer_names_its_schema_and_every_collector():
    answer, _ = agent_once(AgentSettings(only=("memory",), node="c001", ring_folder=None))
    assert (answer["schema"], answer["node"]) == ("kansoku.agent/1", "c001")
    assert [one["name"] for one in answer["collectors"]] == ["memory"]
    assert {"metric", "unit", "labels", "value"} == set(answer["samples"][0])


@pytest.mark.parametrize(
    ("to", "protocol"),
    [
        ("http://c1:4318", "arrow"),
        ("https://[::1]:4318/otlp", "http"),
        ("c1:4317", "grpc"),
        ("http://c1:4317", "grpc"),
    ],
)
def test_addresses_of_receivers(to, protocol):
    check_endpoint(to, protocol)


@pytest.mark.parametrize(
    ("to", "protocol"),
    [
        ("c1:4318", "arrow"),
        ("foo", "http"),
        ("ftp://c1", "http"),
        ("http://", "arrow"),
        ("http://c1:99999", "arrow"),
        ("http://c1:0", "arrow"),
        ("http://[::1", "arrow"),
        ("c1:x", "grpc"),
        ("", "grpc"),
    ],
)
def test_what_is_no_address_is_refused_at_once(tmp_path, to, protocol):
    with pytest.raises(ConfigurationError, match="is no address of a receiver"):
        run_agent(AgentSettings(), to=to, protocol=protocol, spool=tmp_path)


@pytest.mark.parametrize(
    "to", ["http://u:hush@c1:4318", "http://c1/?token=hush", "http://c1/#hush"]
)
def test_a_secret_in_the_address_is_refused_and_not_repeated(to):
    with pytest.raises(ConfigurationError, match="KANSOKU_TOKEN") as caught:
        check_endpoint(to, "arrow")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("raw", [None, b"\xff\xfe"])
def test_a_switches_file_that_cannot_be_read_is_named(tmp_path, raw):
    file = tmp_path / "switches.toml"
    if raw is not None:
        file.write_bytes(raw)
    with pytest.raises(ConfigurationError, match=r"switches\.toml: cannot be read"):
        agent_once(AgentSettings(only=("switches",), switches_file=file))


def test_a_root_without_proc_and_sys_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="neither proc nor sys"):
        agent_once(AgentSettings(only=("memory",), root=str(tmp_path), ring_folder=None))


class Sink:
    """Takes rows and tells what an exporter would; its spool lost segments in both ways."""

    def __init__(self):
        self.taken = []

    def put_tables(self, tables, *, durable=True):
        assert durable
        self.taken.append(tables["metrics"])

    @property
    def counts(self):
        return ExporterCounts(
            rows_in=100, rows_delivered=60, rows_rejected=5, rows_refused=6, rows_dropped=7,
            rows_pending=22, batches_pending=2, spool_bytes=4096, spool_failures=3,
            segments_dropped=2, segments_damaged=1, retries=9, last_success_ns=1_790_000_000 * 10**9,
            last_error=None,
        )  # fmt: skip


def test_what_the_exporter_sent_dropped_and_lost_is_among_the_agents_own_samples():
    agent = Agent(AgentSettings(only=("memory",), node="c001", ring_folder=None))
    sink, stop = Sink(), threading.Event()
    agent.run(sink, stop, after_round=lambda _: stop.set(), exported=lambda: sink.counts)
    agent.close()
    (rows,) = sink.taken
    found = {
        (metric, json.loads(labels).get("kansoku.cause")): value
        for metric, labels, value in rows.select("metric", "labels", "value").iter_rows()
    }
    told = {key: value for key, value in found.items() if "export" in key[0] or "spool" in key[0]}
    assert told == {
        ("kansoku.agent.export.delivered", None): 60,
        ("kansoku.agent.export.pending", None): 22,
        ("kansoku.agent.export.retries", None): 9,
        ("kansoku.agent.export.last_success", None): 1_790_000_000,
        ("kansoku.agent.spool.disk.usage", None): 4096,
        ("kansoku.agent.spool.failures", None): 3,
        ("kansoku.agent.spool.lost", "full"): 2,
        ("kansoku.agent.spool.lost", "damaged"): 1,
    }
    dropped = {cause: v for (name, cause), v in found.items() if name == "kansoku.agent.dropped"}
    assert dropped == {
        "sink": 0, "too_many_series": 0, "spool_full": 7, "refused": 6, "rejected": 5,
    }  # fmt: skip
    assert {metric for metric, _ in found} <= {*metrics()}
