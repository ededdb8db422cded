"""What ``kansoku attach`` says where it may not watch, or cannot write."""

import errno
import os
import platform
import sys
from pathlib import Path

from kansoku.app._capabilities import capabilities
from kansoku.capture.attach import BpfError, Observer
from kansoku.errors import InputError, PlatformError

__all__ = ["check_platform", "make_observer", "refused", "remedy", "unwritable"]

_REMEDY = "run as root, or give the capabilities CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE"
_FORBIDDEN = (
    "the capabilities needed are there: a sandbox, a security module (SELinux, AppArmor, Yama), "
    "kernel lockdown or another user namespace forbids it; try outside the container"
)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def remedy() -> str:
    """Say what to do about a refusal: by the capabilities that we have."""
    held = capabilities(Path("/proc/self/status").read_text(encoding="utf-8", errors="replace"))
    loads = "CAP_SYS_ADMIN" in held or held >= {"CAP_PERFMON", "CAP_BPF"}
    return _FORBIDDEN if loads and "CAP_SYS_PTRACE" in held else _REMEDY


def refused(pid: int, error: OSError) -> str:
    """Say which process may not be watched, and what exactly was refused."""
    what = f"opening {error.filename}" if error.filename else "a call"
    name = errno.errorcode.get(error.errno or 0, "no error number")
    return f"process {pid} may not be watched: {what} was refused ({name}, {error.strerror})"


def unwritable(what: str, error: OSError, where: Path) -> InputError | PlatformError:
    """Return what to raise where something cannot be written: a full disk is no wrong argument."""
    kind = PlatformError if error.errno in _FULL else InputError
    return kind(
        f"{what} cannot be written: {error.strerror}",
        where=str(where),
        remedy="free room there, or choose another --out or KANSOKU_RING_DIR",
    )


def check_platform() -> None:
    """Raise PlatformError where no probes are written for this machine."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise PlatformError(
            f"watching from outside is written for x86-64 Linux, not {platform.machine()}",
            remedy="start the job with kansoku run",
        )


def make_observer(ring_dir: Path, run: str, node: str, *, launches: bool) -> Observer:
    """Return an observer. Raise PlatformError where the kernel or our rights do not allow it."""
    try:
        return Observer(ring_dir=str(ring_dir), run=run, node=node, launches=launches)
    except BpfError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise PlatformError(
                f"the kernel lets us load no eBPF program ({errno.errorcode[error.errno]})",
                where="bpf()",
                remedy=remedy(),
            ) from error
        raise PlatformError(
            f"this kernel has no usable eBPF: {error}",
            where=f"Linux {os.uname().release}",
            remedy="Linux 6.6 or newer is needed (uprobe_multi); or start the job with kansoku run",
        ) from error
