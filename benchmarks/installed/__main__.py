"""tutti installed from a wheel, by people's tools: pip, pipx, uv, shells, systemd, an image.

    python -m benchmarks.installed --json -                 # everything; some 15 minutes
    python -m benchmarks.installed --only wheel,service

Parts: `wheel`: a clean clone is built by tools/release.py, a new environment gets torch and the
wheel by pip, and the demo runs to its first committed epoch. `tools`: uv and pipx install the same
wheel by one command. `shells`: completion in bash, zsh and fish. `service`: systemd reads and rates
the unit. `image`: a linter reads the Dockerfile, and its steps run in a new root without an engine
(needs root and debootstrap). `pythons`: the pins resolve for other versions of CPython, and run
where there is one. All need the package index.
"""

import sys

from benchmarks.shared.parts import run_asked

PARTS = {
    "wheel": ("wheel",),
    "tools": ("tools",),
    "shells": ("shells",),
    "service": ("service",),
    "image": ("image",),
    "pythons": ("pythons",),
}
"""Name to modules of this package; each has ``rows(report, root)``."""


def main() -> int:
    """Measure what the command line names; exit 0 when every target holds."""
    return run_asked(__doc__, "benchmarks.installed", PARTS)


if __name__ == "__main__":
    sys.exit(main())
