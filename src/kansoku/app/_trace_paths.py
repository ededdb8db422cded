"""The door that every path of a trace command passes: it is there, and reading it will end."""

import stat
from collections.abc import Sequence
from pathlib import Path

from kansoku.errors import InputError

__all__ = ["readable_paths"]

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def readable_paths(paths: Sequence[Path | str]) -> list[Path]:
    """Return the paths, each a regular file, a folder, or a pipe that the shell holds open.

    A named pipe nobody writes to would be waited for without end, and a device read without end.
    ``<(zcat trace.gz)`` and ``/dev/stdin`` are pipes too, but their writer is there already. Raises
    InputError naming the first path that is missing or something else.
    """
    found = [Path(path) for path in paths]
    for path in found:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            raise InputError("no such file or folder", where=str(path)) from None
        except OSError as error:
            raise InputError(f"cannot read: {error.strerror}", where=str(path)) from None
        kind = stat.S_IFMT(mode)
        if kind in {stat.S_IFREG, stat.S_IFDIR} or (kind == stat.S_IFIFO and not _is_named(path)):
            continue
        raise InputError(
            f"not a regular file but {_KINDS.get(kind, 'something else')}",
            where=str(path),
            remedy="give a trace file, a folder or a tar archive",
        )
    return found


def _is_named(pipe: Path) -> bool:
    # Under /dev/fd stands a link to "pipe:[123]", which is no file's name.
    return pipe.resolve().exists()
