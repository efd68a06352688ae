"""LinearCrossEntropy in bf16 and fp16 with widened products (low_product.py), on processors without
instructions for products of these types."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from onward.graph.types import DType, Type
from onward.kernels.aten.linear_cross_entropy import no_such_class
from onward.kernels.blas.low_product import low_product, low_scratch, widens
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native import cross_entropy as native


def _scratch(spec: KernelSpec) -> list[Type]:
    """The scratch of the native kernel, and that of the largest of its products."""
    own = native.scratch(spec)
    rows, classes = own[0].shape
    panel, features = own[1].shape
    assert all(isinstance(n, int) for n in (rows, classes, panel, features))
    logits = low_scratch(rows, classes, features)  # type: ignore[arg-type]
    dx = low_scratch(rows, features, classes)  # type: ignore[arg-type]
    dw = low_scratch(panel, features, rows)  # type: ignore[arg-type]
    largest = max((logits, dx, dw), key=lambda found: found[0].shape[0])  # type: ignore[arg-type, return-value]
    return [*own, *largest]


def _bind(op: str, args: KernelArguments) -> Launch:
    def multiply(a: Tensor, b: Tensor, y: Tensor) -> Launch:
        made = low_product(a, b, y, args.scratch[6:])
        assert made is not None, "blocks of rows and of columns have strides of a BLAS"
        return made

    return native.bind(op, args, multiply)


def _unsupported(dtype: DType, spec: KernelSpec) -> str | None:
    x, _ = native.head_sizes(spec)
    return f"x is not {dtype.name.lower()}" if x.dtype != dtype else native.unsupported(spec)


KERNELS: dict[str, tuple[Kernel, ...]] = {
    op: tuple(
        Kernel(
            f"blas.{name}_linear_cross_entropy", partial(_bind, op), contiguous=None,
            where=partial(widens, dtype), unsupported=partial(_unsupported, dtype),
            scratch=_scratch, workspace=native.workspace, input_error=partial(no_such_class, op),
        )
        for name, dtype in (("bf16", DType.BFLOAT16), ("fp16", DType.FLOAT16))
    )
    for op in ("LinearCrossEntropy", "LinearCrossEntropyGrad", "LinearCrossEntropyStep")
}  # fmt: skip
