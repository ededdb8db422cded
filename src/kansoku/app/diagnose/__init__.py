"""Diagnose a folder of logs, a run, a Slurm job or the live store: causes, evidence, actions.

:func:`diagnose_folder` reads a folder of whatever there is, :func:`diagnose_store` the live store
or one Slurm job in it. Both return a :class:`Diagnosis`.
"""

from kansoku.app.diagnose._answer import Diagnosis, diagnosis_json, diagnosis_view
from kansoku.app.diagnose._folder import diagnose_folder
from kansoku.app.diagnose._store import diagnose_store

__all__ = [
    "Diagnosis",
    "diagnose_folder",
    "diagnose_store",
    "diagnosis_json",
    "diagnosis_view",
]
