"""The pages that show the machine: cluster, node, fabric, bursts, incidents, telemetry health."""

from kansoku.app.web_fleet._bursts import BURST, BURSTS
from kansoku.app.web_fleet._cluster import CLUSTER, NODE
from kansoku.app.web_fleet._fabric import FABRIC, PAIR
from kansoku.app.web_fleet._health import HEALTH
from kansoku.app.web_fleet._incidents import INCIDENT, INCIDENTS
from kansoku.app.web_page import Page

__all__ = ["PAGES"]

PAGES: tuple[Page, ...] = (
    CLUSTER,
    NODE,
    FABRIC,
    PAIR,
    BURSTS,
    BURST,
    INCIDENTS,
    INCIDENT,
    HEALTH,
)
