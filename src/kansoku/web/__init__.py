"""The web pages of ``kansoku serve``: they draw what :mod:`kansoku.app.web_pages` answers."""

from kansoku.web._routes import routes

__all__ = ["routes"]
