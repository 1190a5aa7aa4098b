"""Names of the benchmarks, one a line: ``python -m benchmarks [NAME]``. With a NAME it prints this
one. The exit code is 1 if there is no such benchmark.

A benchmark is a module ``benchmarks.NAME`` with a ``main``, or a package with its parts and a
``__main__``.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SHARED = ("__init__", "__main__", "report")


def names() -> list[str]:
    """Names of all benchmarks, in order."""
    modules = [path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED]
    packages = [path.parent.name for path in FOLDER.glob("*/__main__.py")]
    return sorted([*modules, *packages])


def main() -> int:
    """Print the names."""
    asked = sys.argv[1:] or names()
    for name in asked:
        if name not in names():
            print(f"no benchmark {name}", file=sys.stderr)
            return 1
    print("\n".join(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
