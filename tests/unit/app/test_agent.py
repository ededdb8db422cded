"""The answer of ``kansoku agent --once --json``."""

from kansoku.app.agent import AgentSettings, agent_once


def test_the_answer_names_its_schema_and_every_collector():
    answer, _ = agent_once(AgentSettings(only=("memory",), node="c001", ring_folder=None))
    assert (answer["schema"], answer["node"]) == ("kansoku.agent/1", "c001")
    assert [one["name"] for one in answer["collectors"]] == ["memory"]
    assert {"metric", "unit", "labels", "value"} == set(answer["samples"][0])
