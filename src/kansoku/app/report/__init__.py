"""The report of one run: where its steps go, who is slow, what every rank was in.

``report(path)`` returns a :class:`Report` with ``to_json()`` (schema ``kansoku.report/1``) and
``view()``; ``load_run(path)`` returns the tables below it.
"""

from kansoku.app.report._load import LoadedRun, load_run
from kansoku.app.report._report import Report, report
from kansoku.app.report._states import BlackBox, RankState

__all__ = ["BlackBox", "LoadedRun", "RankState", "Report", "load_run", "report"]
