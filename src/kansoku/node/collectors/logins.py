"""Login sessions, on login nodes."""

from collections import Counter
from collections.abc import Iterable

from kansoku.formats.utmp import Session, parse_utmp
from kansoku.node.collector import Collector
from kansoku.node.host import Host
from kansoku.node.sample import Event, Sample, labels

__all__ = ["Logins"]

_FILES = ("/run/utmp", "/var/run/utmp")


class Logins(Collector):
    """/run/utmp; where the host of a login is left out: it is the user's business."""

    name = "logins"
    title = "login sessions"
    metrics = ("kansoku.login.sessions",)

    def __init__(self) -> None:
        self._known: set[Session] | None = None

    def absent(self, host: Host) -> str | None:
        """Containers and images without utmp."""
        return None if any(host.read_bytes(f) is not None for f in _FILES) else "no /run/utmp"

    def collect(self, host: Host) -> Iterable[Sample | Event]:
        """Sessions by user, and an event for each that began or ended."""
        data = next((d for d in map(host.read_bytes, _FILES) if d is not None), b"")
        # A record stays after its process died without logging out.
        now = {s for s in parse_utmp(data) if host.read(f"/proc/{s.pid}/stat") is not None}
        for user, number in sorted(Counter(s.user for s in now).items()):
            yield Sample("kansoku.login.sessions", labels(("kansoku.user", user)), float(number))
        if self._known is not None:
            for kind, sessions in (("login", now - self._known), ("logout", self._known - now)):
                for session in sorted(sessions, key=lambda s: (s.start_ns, s.line)):
                    yield Event(
                        time_ns=session.start_ns if kind == "login" else host.now_ns(),
                        source="login",
                        subject=f"node:{host.name}",
                        severity="info",
                        kind=kind,
                        body=f"{session.user} on {session.line}",
                        attributes={"kansoku.user": session.user},
                    )
        self._known = now
