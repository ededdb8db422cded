"""Run every benchmark and print its table: ``python -m benchmarks [NAME…]``.

A benchmark is a file ``bench_<area>.py`` with a function ``main()`` that prints one table through
``benchmarks.table.print_table``: each figure beside its target and, in the same run, the named
peer. Figures are ratios where the machine's own speed would blur them.
"""

import importlib
import sys
import time
from pathlib import Path


def main() -> int:
    """Run the named benchmarks, or all; a failing one does not hide the others."""
    names = sorted(
        path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py")
    )
    wanted = sys.argv[1:] or names
    if unknown := set(wanted) - set(names):
        print(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return 2
    failed = []
    for name in wanted:
        started = time.monotonic()
        print(f"\n=== {name}", flush=True)
        try:
            importlib.import_module(f"benchmarks.bench_{name}").main()
        except Exception as error:
            failed.append(name)
            print(f"{name} failed: {type(error).__name__}: {error}")
        print(f"({time.monotonic() - started:.0f} s)", flush=True)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
