"""Records shared by every part: one frozen record per concept, one schema per bulk table.

Time is integer nanoseconds since the Unix epoch unless a field names another clock. Missing is
None (null in columns), never 0 or -1.
"""

from kansoku.model.delivery import Origin, Receipt
from kansoku.model.finding import Action, Evidence, Finding, Hypothesis, Incident, Severity
from kansoku.model.mfu import Mfu, StepWindow
from kansoku.model.phase import PHASES, Phase
from kansoku.model.run import ProcessEnd, ProcessGroup, RankFacts, RunFacts
from kansoku.model.subject import Domain, Subject, Verdict
from kansoku.model.tables import TABLES, Table, table_schema

__all__ = [
    "PHASES",
    "TABLES",
    "Action",
    "Domain",
    "Evidence",
    "Finding",
    "Hypothesis",
    "Incident",
    "Mfu",
    "Origin",
    "Phase",
    "ProcessEnd",
    "ProcessGroup",
    "RankFacts",
    "Receipt",
    "RunFacts",
    "Severity",
    "StepWindow",
    "Subject",
    "Table",
    "Verdict",
    "table_schema",
]
