"""A fake NVML: compiles the stub library, writes the file it reads its values from."""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "fake_nvml" / "fake_nvml.c"


class FakeNvml:
    """A folder with libnvidia-ml.so.1, and the values it answers with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values = folder / "values"
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", folder / "libnvidia-ml.so.1", SOURCE],
            check=True,
        )
        self.set()

    def set(self, **values) -> None:
        """Write values: ``power_mw=500000`` for all GPUs, ``power_mw={3: 90000}`` for some."""
        lines = []
        for name, value in values.items():
            per_gpu = value if isinstance(value, dict) else {-1: value}
            lines += [f"{name} {gpu} {number}" for gpu, number in per_gpu.items()]
        part = self.values.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in lines))
        part.replace(self.values)

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs to load it."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.folder),
            "KANSOKU_FAKE_NVML": str(self.values),
        }
