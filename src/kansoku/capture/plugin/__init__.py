"""NCCL's profiler plugin: plain C that writes the ring, built where a compiler is.

Set ``NCCL_PROFILER_PLUGIN`` to the path that ``build_plugin`` returns. Not yet run on a GPU.
"""

from kansoku.capture.plugin.build import BuildError, build_plugin

__all__ = ["BuildError", "build_plugin"]
