"""Set up everything that `make test`, `make demo` and `make bench` need.

The virtual environment with the locked packages, the project itself in it, and the Debian
packages of the labs when root; a clear list of them when not. Does nothing when nothing changed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "requirements-dev.lock"
STAMP = VENV / "kansoku-setup.stamp"
DEBIAN = ROOT / "scripts" / "debian-packages.txt"
OLDEST_PYTHON = (3, 11)


def debian_packages() -> dict[str, str]:
    """Return package name to what it is for."""
    found = {}
    for line in DEBIAN.read_text(encoding="utf-8").splitlines():
        name, _, purpose = line.partition("#")
        if name.strip():
            found[name.strip()] = purpose.strip()
    return found


def missing_debian_packages() -> list[str]:
    """Return the packages of the list that dpkg does not know as installed."""
    names = list(debian_packages())
    answer = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *names],
        capture_output=True,
        text=True,
        check=False,
    )
    installed = {
        line.split()[0] for line in answer.stdout.splitlines() if line.endswith(" installed")
    }
    return [name for name in names if name not in installed]


def set_up_debian() -> None:
    """Install the missing packages when root, say which are missing when not."""
    if shutil.which("dpkg-query") is None:
        print("setup: no dpkg here; the labs need these programs on PATH:")
        for name, purpose in debian_packages().items():
            print(f"  {name:24} {purpose}")
        return
    missing = missing_debian_packages()
    if not missing:
        return
    if os.geteuid() != 0:
        print("setup: not root, so these Debian packages stay missing; their tests will say so:")
        for name in missing:
            print(f"  {name:24} {debian_packages()[name]}")
        print(f"  remedy: sudo apt-get install --no-install-recommends {' '.join(missing)}")
        return
    print(f"setup: installing {len(missing)} Debian packages")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment)
    subprocess.run(
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )


def set_up_python() -> None:
    """Create the virtual environment and install the locked packages and the project."""
    digest = hashlib.sha256(LOCK.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if STAMP.exists() and STAMP.read_text(encoding="utf-8") == digest:
        return
    print("setup: virtual environment and packages (torch alone is about 3 GB the first time)")
    python = VENV / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    uv = VENV / "bin" / "uv"
    if not uv.exists():
        subprocess.run([str(python), "-m", "pip", "install", "-q", "uv"], check=True)
    install = [str(uv), "pip", "install", "-q", "--python", str(python)]
    subprocess.run([*install, "-r", str(LOCK)], check=True)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
    STAMP.write_text(digest, encoding="utf-8")


def main() -> None:
    """Set up Python and Debian packages."""
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"setup: Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer is needed")
    set_up_python()
    set_up_debian()


if __name__ == "__main__":
    main()
