"""What is probed: functions by the beginning of their mangled name, and what their arguments mean.

Entry probes alone: a return probe moves the return address, and an exception thrown through it ends
the process. Where an end is needed it is another function's entry (the completion of the work), or
the instruction that the call returns to, which is a probe like any other.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PROBES", "Probe", "cheap_offset", "library_of"]


class Probe(NamedTuple):
    """One function to watch."""

    library: str
    """``torch_cpu``, ``torch_cuda``, ``nccl``, ``cudart``, ``cuda``."""
    symbol: str
    """Beginning of the mangled name; whole where it ends with ``$``."""
    role: str
    """What the recorder makes of it."""
    name: str = ""
    """Of a collective or device call: its name in the record."""
    shape: str = "plain"
    argument: int = 0
    """Which argument register holds what ``shape`` says, or the byte or element count."""
    this: int = 0
    """Which argument register holds the object; 1 where the result is returned through memory."""
    factor: str = "one"
    """``ranks``: the argument is one rank's part of what the convention counts."""
    peer: int = -1
    """Argument register of the peer of a point-to-point operation."""
    returns: bool = False
    """Watch the place it returns to as well."""


def _group_calls(library: str, owner: str) -> list[Probe]:
    # Bytes as nccl-tests counts: what a rank ends up with in a gather, what it starts with in a
    # scatter. The same choice of argument as in the recorder inside the process.
    calls = (
        ("allreduce", "all_reduce", "tensors", 2, "one", -1),
        ("allreduce_coalesced", "all_reduce", "tensors", 2, "one", -1),
        ("broadcast", "broadcast", "tensors", 2, "one", -1),
        ("reduce", "reduce", "tensors", 2, "one", -1),
        ("allgather", "all_gather", "lists", 2, "one", -1),
        ("_allgather_base", "all_gather", "tensor", 2, "one", -1),
        ("allgather_coalesced", "all_gather", "lists", 2, "one", -1),
        ("allgather_into_tensor_coalesced", "all_gather", "tensors", 2, "one", -1),
        ("reduce_scatter", "reduce_scatter", "lists", 3, "one", -1),
        ("_reduce_scatter_base", "reduce_scatter", "tensor", 3, "one", -1),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter", "tensors", 3, "one", -1),
        ("alltoall_base", "all_to_all", "tensor", 3, "one", -1),
        ("alltoall", "all_to_all", "tensors", 3, "one", -1),
        ("gather", "gather", "tensors", 3, "ranks", -1),
        ("scatter", "scatter", "tensors", 2, "ranks", -1),
        ("send", "send", "tensors", 2, "one", 3),
        ("recv", "recv", "tensors", 2, "one", 3),
        ("recvAnysource", "recv", "tensors", 2, "one", -1),
        ("barrier", "barrier", "plain", 0, "one", -1),
    )
    return [
        Probe(
            library,
            f"_ZN4c10d{len(owner)}{owner}{len(method)}{method}E",
            "collective",
            name,
            shape,
            argument,
            this=1,
            factor=factor,
            peer=peer,
        )
        for method, name, shape, argument, factor, peer in calls
    ] + [Probe(library, f"_ZN4c10d{len(owner)}{owner}C2E", "group")]


_GLOO = "_ZN4c10d16ProcessGroupGloo"
_TORCH = [
    *_group_calls("torch_cpu", "ProcessGroupGloo"),
    Probe("torch_cpu", f"{_GLOO}16monitoredBarrierE", "collective", "barrier", this=0),
    Probe("torch_cpu", f"{_GLOO}9AsyncWorkC2E", "work", argument=4),
    Probe("torch_cpu", f"{_GLOO}8SendWorkC2E", "work", argument=3),
    Probe("torch_cpu", f"{_GLOO}8RecvWorkC2E", "work", argument=4),
    Probe("torch_cpu", f"{_GLOO}9AsyncWork14finishWorkGlooEv$", "work_done"),
    Probe("torch_cpu", f"{_GLOO}9AsyncWork19finishWorkGlooErrorE", "work_failed"),
    Probe("torch_cpu", "_ZN4c10d4Work14finishAndThrowE", "work_done"),
    Probe("torch_cpu", "_ZN4c10d4Work4waitE", "wait"),
    Probe("torch_cpu", f"{_GLOO}8SendWork4waitE", "wait"),
    Probe("torch_cpu", f"{_GLOO}8RecvWork4waitE", "wait"),
    Probe("torch_cpu", "_ZN4c10d7Reducer19prepare_for_forwardEv$", "forward_trains"),
    Probe("torch_cpu", "_ZN4c10d7Reducer20prepare_for_backwardE", "forward_done"),
    Probe("torch_cpu", "_ZN4c10d7Reducer17finalize_backwardEv$", "finalize"),
    Probe("torch_cpu", "_ZN5torch8autograd6Engine7executeE", "backward", this=1, returns=True),
    # Called once, within the first backward of a process.
    Probe("torch_cpu", "_ZN5torch8autograd6Engine20start_device_threadsEv$", "first_backward"),
    # Before the mark: probes are set in this order, and a mark that is seen to begin but not to end
    # would hold all that follows. Not a push, and called some thirty times a step: only until its
    # caller in question is known.
    Probe("torch_cpu", "_ZN2at14RecordFunction3endEv$", "mark_end", returns=True),
    Probe(
        "torch_cpu",
        "_ZN5torch8autograd8profiler25record_function_enter_newE",
        "mark",
        shape="text",
        argument=1,
    ),
]

# name, element count, element type, peer
_NCCL = [
    Probe("nccl", f"{symbol}$", "nccl", name, argument=count, peer=peer, factor=factor)
    for symbol, name, count, peer, factor in (
        ("ncclAllReduce", "all_reduce", 2, -1, "one"),
        ("ncclBroadcast", "broadcast", 2, -1, "one"),
        ("ncclBcast", "broadcast", 1, -1, "one"),
        ("ncclReduce", "reduce", 2, -1, "one"),
        ("ncclAllGather", "all_gather", 2, -1, "ranks"),
        ("ncclReduceScatter", "reduce_scatter", 2, -1, "ranks"),
        ("ncclAlltoAll", "all_to_all", 2, -1, "ranks"),
        ("ncclSend", "send", 1, 3, "one"),
        ("ncclRecv", "recv", 1, 3, "one"),
    )
]
_COPIES = (
    ("cudart", "cudaMemcpy", 2, True),
    ("cudart", "cudaMemcpyAsync", 2, False),
    ("cudart", "cudaMemcpyPeerAsync", 4, False),
    ("cudart", "cudaMemsetAsync", 2, False),
    ("cuda", "cuMemcpyHtoD_v2", 2, True),
    ("cuda", "cuMemcpyDtoH_v2", 2, True),
    ("cuda", "cuMemcpyHtoDAsync_v2", 2, False),
    ("cuda", "cuMemcpyDtoHAsync_v2", 2, False),
    ("cuda", "cuMemcpyDtoDAsync_v2", 2, False),
    ("cuda", "cuMemcpyAsync", 2, False),
)
_SYNCS = (
    ("cudart", "cudaDeviceSynchronize"),
    ("cudart", "cudaStreamSynchronize"),
    ("cudart", "cudaEventSynchronize"),
    ("cuda", "cuCtxSynchronize"),
    ("cuda", "cuStreamSynchronize"),
    ("cuda", "cuEventSynchronize"),
)
_LAUNCHES = (
    ("cudart", "cudaLaunchKernel"),
    ("cudart", "cudaLaunchKernelExC"),
    ("cudart", "cudaLaunchCooperativeKernel"),
    ("cudart", "cudaGraphLaunch"),
    ("cuda", "cuLaunchKernel"),
    ("cuda", "cuLaunchKernelEx"),
    ("cuda", "cuLaunchCooperativeKernel"),
    ("cuda", "cuGraphLaunch"),
)
_DEVICE = [
    *(
        Probe(library, f"{symbol}$", "device_copy", symbol, argument=count, returns=blocks)
        for library, symbol, count, blocks in _COPIES
    ),
    *(
        Probe(library, f"{symbol}$", "device_sync", symbol, returns=True)
        for library, symbol in _SYNCS
    ),
    *(Probe(library, f"{symbol}$", "device_launch", symbol) for library, symbol in _LAUNCHES),
]

PROBES: tuple[Probe, ...] = (
    *_TORCH,
    *_group_calls("torch_cuda", "ProcessGroupNCCL"),
    *_NCCL,
    *_DEVICE,
    # Every end in order passes here; one by a signal does not.
    Probe("libc", "_exit$", "exit"),
)
"""Everything; a probe's number is its place here."""

_LIBRARIES = (
    ("libtorch_cpu.so", "torch_cpu"),
    ("libtorch_cuda.so", "torch_cuda"),
    ("libnccl.so", "nccl"),
    ("libcudart.so", "cudart"),
    ("libcudart-", "cudart"),
    ("libcuda.so", "cuda"),
    ("libc.so", "libc"),
)


def library_of(file_name: str) -> str | None:
    """Return which of the watched libraries a mapped file is."""
    for beginning, library in _LIBRARIES:
        if file_name.startswith(beginning):
            return library
    return None


_ENDBR64 = b"\xf3\x0f\x1e\xfa"


def cheap_offset(code: bytes) -> tuple[int, bool]:
    """Return where in a function's first bytes to probe, and whether the kernel emulates it there.

    A ``push`` costs about 1 µs; what must be stepped through costs ten times that. ``endbr64`` is
    stepped through, so the probe goes behind it: no argument has changed there.
    """
    start = len(_ENDBR64) if code.startswith(_ENDBR64) else 0
    rest = code[start : start + 2]
    if rest[:1] and 0x50 <= rest[0] <= 0x57:
        return start, True
    if len(rest) == 2 and rest[0] == 0x41 and 0x50 <= rest[1] <= 0x57:
        return start, True
    if rest[:1] == b"\x90":
        return start, True
    return 0, False
