"""OTLP bytes to rows in bulk."""

from kansoku.telemetry.decode_plain import Decoded

__all__ = ["decode_bulk"]


def decode_bulk(signal: str, payload: bytes) -> Decoded | None:
    """Return the rows of a body, or None for what the plain walk must read."""
    _ = signal, payload
    return None
