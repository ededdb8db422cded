"""The endpoint that Kineto asks: a UNIX datagram socket, abstract or in a folder."""

import contextlib
import errno
import selectors
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kansoku.errors import InputError, PlatformError
from kansoku.formats.kineto_daemon import Register, Request, encode_reply, parse_message

__all__ = ["KinetoEndpoint"]

NAME = "dynolog"
_MAX_DATAGRAM = 65536
_CREDENTIALS = struct.Struct("=iII")


class KinetoEndpoint:
    """Answer the processes of this machine until closed.

    ``folder`` is their KINETO_IPC_SOCKET_DIR; None: the abstract name. Raises PlatformError where
    another daemon has the name.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._path = None if folder is None else folder / NAME
        address = f"\0{NAME}\0" if self._path is None else str(self._path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            # The kernel says who sent: a pid in the message may be of a container, or invented.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(address)
            if self._path is not None:
                self._path.chmod(0o666)
        except OSError as error:
            self._socket.close()
            if error.errno == errno.EADDRINUSE:
                raise PlatformError(
                    "another profiling daemon answers here",
                    where=f"@{NAME}" if self._path is None else str(self._path),
                    remedy="stop dynolog, or give jobs a KINETO_IPC_SOCKET_DIR of their own",
                ) from error
            raise PlatformError(f"cannot open the endpoint: {error}", where=address) from error
        self._socket.settimeout(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self.refused = 0
        """Datagrams that were no messages."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close, and remove the file of a folder's socket."""
        self._selector.close()
        self._socket.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def serve(self, answer: Callable[[int, Register | Request], str], timeout_s: float) -> int:
        """Answer what has come, waiting at most ``timeout_s``; return how many messages.

        ``answer`` gets the sender's pid in our own numbering, and returns a configuration.
        """
        count = 0
        if not self._selector.select(timeout_s):
            return 0
        while True:
            try:
                datagram, ancillary, _flags, sender = self._socket.recvmsg(
                    _MAX_DATAGRAM, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except (BlockingIOError, InterruptedError):
                return count
            pid = _sender_pid(ancillary)
            try:
                message = parse_message(datagram)
            except InputError:
                self.refused += 1
                continue
            if pid is None or not sender:
                self.refused += 1
                continue
            reply = encode_reply(message, config=answer(pid, message), count=1)
            # The asker waits 90 ms and gives up: a reply that cannot be had now is lost.
            with contextlib.suppress(OSError):
                self._socket.sendto(reply, sender)
            count += 1


def _sender_pid(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]) or None
    return None
