"""PromQL texts from the metric catalogue's names."""

import re

from kansoku.catalog.metrics import prometheus_name

__all__ = ["promql"]

_NAME = re.compile(r"%([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+)")


def promql(text: str) -> str:
    """Return the text with ``%hw.power`` replaced by that metric's name in PromQL.

    Raises InputError for a metric that the catalogue does not declare.

    >>> promql('sum(%hw.power{hw_type="gpu"})')
    'sum(hw_power_watts{hw_type="gpu"})'
    """
    return _NAME.sub(lambda match: prometheus_name(match[1]), text)
