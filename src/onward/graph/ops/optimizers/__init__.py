"""Every optimizer, one `Optimizer` record each, one family per file; a new file is found by itself.

`OPTIMIZERS` holds them by name; the records of their ops stand among all others.
"""

from __future__ import annotations

from onward.graph.ops import table
from onward.graph.ops.optimizers.record import Optimizer
from onward.graph.registry import enter, files_of, meeting

OPTIMIZERS: dict[str, Optimizer] = {}


def register(optimizer: Optimizer) -> None:
    """Enters a record and that of its op. Raises ValueError, with both places, where its name, its
    torch class or the op's name is another's."""
    for held in OPTIMIZERS.values():
        if held.torch == optimizer.torch and held is not optimizer:
            what = f"the optimizer of {optimizer.torch}"
            raise meeting(what, held.description, optimizer.description)
    enter(OPTIMIZERS, "optimizer", optimizer.name, optimizer, lambda x: x.description)
    try:
        for update in optimizer.updates:
            table.register(update)
    except ValueError:
        del OPTIMIZERS[optimizer.name]
        raise


for _module in files_of(__name__, __path__):
    for _optimizer in getattr(_module, "OPTIMIZERS", ()):
        register(_optimizer)

__all__ = ["OPTIMIZERS", "Optimizer", "register"]
