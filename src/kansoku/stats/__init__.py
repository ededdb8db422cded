"""Robust statistics, intervals and change points: pure functions of arrays, no I/O.

Import from the modules: ``from kansoku.stats.robust import median_absolute_deviation``.
"""
