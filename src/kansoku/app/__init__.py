"""Use cases: load, analyse, save, start, stop. The Python API, one module per noun.

Every command of the command line is a function here with the same name and arguments; it
returns records or DataFrames and never prints.
"""
