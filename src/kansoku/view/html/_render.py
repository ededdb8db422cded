"""Render a View as one HTML file."""

from html import escape

from kansoku.view.blocks import View

__all__ = ["render"]


def render(view: View) -> str:
    """Return the page as text."""
    return f"<!doctype html><title>{escape(view.title)}</title>"
