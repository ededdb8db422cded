"""Replay what NCCL calls in a profiler plugin (interface version 4), as its documentation says.

``python nccl_replay.py PLUGIN CASE``: a process that stands for one rank. The structures are written
down here once more, from the interface's public description, with ctypes' own layout.
"""

import ctypes
import json
import os
import sys
import time
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint64, c_void_p

COLLECTIVE, PAIR, KERNEL_CHANNEL, CHANNEL_STOP = 2, 4, 64, 22


class Collective(ctypes.Structure):
    _fields_ = [
        ("sequence", c_uint64), ("function", c_char_p), ("send", c_void_p), ("receive", c_void_p),
        ("count", c_size_t), ("root", c_int), ("datatype", c_char_p), ("channels", c_uint8),
        ("warps", c_uint8), ("algorithm", c_char_p), ("protocol", c_char_p),
    ]  # fmt: skip


class Pair(ctypes.Structure):
    _fields_ = [
        ("function", c_char_p), ("buffer", c_void_p), ("datatype", c_char_p), ("count", c_size_t),
        ("peer", c_int), ("channels", c_uint8),
    ]  # fmt: skip


class Channel(ctypes.Structure):
    _fields_ = [("channel", c_uint8), ("timer", c_uint64)]


class Body(ctypes.Union):
    _fields_ = [("collective", Collective), ("pair", Pair), ("channel", Channel)]


class Description(ctypes.Structure):
    _fields_ = [("type", c_uint8), ("parent", c_void_p), ("rank", c_int), ("body", Body)]


class ChannelState(ctypes.Structure):
    _fields_ = [("timer", c_uint64)]


class Plugin(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("init", ctypes.CFUNCTYPE(c_int, POINTER(c_void_p), POINTER(c_int), c_char_p, c_uint64,
                                  c_int, c_int, c_int, c_void_p)),
        ("start", ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), POINTER(Description))),
        ("stop", ctypes.CFUNCTYPE(c_int, c_void_p)),
        ("state", ctypes.CFUNCTYPE(c_int, c_void_p, c_int, POINTER(ChannelState))),
        ("finalize", ctypes.CFUNCTYPE(c_int, c_void_p)),
    ]  # fmt: skip


class Communicator:
    def __init__(self, plugin, ranks, rank, name=b"world", hash_=0xABCDEF):
        self.plugin, self.sequence = plugin, 0
        self.context, self.mask = c_void_p(), c_int()
        assert not plugin.init(
            byref(self.context), byref(self.mask), name, hash_, 1, ranks, rank, None
        )

    def start(self, what):
        handle = c_void_p()
        assert not self.plugin.start(self.context, byref(handle), byref(what))
        return handle

    def collective(self, function, count, datatype=b"ncclFloat32", channels=2):
        what = Description(type=COLLECTIVE)
        c = what.body.collective
        c.sequence, c.function, c.count, c.datatype = self.sequence, function, count, datatype
        c.channels, c.algorithm, c.protocol = channels, b"RING", b"SIMPLE"
        self.sequence += 1
        return self.start(what)

    def pair(self, function, count, peer):
        what = Description(type=PAIR)
        p = what.body.pair
        p.function, p.count, p.datatype, p.peer, p.channels = (
            function,
            count,
            b"ncclBfloat16",
            peer,
            1,
        )
        return self.start(what)

    def channel(self, parent, timer):
        what = Description(type=KERNEL_CHANNEL, parent=parent)
        what.body.channel.timer = timer
        return self.start(what)

    def end_channel(self, handle, timer):
        assert not self.plugin.state(handle, CHANNEL_STOP, byref(ChannelState(timer)))
        self.stop(handle)

    def stop(self, handle):
        assert not self.plugin.stop(handle)


def case_life(plugin):
    """Kernels that end after the call, before it, never; a pair; a call that never returns."""
    world = Communicator(plugin, ranks=4, rank=1)
    first = world.collective(b"AllReduce", 1000)
    channels = [world.channel(first, 5_000), world.channel(first, 5_100)]
    world.stop(first)
    world.end_channel(channels[0], 9_000)
    world.end_channel(channels[1], 9_500)
    second = world.collective(b"AllGather", 10, b"ncclBfloat16", channels=1)
    world.stop(second)
    world.end_channel(world.channel(second, 10_000), 10_700)
    third = world.collective(b"ReduceScatter", 8, channels=2)
    world.stop(third)  # the end of its kernel is not told
    for function in (b"Send", b"Send", b"Recv"):
        pair = world.pair(function, 6, 3)
        world.stop(pair)
        world.end_channel(world.channel(pair, 11_000), 11_040)
    if os.fork() == 0:  # a child never writes
        world.stop(world.collective(b"AllReduce", 1))
        os._exit(0)
    os.wait()
    plugin.finalize(world.context)
    late = Communicator(plugin, ranks=2, rank=0, name=b'a"b\\c', hash_=7)
    late.collective(b"Broadcast", 3)  # in it when the process is killed
    os.kill(os.getpid(), 9)


def case_many(plugin):
    """More events than handles and more records than the ring holds."""
    world = Communicator(plugin, ranks=2, rank=0)
    open_ = [world.collective(b"AllReduce", 1) for _ in range(5000)]
    assert sum(handle.value is None for handle in open_) == 5000 - 4096
    for handle in open_:
        world.stop(handle)
        if handle.value:
            for _ in range(2):
                world.end_channel(world.channel(handle, 1), 2)


def case_cost(plugin):
    """Nanoseconds a collective with one channel, calls from Python included and taken off."""
    world = Communicator(plugin, ranks=2, rank=0)
    what = Description(type=COLLECTIVE)
    what.body.collective.function, what.body.collective.datatype = b"AllReduce", b"ncclFloat32"
    handle, rounds = c_void_p(), 50_000
    start, stop, context = plugin.start, plugin.stop, world.context
    arguments = byref(handle), byref(what)
    results = []
    for used in (context, None):
        began = time.perf_counter_ns()
        for _ in range(rounds):
            start(used, *arguments)
            stop(handle)
        results.append((time.perf_counter_ns() - began) / rounds)
    print(json.dumps({"ns": results[0] - results[1]}))


def main():
    library = ctypes.CDLL(sys.argv[1])
    globals()[f"case_{sys.argv[2]}"](Plugin.in_dll(library, "ncclProfiler_v4"))


if __name__ == "__main__":
    main()
