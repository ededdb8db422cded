"""Serve: OTLP in, embedded store, query API and web pages, in one process."""

from kansoku.app.serve.access import LOCAL, Access, Principal
from kansoku.app.serve.api import Api, api_routes
from kansoku.app.serve.openapi import openapi
from kansoku.app.serve.server import Server, ServeSettings, web_routes

__all__ = [
    "LOCAL",
    "Access",
    "Api",
    "Principal",
    "ServeSettings",
    "Server",
    "api_routes",
    "openapi",
    "web_routes",
]
