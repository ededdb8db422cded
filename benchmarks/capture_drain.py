"""The drain of a job whose recording is switched: what it does in a second of recorded time.

Program of ``bench_capture``: ``capture_drain.py RING_DIR OUT``. The job writes ``+`` to its input
where a recorded block begins and ``-`` where one ends. Between two looks the drain waits as long as
in use, and only the time of recorded blocks counts: stopped and woken by signals it would look once
a block, several times as often as it does.
"""

import os
import select
import sys
import time

from _kansoku.drain import Drain, give_way


def main(ring_dir, out):
    give_way()
    drain = Drain(ring_dir, out)
    inputs = select.poll()
    inputs.register(0, select.POLLIN)
    left, recorded = drain.wait_s, False
    while True:
        begin = time.monotonic()
        told = inputs.poll(max(left, 0) * 1e3 if recorded else None)
        left -= (time.monotonic() - begin) * recorded
        if told:
            word = os.read(0, 1)
            if not word:
                return
            recorded = word == b"+"
        elif left <= 0:
            drain.poll()
            left = drain.wait_s


if __name__ == "__main__":
    main(*sys.argv[1:])
