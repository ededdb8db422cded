"""Follow /dev/kmsg without blocking."""

import os

__all__ = ["Kmsg"]

_RECORD_LIMIT = 8192
_ROUND_LIMIT = 5000
"""Records of one round: a kernel that logs without end must not hold the agent."""


class Kmsg:
    """An open /dev/kmsg; each read gives what came since the last."""

    def __init__(self, *, path: str = "/dev/kmsg", from_boot: bool = False) -> None:
        """Open at the end, or at the oldest record the kernel still has; raise OSError."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not from_boot:
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def read(self) -> tuple[list[str], int]:
        """Return new records, and how often the kernel said it had overwritten some."""
        records: list[str] = []
        lost = 0
        while len(records) < _ROUND_LIMIT:
            try:
                data = os.read(self._descriptor, _RECORD_LIMIT)
            except BlockingIOError:
                break
            except BrokenPipeError:  # EPIPE: records were overwritten; the next read goes on
                lost += 1
                continue
            except OSError:
                break
            if not data:
                break
            records.append(data.decode("utf-8", "replace"))
        return records, lost

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
