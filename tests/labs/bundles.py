"""Synthetic incident bundles with the verdict an experienced operator would give.

Written after the meanings of the field's messages (vendor catalogues, operators' reports), without
knowledge of any diagnosis rule: decisive lines are reworded or come from other tools and versions,
and each bundle holds at least one decoy. `write_bundles` is deterministic in its seed: hosts,
clocks, zones, formats, ranks and times differ from seed to seed.
"""

from pathlib import Path

from tests.labs import bundle_fabric, bundle_gpu, bundle_platform, bundle_software
from tests.labs.bundle_scene import DOMAINS, Case, Scene

__all__ = ["DOMAINS", "Case", "write_bundles"]


def write_bundles(folder: Path, seed: int) -> list[Case]:
    """Write every bundle into a folder of its own below `folder`; return the cases."""
    makers = (
        *bundle_gpu.CASES,
        *bundle_fabric.CASES,
        *bundle_platform.CASES,
        *bundle_software.CASES,
    )
    return [maker(Scene(maker.__name__, folder, seed)) for maker in makers]
