"""Diagnose a folder of logs, a run, a Slurm job or the live store: causes, evidence, actions.

``diagnose(target)`` takes a path, ``job:ID`` or ``live``; :func:`diagnose_folder` and
:func:`diagnose_store` are its halves. All return a :class:`Diagnosis`.
"""

from kansoku.app.diagnose._answer import Diagnosis, diagnosis_json, diagnosis_view
from kansoku.app.diagnose._folder import diagnose_folder

__all__ = [
    "Diagnosis",
    "diagnose_folder",
    "diagnosis_json",
    "diagnosis_view",
]
