"""An agent's line to a controller that refuses, without a network."""

import logging
import time

import pytest

from kansoku.fabric.edge.uplink import ControllerAway, Uplink
from kansoku.fabric.messages import RnicAddress
from kansoku.fabric.summary import Report, RowColumns


class Line:
    """Answers by path; an exception is raised."""

    url = "http://c:1"

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def request(self, method, path, body, kind):
        name = path.split("?")[0].rpartition("/")[2]
        self.asked.append(name)
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer

    def close(self):
        self.asked.append("closed")


def uplink(line):
    return Uplink(line, "a", 1, [RnicAddress("a/0", "10.0.0.1", 7)], on_pinglist=lambda *_: None)


def report(start):
    return Report("a/0", 1, start, 20, RowColumns.pack([]))


@pytest.mark.parametrize("status", [400, 413])
def test_reports_that_are_never_taken_do_not_hold_up_the_others(status):
    line = Line(report=ControllerAway("too large", status))
    up = uplink(line)
    up.send([report(1), report(2)])
    up._round()
    assert up.dropped == 2
    up._round()
    assert line.asked == ["register", "report", "pinglist", "pinglist"]


def test_reports_wait_for_a_controller_that_is_busy():
    line = Line(report=ControllerAway("later", 503))
    up = uplink(line)
    up.send([report(1)])
    with pytest.raises(ControllerAway):
        up._round()
    assert (up.dropped, len(up._queue)) == (0, 1)


def test_refused_and_away_are_told_apart_and_said_once(caplog):
    up = uplink(Line())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            up._say(ControllerAway("RNIC a/0 is not in the cluster file", 400))
        for _ in range(3):
            up._say(ControllerAway("Connection refused"))
    assert caplog.messages == [
        "controller http://c:1 refuses (400): RNIC a/0 is not in the cluster file",
        "controller http://c:1 is away: Connection refused",
    ]


def test_whatever_a_controller_makes_go_wrong_the_line_stays(caplog):
    line = Line(pinglist=OverflowError("absurd"))
    up = uplink(line)
    up.refresh_s = 0.01
    up.start()
    deadline = time.monotonic() + 20
    while line.asked.count("pinglist") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    up.stop()
    assert line.asked[-2:] == ["leave", "closed"]
    assert "absurd" in caplog.text
