"""Adam and AdamW in one pass, the gradient clipped on the way.

50257 x 512 on 2 threads of an AMD EPYC (AVX-512), 2026-11-21, from `benchmarks/kernels.py`: 12.7
ms, 57 GB/s (torch's fused kernel 12.8), clipped 12.5 (12.8); 512 x 2048, in cache, 0.22 ms (0.25).
With a gradient of f32, bf16 and fp16 1024 x 2048 in 329, 230 and 281 us, 2026-11-24.
"""

from __future__ import annotations

from onward.graph.types import DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, not_f32, not_one_element, where

_HYPER = slice(4, 9)  # f64[], read at each launch:
_HYPER_NAMES = ("lr", "first", "second", "epsilon", "weight_decay")


def _unsupported(spec: KernelSpec) -> str | None:
    if any(t is None or t.dtype != DType.DOUBLE for t in spec.inputs[_HYPER]):
        return "hyperparameters that are not doubles"
    p, g, *others = spec.inputs[:4] + spec.inputs[9:]
    return not_f32((p, *others, *spec.outputs)) or not_one_element((g,))


def _bind_adam(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    p, g, m, v = (args.x(i) for i in range(4))
    scale = args.inputs[10] if len(args.inputs) > 10 else None
    (new_p, new_m, new_v), hyper = args.outputs, zip(_HYPER_NAMES, args.inputs[_HYPER], strict=True)
    return c.launch(
        "onward_adam", p=p, g=g, m=m, v=v, new_p=new_p, new_m=new_m, new_v=new_v, n=p.numel(),
        **dict(hyper), step=args.x(9), scale=scale, decoupled=int(args.attrs["decoupled"]),
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "AdamUpdate": Kernel(
        "native.adam", _bind_adam, unsupported=_unsupported, where=where,
        inplace=((0, 0), (1, 2), (2, 3)), contiguous=None,
    ),
}  # fmt: skip
