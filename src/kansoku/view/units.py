"""Figures with a unit that a person reads at a glance."""

__all__ = ["in_bytes", "in_time"]


def in_bytes(value: float | None) -> str | None:
    """Return a byte count in the largest binary unit that it fills; None stays None."""
    if value is None:
        return None
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def in_time(seconds: float | None) -> str | None:
    """Return a length of time in the largest unit that it fills twice; None stays None.

    From days to µs: ``3.1 d``, ``5.2 h``, ``13.0 min``, ``42 s``, ``1.5 s``, ``250 ms``, ``80 µs``.
    Days, hours and minutes have one decimal; below, three digits.
    """
    if seconds is None:
        return None
    size = abs(seconds)
    for factor, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if size >= 2 * factor:
            return f"{seconds / factor:,.1f} {unit}"
    for part, unit in ((1.0, "s"), (1e-3, "ms")):
        # 0.9996 s in three digits is 1 s, not 1e+03 ms.
        if size >= 0.9995 * part:
            return f"{seconds / part:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"
