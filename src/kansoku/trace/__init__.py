"""Traces: steps, phases, overlap, clocks, stragglers, hangs, what-if.

Import from the modules: ``from kansoku.trace.steps import step_rows``.
"""
