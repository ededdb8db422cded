"""Watch a job from outside, without its environment: probes in the kernel, the same rings.

Standard library alone, x86-64, Linux 6.6 or newer, root. ``Observer`` sets entry probes on torch's
process groups, reducer and autograd engine, on NCCL and CUDA where they are mapped, and writes what
it sees as the recorder inside a process would.
"""

from kansoku.capture.attach.bpf import BpfError
from kansoku.capture.attach.observer import Observer, Watched
from kansoku.capture.attach.process import Process, descendants

__all__ = ["BpfError", "Observer", "Process", "Watched", "descendants"]
