"""All optimizers, as `Optimizer` records, one family per file; new files are found automatically.

`OPTIMIZERS` has them by name; their ops are in the table of all ops.
"""

from __future__ import annotations

from onward.graph.ops import table
from onward.graph.ops.optimizers.record import Optimizer
from onward.graph.registry import enter, files_of, meeting

OPTIMIZERS: dict[str, Optimizer] = {}


def register(optimizer: Optimizer) -> None:
    """Registers an optimizer and its ops. Raises ValueError, with both places, where its name, its
    torch class or an op's name is taken."""
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
