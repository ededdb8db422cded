"""A job without torch or GPU that calls NCCL and CUDA: libraries with their names stand in."""

import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "fake_cuda"


def build_job(folder):
    """Compile it and its libraries; it waits for a line, makes its calls, and exits with 3."""
    for macro, name in (
        ("NCCL", "libnccl.so.2"),
        ("CUDART", "libcudart.so.12"),
        ("CUDA", "libcuda.so.1"),
    ):
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", f"-D{macro}", "-o", folder / name,
             SOURCES / "library.c"], check=True,
        )  # fmt: skip
    libraries = [folder / n for n in ("libnccl.so.2", "libcudart.so.12", "libcuda.so.1")]
    subprocess.run(
        ["cc", "-O1", "-o", folder / "job", SOURCES / "job.c", *libraries,
         f"-Wl,-rpath,{folder}"], check=True,
    )  # fmt: skip
    return folder / "job"
