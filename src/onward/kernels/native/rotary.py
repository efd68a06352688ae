"""Rotary position embedding and its gradient, on strided heads.

4 x 8 x 256 x 64 in f32, bf16 and fp16 on 2 threads of an AMD EPYC (AVX-512), 2026-11-24: 32, 37 and
108 us.
"""

from __future__ import annotations

from onward.graph.types import DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.layouts import layouts, more_dims, of_four_dims
from onward.kernels.native.library import library, not_one_element, where


def _unsupported(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: tensors must have one type, except that angles may be f32 for rows of
    less."""
    x, cos, sin = spec.inputs
    rows = not_one_element((x, *spec.outputs))
    low = x is not None and x.is_low
    return more_dims(spec) or rows or not_one_element((x, cos, sin), (DType.FLOAT,) if low else ())


def _bind(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    x, y = of_four_dims(args.x(0)), of_four_dims(args.y)
    turns = args.x(1).shape[-1]
    shape = (*x.shape[:3], turns)
    cos, sin = (of_four_dims(args.x(i)).expand(shape) for i in (1, 2))
    return c.launch(
        "onward_rotary", **layouts(x=x, cos=cos, sin=sin, y=y), sizes=x.shape, turns=turns,
        interleaved=int(args.attrs.get("interleaved", 0)),
        transposed=int(args.attrs.get("transposed", 0)),
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "Rotary": Kernel(
        "native.rotary",
        _bind,
        unsupported=_unsupported,
        where=where,
        inplace=((0, 0),),
        strided=(0,),
    ),
}
