"""Configuration of a fleet as text: collector, stores, Grafana, alerts, systemd, Slurm.

Pure: records in, texts out. Dashboards are in :mod:`kansoku.deploy.dashboards`, which needs the
``grafana`` extra.
"""

from kansoku.deploy.alerts import AlertPolicy, AlertRule, alert_rules
from kansoku.deploy.files import RenderedFile, render_files
from kansoku.deploy.promql import promql
from kansoku.deploy.settings import BackEndAddress, Settings, component_name, shipped_versions
from kansoku.deploy.units import Unit, units

__all__ = [
    "AlertPolicy",
    "AlertRule",
    "BackEndAddress",
    "RenderedFile",
    "Settings",
    "Unit",
    "alert_rules",
    "component_name",
    "promql",
    "render_files",
    "shipped_versions",
    "units",
]
