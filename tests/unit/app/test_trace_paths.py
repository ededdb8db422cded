"""Paths of trace commands: what would be waited for without end is refused at the door."""

import os
import socket
import threading

import pytest
from tests.labs.kineto_files import Job, text

from kansoku.app._trace_paths import readable_paths
from kansoku.app.trace import breakdown, compare, convert, critical_path, stragglers
from kansoku.app.trace_hang import hang
from kansoku.app.trace_whatif import whatif
from kansoku.errors import InputError

COMMANDS = {
    "breakdown": lambda path: breakdown([path]),
    "critical-path": lambda path: critical_path([path]),
    "stragglers": lambda path: stragglers([path]),
    "compare": lambda path: compare(path, path),
    "convert": lambda path: convert([path], to="parquet", out=path.with_suffix(".out")),
    "whatif": lambda path: whatif([path]),
    "hang": lambda path: hang([path]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_named_pipe_is_refused_not_waited_for(command, tmp_path):
    pipe = tmp_path / "trace.json"
    os.mkfifo(pipe)
    answer: list[Exception] = []

    def ask():
        try:
            COMMANDS[command](pipe)
        except Exception as error:
            answer.append(error)

    # A daemon: where the pipe is opened after all, nobody writes to it and the thread stays.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(answer[0], InputError)
    assert "not a regular file but a named pipe" in str(answer[0])
    assert str(pipe) in str(answer[0])


def test_sockets_devices_and_links_to_them(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
        with pytest.raises(InputError, match="but a socket"):
            readable_paths([path])
    link = tmp_path / "trace.json"
    link.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="but a character device"):
        readable_paths([link])
    with pytest.raises(InputError, match="no such file or folder"):
        readable_paths([tmp_path / "none"])


def test_a_pipe_that_the_shell_holds_open_is_read():
    out, into = os.pipe()
    content = text(Job(rank=0)).encode()
    writer = threading.Thread(target=lambda: (os.write(into, content), os.close(into)))
    writer.start()
    try:
        found = breakdown([f"/dev/fd/{out}"], processes=1)
    finally:
        writer.join()
        os.close(out)
    assert len(found.parts) == 1
