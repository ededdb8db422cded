"""Slurm job history: outcomes, sizes, waits, idle capacity, reliability, node health.

Pure functions of frames with the columns of :data:`kansoku.formats.slurm.JOB_SCHEMA`; files,
commands and queries are in :mod:`kansoku.jobs.edge`.
"""
