"""kansoku (観測): measures LLM training and observes the AI supercomputer it runs on.

The Python API lives in :mod:`kansoku.app`: one module per noun, one function per command,
with the same names as on the command line.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
