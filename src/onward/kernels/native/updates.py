"""Updates of the optimizers besides Adam in one pass over memory, including gradient clipping.

A row names a C function, whose parameters are called as the optimizer's slots and hyperparameters
are, and the op's attributes that it takes. LAMB reads its moments twice, since its step needs two
norms first.
"""

from __future__ import annotations

from functools import partial

import torch

from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.types import DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, not_f32, not_one_element, where

# optimizer -> (C function, attributes that it takes)
_ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "SGD": ("onward_sgd", ("nesterov",)),
    "Lion": ("onward_lion", ()),
    "RMSprop": ("onward_rmsprop", ()),
    "Adagrad": ("onward_adagrad", ()),
    "Adamax": ("onward_adamax", ()),
    "NAdam": ("onward_nadam", ("decoupled",)),
    "RAdam": ("onward_radam", ("decoupled",)),
    "LAMB": ("onward_lamb", ("adapt", "bias_correction")),
}


# where a slot is absent, those behind it are earlier among the outputs than among the inputs:
# without momentum, the average of gradients is the output 2
_SHIFTED = {"RMSprop": ((2, 4),)}


def _unsupported(spec: KernelSpec, first: int, scalars: int) -> str | None:
    """The reason why a call is not an f32 update with a gradient of any supported dtype; None where
    it is. first: position of the first hyperparameter."""
    hyper = range(first, first + scalars)
    if any(spec.inputs[i] is None or spec.inputs[i].dtype != DType.DOUBLE for i in hyper):  # type: ignore[union-attr]
        return "hyperparameters that are not doubles"
    given = [t for i, t in enumerate(spec.inputs) if i != 1 and i not in hyper]
    return not_f32((*given, *spec.outputs)) or not_one_element(spec.inputs[1:2])


def _bind(args: KernelArguments, optimizer: str) -> Launch:
    c, (function, attributes) = library(), _ROWS[optimizer]
    assert c is not None
    record = OPTIMIZERS[optimizer]
    first = 2 + len(record.slots)
    step = first + len(record.hyperparameters)
    kept = dict(zip(record.slots, args.inputs[2:first], strict=True))
    moved = [f"new_{slot}" for slot, tensor in kept.items() if tensor is not None]
    made: dict[str, torch.Tensor | None] = {f"new_{slot}": None for slot in kept}
    made |= dict(zip(("new_p", *moved), args.outputs, strict=True))
    hyper = dict(zip(record.hyperparameters, args.inputs[first:step], strict=True))
    scale = args.inputs[step + 1] if len(args.inputs) > step + 1 else None
    return c.launch(
        function, p=args.x(0), g=args.x(1), n=args.x(0).numel(), step=args.x(step), scale=scale,
        **kept, **made, **hyper, **{name: int(args.attrs[name]) for name in attributes},
    )  # fmt: skip


def _kernel(optimizer: str) -> Kernel:
    record = OPTIMIZERS[optimizer]
    slots, scalars = len(record.slots), len(record.hyperparameters)
    return Kernel(
        f"native.{_ROWS[optimizer][0].removeprefix('onward_')}",
        partial(_bind, optimizer=optimizer),
        unsupported=partial(_unsupported, first=2 + slots, scalars=scalars),
        where=where,
        inplace=((0, 0), *((i, i + 1) for i in range(1, slots + 1)), *_SHIFTED.get(optimizer, ())),
        contiguous=None,
    )


KERNELS: dict[str, Kernel] = {OPTIMIZERS[name].update.name: _kernel(name) for name in _ROWS}
