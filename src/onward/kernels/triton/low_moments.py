"""Adam and AdamW of all parameters in one launch, with moments in bf16 or in codes of 8 bits.

Bytes per parameter with a gradient of bf16: 18 with moments of bf16 and 14 with codes, where the
operators of a chunk move more than 100.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from onward.graph.ops.optimizers.quantization import SIGNED, UNSIGNED
from onward.graph.types import LOW, DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.multi_tensor import by_kind, tables
from onward.kernels.triton.supported import where
from onward.kernels.triton.update import numbers

_SIZE = 2048  # elements of a block: rows of the generator, and blocks of codes
_HYPER = 6  # lr, beta1, beta2, eps, weight decay, the update's number


@dataclass(frozen=True)
class _Form:
    """The layout of an op's inputs. types: of p and the moments that follow g. drawn: whether a
    seed follows the hyperparameters."""

    types: tuple[DType, ...]
    drawn: bool

    @property
    def hyper(self) -> range:
        start = len(self.types) + 1
        return range(start, start + _HYPER)

    def scale(self, args: KernelArguments) -> torch.Tensor | None:
        place = self.hyper.stop + self.drawn
        return args.inputs[place] if place < len(args.inputs) else None

    def unsupported(self, spec: KernelSpec) -> str | None:
        own = (spec.inputs[0], *spec.inputs[2 : len(self.types) + 1])
        for x, wanted in zip(own, self.types, strict=True):
            if x is None or x.dtype != wanted:
                return f"parameters or moments of {'none' if x is None else x.dtype.name.lower()}"
        g = spec.inputs[1]
        assert g is not None
        return None if g.dtype in (DType.FLOAT, *LOW) else f"a gradient of {g.dtype.name.lower()}"


_BF16 = _Form((DType.FLOAT, DType.BFLOAT16, DType.BFLOAT16), drawn=True)
_CODED = (DType.UINT8, DType.FLOAT)
_8BIT = _Form((DType.FLOAT, *_CODED, *_CODED), drawn=False)


@cache
def _maps(device: torch.device) -> torch.Tensor:
    """Builds the tables of 8-bit codes as one f32[592]: the numbers by code, signed and unsigned,
    then the levels of both, between which a number is rounded to a code."""
    parts = [getattr(m, name).ravel() for name in ("values", "levels") for m in (SIGNED, UNSIGNED)]
    return torch.from_numpy(np.concatenate(parts)).to(device)


def _together(calls: Sequence[KernelArguments], form: _Form) -> Launch:
    """Binds updates as one launch for each dtype of gradients and set of hyperparameters."""

    def kind(call: KernelArguments) -> Hashable:
        shared = call.inputs[form.hyper.start :]  # a seed and a scale among them
        pointers = tuple(None if x is None else x.data_ptr() for x in shared)
        return (call.x(1).dtype, call.attrs["decoupled"], pointers)

    return by_kind([c for c in calls if c.y.numel()], kind, partial(_launch, form=form))


def _launch(calls: Sequence[KernelArguments], form: _Form) -> Launch:
    from onward.kernels.triton import low_moments_device as device
    from onward.kernels.triton.multi_tensor_device import ELEMENTS

    first, moments = calls[0], len(form.types) + 1
    rows: list[list[torch.Tensor | int | None]] = [
        [*c.inputs[:moments], *c.outputs,
         *([int(c.attrs["site"]), int(c.attrs.get("first", 0))] if form.drawn else [])]
        for c in calls
    ]  # fmt: skip
    table, blocks, aligned = tables(rows, _SIZE)
    hyper, scale = [first.x(i) for i in form.hyper], form.scale(first)
    decoupled = bool(first.attrs["decoupled"])
    flags = {
        "DECOUPLED": decoupled, "HAS_SCALE": scale is not None, "ALIGNED": aligned,
        "GRADIENT": ELEMENTS[first.x(1).dtype], "SIZE": _SIZE, "num_warps": 8,
    }  # fmt: skip
    kernel: Any = device.adam_bf16 if form.drawn else device.adam_8bit
    other = first.x(form.hyper.stop) if form.drawn else _maps(first.y.device)

    def launch() -> None:
        kernel[(len(blocks),)](
            table, blocks, table if scale is None else scale, other, *numbers(hyper, decoupled),
            **flags,
        )  # fmt: skip

    return launch


def _kernel(name: str, form: _Form, inplace: tuple[tuple[int, int], ...]) -> Kernel:
    together: Callable[[Sequence[KernelArguments]], Launch] = partial(_together, form=form)
    return Kernel(
        f"triton.{name}", lambda args: together([args]), unsupported=form.unsupported, where=where,
        inplace=inplace, contiguous=None, host=tuple(form.hyper), together=together,
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "AdamUpdateBf16": _kernel("adam_bf16", _BF16, ((0, 0), (1, 2), (2, 3))),
    "AdamUpdate8Bit": _kernel("adam_8bit", _8BIT, ((0, 0), (1, 2), (2, 3), (3, 4), (4, 5))),
}
