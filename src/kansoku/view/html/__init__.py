"""The one HTML renderer: a View becomes a self-contained page, no network needed."""

from kansoku.view.html._plots import series_item
from kansoku.view.html._render import render

__all__ = ["render", "series_item"]
