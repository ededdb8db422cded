"""The pages that show the machine: cluster, node, fabric, bursts, incidents, telemetry health."""

from kansoku.app.web_fleet._cluster import CLUSTER, NODE
from kansoku.app.web_page import Page

__all__ = ["PAGES"]

PAGES: tuple[Page, ...] = (CLUSTER, NODE)
