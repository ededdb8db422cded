"""Nodes as network namespaces on one bridge: trainings whose network is cut or loses packets.

``Parted(count)`` makes ``n0 … nN`` (namespaces ``PREFIX-nI``), each with an ``eth0`` to a bridge in
a namespace of its own, and takes all of it away in ``close()``. Everything else is the machine's.
"""

import contextlib
import os
import secrets
import subprocess


def _run(*command, text=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


class Parted:
    """Nodes joined by a bridge."""

    def __init__(self, count):
        self.prefix = f"kp{secrets.token_hex(2)}"
        self.nodes = [f"n{i}" for i in range(count)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def ns(self, name):
        return f"{self.prefix}-{name}"

    def _build(self):
        names = ["sw", *self.nodes]
        _run("ip", "-batch", "-", text="".join(f"netns add {self.ns(n)}\n" for n in names))
        _run("ip", "-n", self.ns("sw"), "-batch", "-",
             text="link set lo up\nlink add br0 type bridge\nlink set br0 up\n")  # fmt: skip
        for i, node in enumerate(self.nodes):
            _run("ip", "link", "add", "eth0", "netns", self.ns(node), "type", "veth", "peer",
                 "name", f"port{i}", "netns", self.ns("sw"))  # fmt: skip
            _run("ip", "-n", self.ns("sw"), "-batch", "-",
                 text=f"link set port{i} master br0\nlink set port{i} up\n")  # fmt: skip
            _run("ip", "-n", self.ns(node), "-batch", "-",
                 text=f"link set lo up\naddr add 10.77.0.{i + 1}/24 dev eth0\nlink set eth0 up\n")  # fmt: skip

    def cut(self, node):
        """Take a node's link down at the switch: its own end loses carrier, as with a cable."""
        port = f"port{self.nodes.index(node)}"
        _run("ip", "-n", self.ns("sw"), "link", "set", port, "down")

    def lose(self, node, share):
        """Drop a share of the large packets that a node sends: a dirty transmitter spoils those.

        Small ones, acknowledgements among them, pass; so the node itself sends again, not its
        peers. Packets are cut to the link's size before, as a card would do it.
        """
        _run("ip", "-n", self.ns(node), "link", "set", "eth0", "gso_max_segs", "1")
        port = f"port{self.nodes.index(node)}"
        rules = (
            "add table netdev t\n"
            f"add chain netdev t in {{ type filter hook ingress device {port} priority 0; }}\n"
            "add rule netdev t in meta length > 500 "
            f"numgen random mod 1000 < {int(share * 1000)} drop\n"
        )
        _run("ip", "netns", "exec", self.ns("sw"), "nft", "-f", "-", text=rules)

    def inside(self, node, *command):
        """Run a command on a node and return what it printed."""
        return _run("ip", "netns", "exec", self.ns(node), *command)

    def close(self):
        """Take the namespaces away."""
        for name in ["sw", *self.nodes]:
            with contextlib.suppress(RuntimeError):
                _run("ip", "netns", "del", self.ns(name))


def enter(namespace):
    """Move this thread, and the children it forks, into a node's network."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(handle, 0x40000000):
            raise OSError(ctypes.get_errno(), f"entering {namespace}")
    finally:
        os.close(handle)
