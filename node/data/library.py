"""Libraries of the extra ``data``, which are imported when data needs them."""

import importlib
import importlib.util
from typing import Any

from node.core.errors import UsageFault
from node.core.version import extra_command


def library(name: str, what: str) -> Any:
    """A module of the extra ``data``. Raises UsageFault without it, which says that ``what`` needs
    it."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise _not_installed(name, what) from e


def check_installed(name: str, what: str) -> None:
    """Raises UsageFault without this module, which says that ``what`` needs it; imports nothing."""
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # an entry of sys.modules without a specification
        found = None
    if found is None:
        raise _not_installed(name, what)


def _not_installed(name: str, what: str) -> UsageFault:
    return UsageFault(f"{what} needs {name}, which is not installed", extra_command("data"))
