"""The job history as Python functions: the same answers as ``kansoku jobs …``."""

from kansoku.app.jobs.importing import collect, import_jobs, import_json, import_view
from kansoku.app.jobs.reporting import load_jobs, report, report_json, report_view

__all__ = [
    "collect",
    "import_jobs",
    "import_json",
    "import_view",
    "load_jobs",
    "report",
    "report_json",
    "report_view",
]
