"""hivemind's packages, imported without the rest that ``import hivemind`` loads: its averager, its
optimizer, its experts, and scipy with them.

A daemon uses only hivemind's p2p adapter and its DHT. hivemind's ``__init__`` costs every process
another 0.8 s of processor time and 50 MB. Import this before anything of hivemind.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any


def lay_bare(name: str, needed: Sequence[str] = ()) -> None:
    """Register the package so that its modules can be imported, and its ``__init__`` runs only when
    a name of it is asked for.

    ``needed``: modules of it that are imported now. Where one of them cannot do without the
    ``__init__``, the package is loaded whole, as without this function. Does nothing when the
    package is loaded already, or is not installed.
    """
    spec = None
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    loader = spec.loader

    def wanted(attribute: str) -> Any:
        # what inspectors ask of every module
        if attribute.startswith("__") and attribute != "__version__":
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if (
            part := sys.modules.get(f"{name}.{attribute}")
        ) is not None:  # on its way in, not bound yet
            return part
        del vars(package)["__getattr__"]
        loader.exec_module(package)
        return getattr(package, attribute)

    vars(package)["__getattr__"] = wanted
    sys.modules[name] = package
    try:
        for module in needed:
            importlib.import_module(f"{name}.{module}")
    except (ImportError, AttributeError):
        for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[loaded]
        importlib.import_module(name)


lay_bare("hivemind", ("p2p", "dht.node"))
