"""Keep what the rings of one node hold: copy every closed record to OUT/NODE/, without locks.

One process a node, started by the launcher or by local rank 0 where no launcher is. Where there are
two, each ring is copied by the one that locked it first, and the other takes over when that one is
gone. It may be killed and started again at any time: how far it came stands in the copies, and what
was not copied is still in the rings. It never touches the job. Run as a program:
``python drain.py RING_DIR OUT [--parent PID]``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import time

from kansoku.model import ring

__all__ = ["Drain", "give_way", "main"]

_POLL_S = 1.0
_LOOK_S = 0.1
"""Between two looks for the first ring."""
_FASTEST = 40_000
"""Records a second that a lane may get without loss: a training of 1 ms steps has 10,000."""
_NICE = 10
_HOLE_S = 1.0
_IDLE_S, _PATIENCE_S = 5.0, 60.0
"""Without rings: ranks may be started again; the first may still import torch."""
_FEW, _MANY = 64, 8192
"""Records read at once: a few first, since the job wants the caches that a megabyte takes."""
_WORDS = ring.RECORD_BYTES // 8
_LOST_OFFSET = 200
_LANES_OFFSET = 256
_KIND_OFFSET = 28
_USED_OFFSET = 64
_COUNT = (1 << ring.LANE_SHIFT) - 1


def _alive(pid: int, started: int) -> bool:
    """Say whether the process that wrote the ring still runs (not another with its pid)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return fields[0] != b"Z" and (not started or int(fields[19]) == started)


class _Copy:
    """One ring and its growing copy."""

    def __init__(self, path: str, out: str):
        self.path = path
        self.ring = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # open while its lock is held
        try:
            self._lock()
            self._open(out)
        except Exception:
            os.close(self.ring)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self.ring, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks

    def _open(self, out: str) -> None:
        self.buffer = mmap.mmap(self.ring, 0, access=mmap.ACCESS_READ)
        header = ring.read_header(self.buffer)
        if header.file_kind != ring.RING:
            raise ring.RingError("a copy, not a ring")
        self.pid, self.started = header.pid, header.process_start
        self.lanes = header.lanes
        self.records_offset = header.records_offset
        self.next = [1] * len(self.lanes)
        self.open: list[dict[int, bytes]] = [{} for _ in self.lanes]
        self.stalled = [(0, 0.0)] * len(self.lanes)
        self.again: list[bytes] = []
        self.lost = 0
        self.failed = 0
        node = os.path.basename(self.path)[: -len(".ring")]
        facts = ring.read_facts(self.buffer, header)
        folder = os.path.join(out, str(facts.get("node") or node.rpartition("-")[0] or "node"))
        os.makedirs(folder, exist_ok=True)
        self.target = os.path.join(folder, os.path.basename(self.path))
        self.file = os.open(self.target, os.O_RDWR | os.O_CREAT, 0o644)
        self._head = self._body = b""
        self.facts_offset = header.facts_offset
        # A lane must not be overwritten between two looks; the first two lanes of a ring of 1 MiB
        # hold 3,500 records each.
        self.poll_s = min(_POLL_S, min(lane.capacity for lane in self.lanes) / _FASTEST)
        self._resume()

    def _resume(self) -> None:
        """Go on where an earlier drain of the same process stopped."""
        self.size = self.records_offset
        try:
            old = os.pread(self.file, self.records_offset, 0)
            header = ring.read_header(old)
            if (header.pid, header.process_start) != (self.pid, self.started):
                return
            length = os.fstat(self.file).st_size
            whole = max(length - self.records_offset, 0) // ring.RECORD_BYTES
            self.size = self.records_offset + whole * ring.RECORD_BYTES
            self.lost = header.lost
            for number, lane in enumerate(header.lanes):
                self.next[number] = lane.drained + 1
                self._take_again(number, lane.drained)
        except (ring.RingError, OSError):
            self.size = self.records_offset

    def _take_again(self, number: int, drained: int) -> None:
        """Take what the ring still has of the time before the restart.

        A span that was open then may have closed since; the reader drops what is twice.
        """
        lane = self.lanes[number]
        for slot in range(lane.capacity):
            at = lane.offset + slot * ring.RECORD_BYTES
            record = bytes(self.buffer[at : at + ring.RECORD_BYTES])
            n = int.from_bytes(record[:8], "little") & _COUNT
            if not 0 < n <= drained or record[:8] != record[-8:]:
                continue
            if int.from_bytes(record[24:32], "little", signed=True) < 0:
                self.open[number][n] = record
            else:
                self.again.append(record)

    def poll(self) -> int:
        """Copy what is new; return how many records."""
        kept: list[bytes] = list(self.again)
        before = (list(self.next), [dict(spans) for spans in self.open], self.lost)
        for number in range(len(self.lanes)):
            self._follow(number, kept)
            self._look_again(number, kept)
        try:
            if kept:
                data = b"".join(kept)
                if os.pwrite(self.file, data, self.size) != len(data):
                    raise OSError("short write")
                self.size += len(data)
            self._write_head()
            self.again.clear()
            self.failed = 0
        except OSError:  # a full disk: forget this round and try again; the ring still has it
            self.next, self.open, self.lost = before
            self.failed += 1
            return 0
        return len(kept)

    def _follow(self, number: int, kept: list[bytes]) -> None:
        """Take the records after the last one seen, in order, up to the newest."""
        lane = self.lanes[number]
        view = memoryview(self.buffer)
        most = _FEW
        while True:
            first = self.next[number]
            slot = (first - 1) % lane.capacity
            count = min(lane.capacity - slot, most)
            most = min(4 * most, _MANY)
            at = lane.offset + slot * ring.RECORD_BYTES
            raw = bytes(view[at : at + count * ring.RECORD_BYTES])
            words = memoryview(raw).cast("q")
            ids = words[0::_WORDS].tolist()
            again = words[_WORDS - 1 :: _WORDS].tolist()
            durations = words[3::_WORDS].tolist()
            origins = words[14::_WORDS].tolist()
            done, stop = 0, False
            for i in range(count):
                n = ids[i] & _COUNT
                if n != first + i or ids[i] != again[i]:
                    stop = True
                    if n > first + i:  # the writer has lapped us
                        newest = self._newest(number)
                        oldest = max(newest - lane.capacity + 2, first + i + 1)
                        self.lost += oldest - (first + i)
                        self.next[number] = oldest
                        stop = False
                    elif self._hole(number, first + i):
                        self.next[number] = first + i + 1
                        self.lost += 1
                        stop = False
                    else:
                        self.next[number] = first + i
                    done = -1
                    break
                record = raw[i * ring.RECORD_BYTES : (i + 1) * ring.RECORD_BYTES]
                if durations[i] < 0:
                    self.open[number][n] = record
                else:
                    kept.append(record)
                    if origins[i]:
                        self.open[number].pop(origins[i] & _COUNT, None)
            if done == 0:
                self.next[number] = first + count
            if stop:
                return

    def _newest(self, number: int) -> int:
        lane = self.lanes[number]
        area = bytes(self.buffer[lane.offset : lane.offset + lane.capacity * ring.RECORD_BYTES])
        return max(value & _COUNT for value in memoryview(area).cast("q")[0::_WORDS].tolist())

    def _hole(self, number: int, n: int) -> bool:
        """Say whether a record was skipped for good: later ones are there for a second."""
        lane = self.lanes[number]
        at = lane.offset + (n % lane.capacity) * ring.RECORD_BYTES
        following = int.from_bytes(self.buffer[at : at + 8], "little") & _COUNT
        if following != n + 1:
            return False
        now = time.monotonic()
        at_n, since = self.stalled[number]
        # The same one: a busy writer has long written what was missing when we copied the block.
        if at_n == n and now - since > _HOLE_S:
            return True
        if at_n != n:
            self.stalled[number] = (n, now)
        return False

    def _look_again(self, number: int, kept: list[bytes]) -> None:
        """Keep the spans that were open at the last look and have closed."""
        lane = self.lanes[number]
        for n in list(self.open[number]):
            at = lane.offset + ((n - 1) % lane.capacity) * ring.RECORD_BYTES
            record = bytes(self.buffer[at : at + ring.RECORD_BYTES])
            if int.from_bytes(record[:8], "little") & _COUNT != n:
                continue  # overwritten: its writer will complete it under a new number
            if int.from_bytes(record[24:32], "little", signed=True) >= 0:
                kept.append(record)
                del self.open[number][n]

    def _write_head(self) -> None:
        """Copy the header with how far we came, and facts and strings where they changed."""
        change = self.buffer[self.facts_offset : self.facts_offset + 4]
        body = change + self.buffer[_USED_OFFSET : _USED_OFFSET + 8]
        head = bytearray(self.buffer[: ring.HEADER_BYTES])
        head[_KIND_OFFSET : _KIND_OFFSET + 4] = (ring.LOG).to_bytes(4, "little")
        head[_LOST_OFFSET : _LOST_OFFSET + 8] = self.lost.to_bytes(8, "little")
        for number in range(len(self.lanes)):
            at = _LANES_OFFSET + number * 32 + 24
            head[at : at + 8] = (self.next[number] - 1).to_bytes(8, "little")
        new = bytes(head)
        if body != self._body:
            new += self.buffer[ring.HEADER_BYTES : self.records_offset]
        elif new == self._head:
            return
        if os.pwrite(self.file, new, 0) != len(new):
            raise OSError("short write")
        self._head = new[: ring.HEADER_BYTES]
        self._body = b"" if change[0] & 1 else body  # odd: the facts are being written

    def finish(self) -> None:
        """Keep what a writer that is gone left open, too, and remove its ring."""
        left = [record for spans in self.open for record in spans.values()]
        if left:
            data = b"".join(left)
            if os.pwrite(self.file, data, self.size) != len(data):
                raise OSError("short write")
            self.size += len(data)
        os.ftruncate(self.file, self.size)
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass  # somebody cleaned up: nothing is left to do, and waiting would never end
        self.release()

    def release(self) -> None:
        """Leave the ring to another drain."""
        os.close(self.file)
        os.close(self.ring)


class Drain:
    """All rings of one folder."""

    def __init__(self, ring_dir: str, out: str):
        self.ring_dir = ring_dir
        self.out = out
        self.copies: dict[str, _Copy] = {}
        self.refused: set[str] = set()
        self.finished: set[str] = set()
        self.held: set[str] = set()
        """Rings that another drain copies."""

    @property
    def wait_s(self) -> float:
        """How long the rings can be left alone."""
        return min((copy.poll_s for copy in self.copies.values()), default=_LOOK_S)

    def poll(self) -> int:
        """Find new rings, copy what is new, finish those whose writer is gone."""
        self._find()
        kept = 0
        for name, copy in list(self.copies.items()):
            alive = _alive(copy.pid, copy.started)
            kept += copy.poll()
            if not alive and not copy.failed:
                copy.poll()
                try:
                    copy.finish()
                except OSError:
                    continue  # a full disk: the ring stays where it is
                del self.copies[name]
                self.finished.add(name)
        return kept

    def release(self) -> None:
        """Leave the rings to another drain."""
        while self.copies:
            self.copies.popitem()[1].release()

    def _find(self) -> None:
        self.held.clear()
        try:
            names = [name for name in os.listdir(self.ring_dir) if name.endswith(".ring")]
        except OSError:
            return
        for name in names:
            if name in self.copies or name in self.refused or name in self.finished:
                continue
            path = os.path.join(self.ring_dir, name)
            try:
                self.copies[name] = _Copy(path, self.out)
            except ring.RingError:
                try:
                    if time.time() - os.stat(path).st_mtime > 10:  # not just being made
                        self.refused.add(name)
                except OSError:
                    pass
            except BlockingIOError:
                self.held.add(name)
            except (OSError, ValueError):
                continue  # a full disk or a file being made: next time


def give_way() -> None:
    """Run where the job leaves a core free, and else with a tenth of a share of one."""
    try:
        os.nice(_NICE)
    except OSError:
        pass  # forbidden: a look takes a millisecond


def _remove(folder: str) -> None:
    """Clean up where no launcher does: it was killed, or this is another node."""
    try:
        os.rmdir(folder)
    except OSError:
        pass  # not empty, or gone


def main(arguments: list[str]) -> int:
    """Drain until the parent, where one is named, and every writer are gone."""
    give_way()
    ring_dir, out = arguments[0], arguments[1]
    parent = int(arguments[3]) if len(arguments) > 3 and arguments[2] == "--parent" else 0
    drain = Drain(ring_dir, out)
    quiet_since = time.monotonic()
    had_some = False
    while True:
        drain.poll()
        now = time.monotonic()
        has_some = bool(drain.copies or drain.held)
        had_some = bool(had_some or has_some or drain.finished)
        if has_some or (parent and os.getppid() == parent):
            quiet_since = now
        elif now - quiet_since > (_IDLE_S if had_some else _PATIENCE_S):
            _remove(ring_dir)
            return 0
        time.sleep(drain.wait_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
