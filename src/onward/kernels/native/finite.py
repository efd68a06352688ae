"""Tests whether gradients are finite, by the exponents of their numbers.

A step waits for the result between gradients and updates. Each gradient is read once, at memory
speed, and none if their norm is known and finite. 1024 x 2048 on 2 threads of an AMD EPYC
(AVX-512), 2026-11-24: 42 us in f32, 21 in bf16 and fp16.
"""

from __future__ import annotations

from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, not_one_element, where
from onward.kernels.native.signatures import ELEMENTS


def _bind(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    norm, *gradients = args.inputs
    given = [g for g in gradients if g is not None]
    return c.launch(
        "onward_all_finite", addresses=[g.data_ptr() for g in given],
        elements=[ELEMENTS[g.dtype] for g in given], sizes=[g.numel() for g in given],
        count=len(given), norm=norm, y=args.y,
    )  # fmt: skip


def _unsupported(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported` of the test, checked for each gradient."""
    return next((why for t in spec.inputs if (why := not_one_element((t,)))), None)


KERNELS: dict[str, Kernel] = {
    "AllFinite": Kernel(
        "native.all_finite", _bind, unsupported=_unsupported, where=where, contiguous=None
    ),
}  # fmt: skip
