"""Start fabric agents by forking after one import: two dozen cold starts would take a minute.

Reads JSON lines on stdin ({"name", "namespace", "log", "node", "rnics", "controller"}), answers
each with the pid of the child, which runs what ``kansoku fabric agent`` runs. Ends with stdin.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys

import kansoku.app.fabric
import kansoku.fabric.edge.agent
import kansoku.fabric.edge.udp
import kansoku.fabric.edge.uplink
import kansoku.fabric.edge.worker

CLONE_NEWNET = 0x40000000


def child(order: dict) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{order['namespace']}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    with open(order["log"], "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.close(0)
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # the machine may be busy with other things than this test
    agent = kansoku.app.fabric.agent(
        order["node"], [tuple(pair) for pair in order["rnics"]], order["controller"]
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    agent.run()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                child(order)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(70)
            os._exit(0)
        print(pid, flush=True)


main()
