"""Whether gradients are finite, by the exponents of their numbers.

A step waits for it between its gradients and its updates. It reads each gradient once, at the speed
of memory, and none where their norm is known and finite.
"""

from __future__ import annotations

from onward.kernels.kernel import Kernel, KernelArguments, Launch
from onward.kernels.native.library import floats_are_f32, library, where


def _bind(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    norm, *gradients = args.inputs
    given = [g for g in gradients if g is not None]
    addresses, sizes = [g.data_ptr() for g in given], [g.numel() for g in given]
    return c.launch(
        "onward_all_finite", addresses=addresses, sizes=sizes, count=len(given), norm=norm, y=args.y
    )


KERNELS: dict[str, Kernel] = {
    "AllFinite": Kernel(
        "native.all_finite", _bind, unsupported=floats_are_f32, where=where, contiguous=None
    ),
}  # fmt: skip
