"""Adam and AdamW in one pass, the gradient clipped on the way.

50257 x 512 on 2 threads of an AMD EPYC (AVX-512), 2026-11-21, from `benchmarks/kernels.py`: 12.7
ms, 57 GB/s (torch's fused kernel 12.8), clipped 12.5 (12.8); 512 x 2048, in cache, 0.22 ms (0.25).
"""

from __future__ import annotations

from onward.kernels.kernel import Kernel, Launch, Use
from onward.kernels.native.library import library, only_f32, where


def _bind_adam(use: Use) -> Launch:
    c = library()
    assert c is not None
    p, g, m, v, lr, step = (use.x(i) for i in range(6))
    scale = use.inputs[6] if len(use.inputs) > 6 else None
    a = use.attrs
    rates = [float(a[name]) for name in ("beta1", "beta2", "eps", "weight_decay")]
    return c.launch(
        "onward_adam", p, g, m, v, *use.outputs, p.numel(), lr, step, scale, rates,
        int(a["decoupled"]),
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "AdamUpdate": Kernel(
        "native.adam", _bind_adam, why_not=only_f32, where=where,
        inplace=((0, 0), (1, 2), (2, 3)), contiguous=None,
    ),
}  # fmt: skip
