"""The matrix products of one eager PyTorch step, recorded in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from suite.arithmetic import product_flops
from suite.cases import Case
from suite.products import Product
from suite.question import answer
from suite.workloads import make_batches, make_model


def recorded_products(case: Case) -> list[Product]:
    """The products of one eager step of the case, most FLOPs first."""
    aten = torch.ops.aten
    operands = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # place of the left one
    found: dict[Product, int] = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            first = operands.get(func.overloadpacket)
            if first is not None:
                a, b = args[first], args[first + 1]
                product = Product(
                    a.shape[0] if a.dim() == 3 else 1, a.shape[-2], a.shape[-1], b.shape[-1],
                    a.stride(-1) != 1 and a.stride(-2) == 1,
                    b.stride(-1) != 1 and b.stride(-2) == 1,
                )  # fmt: skip
                found[product] = found.get(product, 0) + 1
            return func(*args, **(kwargs or {}))

    model, (batch,) = make_model(case), make_batches(case, 1)
    with Recorder(), sdpa_kernel(SDPBackend.MATH):  # a fused attention would hide its products
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        loss.backward()
    products = [replace(p, count=count) for p, count in found.items()]
    return sorted(products, key=lambda p: -product_flops(p) * p.count)


def _answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    return [asdict(p) for p in recorded_products(Case(**request["case"]))]


if __name__ == "__main__":
    answer(_answer)
