"""Live terminal views. They draw snapshots that :mod:`kansoku.app` makes."""

from kansoku.tui.top import TopApp

__all__ = ["TopApp"]
