"""Two hosts and a router in network namespaces, the router's link to the receiver rate limited."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

TRAFFIC = str(Path(__file__).with_name("burst_traffic.py"))
RATE_BITS_PER_S = 100_000_000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class BurstLab:
    """``a`` — router — ``b``; the router sends to ``b`` at 100 Mb/s. ``b``'s port is ``nic``."""

    sender, receiver = "10.77.1.2", "10.77.2.2"

    def __init__(self) -> None:
        self.prefix = f"kb{os.getpid() % 100000}"
        self._workers: list[subprocess.Popen] = []

    def ns(self, host: str) -> str:
        return f"{self.prefix}-{host}"

    def __enter__(self) -> Self:
        for host in ("a", "r", "b"):
            ip("netns", "add", self.ns(host))
        for host, net in (("a", 1), ("b", 2)):
            mine, router = self.ns(host), self.ns("r")
            ip("-n", mine, "link", "add", "nic", "type", "veth", "peer", "name", f"to-{host}",
               "netns", router)  # fmt: skip
            ip("-n", mine, "addr", "add", f"10.77.{net}.2/24", "dev", "nic")
            ip("-n", router, "addr", "add", f"10.77.{net}.1/24", "dev", f"to-{host}")
            ip("-n", mine, "link", "set", "nic", "up")
            ip("-n", router, "link", "set", f"to-{host}", "up")
            ip("-n", mine, "route", "add", "default", "via", f"10.77.{net}.1")
        self.run("r", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self.run("r", "tc", "qdisc", "add", "dev", "to-b", "root", "tbf", "rate",
                 str(RATE_BITS_PER_S), "burst", "8kb", "limit", "2mb")  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
            worker.stdin.close()
            worker.stdout.close()
        for host in ("a", "r", "b"):
            subprocess.run(["ip", "netns", "del", self.ns(host)], capture_output=True, timeout=30)

    def command(self, host: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.ns(host), *words]

    def run(self, host: str, *words: str) -> str:
        done = subprocess.run(
            self.command(host, *words), check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def watch(self, host: str, *words: str) -> subprocess.Popen:
        """Start ``kansoku burst watch`` on a host; it says on stderr when it reads."""
        command = ["burst", "watch", "--node", host, "--json", "--bursts", *words]
        return subprocess.Popen(
            self.command(host, sys.executable, "-m", "kansoku", *command),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def bursts(self, size: int, period_s: float, count: int) -> list[int]:
        """Send bursts from ``a`` to ``b``; return when each began."""
        words = (self.receiver, str(size), str(period_s), str(count))
        out = self.run("a", "chrt", "-f", "2", sys.executable, TRAFFIC, "send", *words)
        return [int(line) for line in out.split()]

    def start_probing(self) -> None:
        """Have ``a`` probe ``b`` every 3 ms."""
        for host, words in (
            ("b", [self.receiver, "7"]),
            ("a", [self.sender, "8", self.receiver, "7"]),
        ):
            worker = subprocess.Popen(
                self.command(host, "nice", "-n", "-10", sys.executable, TRAFFIC, "worker", *words),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert worker.stdout.readline() == "ready\n"
            self._workers.append(worker)

    def probes(self) -> list[dict]:
        """Stop probing; return the time and RTT of each probe."""
        out, _ = self._workers.pop().communicate(timeout=30)
        return [json.loads(line) for line in out.splitlines()]
