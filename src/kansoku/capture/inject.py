"""Put the recorder into a job: a self-contained folder and the environment that names it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from kansoku.model import ring

__all__ = ["PACKAGE", "environment", "write_payload"]

PACKAGE = "_kansoku"
_PAYLOAD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "payload")
_RENAMED = (
    ("kansoku.capture.payload", PACKAGE),
    ("from kansoku.model import ring", f"from {PACKAGE} import ring"),
)

_SITECUSTOMIZE = f'''"""Start the kansoku recorder, then the sitecustomize that was here before."""
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _chain():
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    others = [p for p in sys.path if os.path.abspath(p or ".") != _here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    if os.environ.get("KANSOKU_DISABLE") != "1":
        from {PACKAGE}.bootstrap import arm

        arm()
except Exception:
    pass
_chain()
'''
_ENTRY_POINTS = f"[torch.backends]\nkansoku = {PACKAGE}.bootstrap:activate\n"
_METADATA = "Metadata-Version: 2.1\nName: kansoku-capture\nVersion: 1\n"


def write_payload(folder: str) -> str:
    """Write the self-contained folder to put on PYTHONPATH; return its path."""
    package = os.path.join(folder, PACKAGE)
    os.makedirs(package, exist_ok=True)
    for name in sorted(os.listdir(_PAYLOAD)):
        source = os.path.join(_PAYLOAD, name)
        if name.endswith(".py"):
            with open(source, encoding="utf-8") as stream:
                text = stream.read()
            for old, new in _RENAMED:
                text = text.replace(old, new)
            _write(os.path.join(package, name), text)
        elif name.endswith((".c", ".h", ".cpp")):
            shutil.copyfile(source, os.path.join(package, name))
    shutil.copyfile(str(ring.__file__), os.path.join(package, "ring.py"))
    _write(os.path.join(folder, "sitecustomize.py"), _SITECUSTOMIZE)
    info = os.path.join(folder, "kansoku_capture-1.dist-info")
    os.makedirs(info, exist_ok=True)
    _write(os.path.join(info, "METADATA"), _METADATA)
    _write(os.path.join(info, "entry_points.txt"), _ENTRY_POINTS)
    return folder


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)


def environment(
    base: Mapping[str, str], *, payload: str, run: str, out: str | None, node: str
) -> dict[str, str]:
    """Return the job's environment: ``base`` with the recorder on its path and the run's facts."""
    result = dict(base)
    result["PYTHONPATH"] = os.pathsep.join(p for p in (payload, base.get("PYTHONPATH")) if p)
    result["KANSOKU_RUN_ID"] = run
    result["KANSOKU_LAUNCH_NODE"] = node
    if out is not None:
        result["KANSOKU_OUT"] = out
    return result
