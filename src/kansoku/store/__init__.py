"""The store: one interface over the embedded DuckDB, a server's HTTP API and a fleet's back ends.

:class:`LocalStore` is the sole owner of the database in a folder; other processes ask it over
HTTP.
"""

from kansoku.store._interface import (
    Aggregate,
    Filters,
    Matcher,
    Matchers,
    Rows,
    Store,
    Subscription,
    matcher_list,
)
from kansoku.store._seal import Retention
from kansoku.store.http import HttpStore
from kansoku.store.local import LocalStore, StoreLimits
from kansoku.store.queries import QUERIES, NamedQuery, Parameter

__all__ = [
    "QUERIES",
    "Aggregate",
    "Filters",
    "HttpStore",
    "LocalStore",
    "Matcher",
    "Matchers",
    "NamedQuery",
    "Parameter",
    "Retention",
    "Rows",
    "Store",
    "StoreLimits",
    "Subscription",
    "matcher_list",
]
