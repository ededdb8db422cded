"""Fast counters: what 16 ports at 1 ms cost, how many readings are missed, what analysis costs.

Peers of the same run: a plain loop that only sleeps each millisecond, and the same 16 ports read
by 32 preads of sysfs a turn.
"""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import numpy as np

from benchmarks.table import Row, print_table
from kansoku.burst.detect import Detector
from kansoku.burst.edge.ports import find_ports
from kansoku.burst.edge.sampler import Sampler

PORTS = 16
SECONDS = 6.0


@contextlib.contextmanager
def interfaces():
    """Sixteen veth ends with a gigabit line rate each."""
    prefix = f"kbb{os.getpid() % 1000}x"
    names = [f"{prefix}{n}" for n in range(PORTS)]
    try:
        for name in names:
            subprocess.run(
                ["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"], check=True
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def sample(
    names: list[str], interval_ns: int, *, native: bool = True
) -> tuple[float, float, float, float]:
    """Return CPU of the reader and of the analysis (ratios of a core), missed ratio, torn."""
    ports = find_ports(names, line_rates_bits_per_s=dict.fromkeys(names, 1e9))
    with Sampler(ports, node="bench", interval_ns=interval_ns, native=native) as sampler:
        sampler.wait_reading()
        if sampler.native != native:
            print("no C compiler: the reader in Python is measured")
        pid = sampler.reader_pid
        time.sleep(0.2)
        cpu, own, begin = cpu_seconds(pid), time.thread_time(), time.monotonic()
        while time.monotonic() - begin < SECONDS:
            time.sleep(1.0)
            sampler.poll()
        wall = time.monotonic() - begin
        reader, analysis = cpu_seconds(pid) - cpu, time.thread_time() - own
        windows = [found.window for found in sampler.windows(final=True)]
        torn = sampler.torn
    missed = sum(w.missed for w in windows) / sum(w.missed + w.samples for w in windows)
    return reader / wall, analysis / wall, missed, torn


def sleep_only() -> float:
    due, cpu, begin = time.monotonic(), time.thread_time(), time.monotonic()
    while due < begin + 2:
        due += 0.001
        time.sleep(max(due - time.monotonic(), 0))
    return (time.thread_time() - cpu) / (time.monotonic() - begin)


def sysfs(names: list[str]) -> float:
    files = [
        os.open(f"/sys/class/net/{name}/statistics/{side}_bytes", os.O_RDONLY)
        for name in names
        for side in ("rx", "tx")
    ]
    due, cpu, begin = time.monotonic(), time.thread_time(), time.monotonic()
    while due < begin + 2:
        due += 0.001
        time.sleep(max(due - time.monotonic(), 0))
        for file in files:
            int(os.pread(file, 32, 0))
    used = (time.thread_time() - cpu) / (time.monotonic() - begin)
    for file in files:
        os.close(file)
    return used


def detection() -> float:
    """Return readings per second that one core turns into bursts."""
    rng = np.random.default_rng(1)
    share = np.where(rng.random(100_000) < 0.05, 0.9, 0.1)
    counter = np.concatenate([[0], np.cumsum(share * 125_000)]).astype(np.int64)
    times = 10**18 + 1_000_000 * np.arange(100_001, dtype=np.int64)
    detector = Detector(line_rate_bytes_per_s=125e6, interval_ns=1_000_000)
    begin = time.process_time()
    for low in range(0, 100_001, 1000):
        detector.feed(times[low : low + 1000], counter[low : low + 1000])
    return 100_000 / (time.process_time() - begin)


def main() -> None:
    """Measure and print."""
    with interfaces() as names:
        floor = sleep_only()
        plain = sysfs(names)
        reader, analysis, missed, torn = sample(names, 1_000_000)
        fast, fast_analysis, fast_missed, _ = sample(names, 100_000)
        slow, *_ = sample(names, 1_000_000, native=False)
    load = os.getloadavg()[0]
    rows = [
        Row(
            what=f"reader, {PORTS} ports at 1 ms", measured=reader * 100, unit="% of a core",
            target="< 5", peer=f"sysfs {plain:.1%}, sleep only {floor:.1%}", met=reader < 0.05,
        ),
        Row(what="  the reader in Python", measured=slow * 100, unit="% of a core", target=""),
        Row(what="  analysis of them", measured=analysis * 100, unit="% of a core", target=""),
        Row(
            what=f"  readings missed (load average {load:.1f})", measured=missed * 100, unit="%",
            target="< 0.1 idle", met=missed < 0.001,
        ),
        Row(what="  readings torn and thrown away", measured=torn, unit="readings", target=""),
        Row(what=f"reader, {PORTS} ports at 100 µs", measured=fast * 100, unit="% of a core",
            target=""),
        Row(what="  analysis of them", measured=fast_analysis * 100, unit="% of a core", target=""),
        Row(what="  readings missed", measured=fast_missed * 100, unit="%", target=""),
        Row(what="detection, one core", measured=detection() / 1e6, unit="M readings/s", target=""),
    ]  # fmt: skip
    print_table("Microbursts", rows)


if __name__ == "__main__":
    main()
