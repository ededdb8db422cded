"""Figures with a unit that a person reads at a glance."""

__all__ = ["in_bytes"]


def in_bytes(value: float | None) -> str | None:
    """Return a byte count in the largest binary unit that it fills; None stays None."""
    if value is None:
        return None
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"
