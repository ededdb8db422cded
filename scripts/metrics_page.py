"""Write docs/metrics.md from the catalogue: ``.venv/bin/python scripts/metrics_page.py``."""

from pathlib import Path

from kansoku.catalog.metrics import Metric, metrics, prometheus_name

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

Written by `scripts/metrics_page.py` from `catalog/data/metrics.csv`; a test compares them.

Names are OpenTelemetry's semantic conventions where they have one, `kansoku.*` elsewhere. Every
series of a node carries `host.name` too. Units are UCUM, as OpenTelemetry writes them. The last
column is the name in PromQL after OpenTelemetry's translation (VictoriaMetrics with
`-opentelemetry.usePrometheusNaming`).
"""
GROUPS = {
    "hw.gpu": "GPU", "kansoku.gpu": "GPU", "kansoku.dcgm": "GPU", "hw.": "Hardware",
    "system.": "Host", "kansoku.cpu": "Host", "kansoku.memory": "Host", "kansoku.io": "Host",
    "kansoku.numa": "Host", "kansoku.nic": "NIC and RDMA", "kansoku.rdma": "NIC and RDMA",
    "kansoku.lustre": "Storage", "kansoku.nfs": "Storage", "nfs.": "Storage",
    "kansoku.slurm": "Slurm and logins", "kansoku.login": "Slurm and logins",
    "kansoku.switch": "Switches", "kansoku.agent": "The agent itself", "kansoku.run": "Runs",
    "kansoku.fabric": "Fabric",
}  # fmt: skip


def group(entry: Metric) -> str:
    """Return the heading a metric stands under."""
    return next((title for start, title in GROUPS.items() if entry.name.startswith(start)), "Other")


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    titles = dict.fromkeys(group(entry) for entry in metrics().values())
    for title in titles:
        parts.append(f"\n## {title}\n\n| metric | unit | kind | attributes | meaning | PromQL |")
        parts.append("|---|---|---|---|---|---|")
        for entry in metrics().values():
            if group(entry) == title:
                attributes = ", ".join(f"`{a}`" for a in entry.attributes)
                parts.append(
                    f"| `{entry.name}` | {entry.unit} | {entry.kind.value} | {attributes} "
                    f"| {entry.meaning} | `{prometheus_name(entry.name)}` |"
                )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
