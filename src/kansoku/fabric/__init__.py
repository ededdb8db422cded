"""R-Pingmesh: watch the RoCE fabric by probing it, and say which RNIC, link, switch or host is ill.

Pure modules: :mod:`ecmp` (ports, labels, how many tuples), :mod:`topology`, :mod:`pinglist`,
:mod:`probe` (bytes in, events out), :mod:`summary`, :mod:`paths`, :mod:`localise`, :mod:`analyser`,
:mod:`registry`, :mod:`service`. Effects (sockets, clocks, HTTP) live in :mod:`edge`.

Import from the modules: agents must start without NumPy and Polars.
"""
