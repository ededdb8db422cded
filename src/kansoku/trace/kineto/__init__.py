"""Analysis of GPU traces (Kineto columns): pure functions over arrays of integer nanoseconds.

Import from the modules, such as ``from kansoku.trace.kineto.breakdown import break_down``.
"""
