"""The job history as Python functions: the same answers as ``kansoku jobs …``.

Functions named like the commands return records; ``load_jobs`` and ``attributions`` return
frames.
"""

from kansoku.app.jobs.capacity import idle, idle_json, idle_view
from kansoku.app.jobs.health import excluded_nodes, nodes, nodes_json, nodes_view
from kansoku.app.jobs.heat import heatmap, heatmap_json, heatmap_png, heatmap_view
from kansoku.app.jobs.importing import (
    collect,
    import_jobs,
    import_json,
    import_view,
    kept_quarantined,
)
from kansoku.app.jobs.reliable import (
    attributions,
    parse_compare,
    reliability,
    reliability_json,
    reliability_view,
)
from kansoku.app.jobs.reporting import load_jobs, report, report_json, report_view
from kansoku.app.jobs.showing import (
    admin_comment,
    show,
    show_json,
    show_view,
    write_admin_comment,
)
from kansoku.jobs.reliability import ReliabilityPolicy

__all__ = [
    "ReliabilityPolicy",
    "admin_comment",
    "attributions",
    "collect",
    "excluded_nodes",
    "heatmap",
    "heatmap_json",
    "heatmap_png",
    "heatmap_view",
    "idle",
    "idle_json",
    "idle_view",
    "import_jobs",
    "import_json",
    "import_view",
    "kept_quarantined",
    "load_jobs",
    "nodes",
    "nodes_json",
    "nodes_view",
    "parse_compare",
    "reliability",
    "reliability_json",
    "reliability_view",
    "report",
    "report_json",
    "report_view",
    "show",
    "show_json",
    "show_view",
    "write_admin_comment",
]
