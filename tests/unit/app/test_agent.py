"""The answer of ``kansoku agent --once --json``, and settings that are refused."""

import pytest

from kansoku.app.agent import AgentSettings, agent_once, check_endpoint, run_agent
from kansoku.errors import ConfigurationError


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
