"""The program ``tutti``. A Ctrl-C while the command line is loaded ends it in order, too."""

import sys

from node.core import interrupts


def main() -> int:
    """Run the command that the process was started with; returns the exit code."""
    interrupts.install()
    from cli import main as run

    code = run()
    interrupts.ignore()
    return code


if __name__ == "__main__":
    sys.exit(main())
