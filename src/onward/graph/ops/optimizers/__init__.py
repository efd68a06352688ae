"""Every optimizer, one `Optimizer` record each, one family per file; a new file is found by itself.

`OPTIMIZERS` holds them by name, and `UPDATES` the records of their ops.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from onward.graph.ops.optimizers.record import Optimizer
from onward.graph.ops.record import Op

OPTIMIZERS: dict[str, Optimizer] = {}
UPDATES: dict[str, Op] = {}


def register(optimizer: Optimizer) -> None:
    """Enters a record. Raises ValueError where its name, or that of its op, is another's."""
    known = UPDATES.get(optimizer.update.name, optimizer.update)
    if optimizer.name in OPTIMIZERS or known is not optimizer.update:
        raise ValueError(f"an optimizer '{optimizer.name}', or its op, is there already")
    OPTIMIZERS[optimizer.name] = optimizer
    UPDATES[optimizer.update.name] = optimizer.update


for _file in pkgutil.iter_modules(__path__):
    _module = import_module(f"{__name__}.{_file.name}")
    for _optimizer in getattr(_module, "OPTIMIZERS", ()):
        register(_optimizer)

__all__ = ["OPTIMIZERS", "UPDATES", "Optimizer", "register"]
