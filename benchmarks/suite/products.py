"""A matrix product by its sizes and layout. Without torch: two ways to time one need none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """`f32[batch,m,k] @ f32[batch,k,n]`, `count` times in a step; how its operands lie in memory.

    transposed_a: the left operand is stored as `[k,m]`; transposed_b: the right one as `[n,k]`.
    """

    batch: int
    m: int
    k: int
    n: int
    transposed_a: bool
    transposed_b: bool
    count: int = 1

    def __str__(self) -> str:
        a = f"[{self.k},{self.m}]^T" if self.transposed_a else f"[{self.m},{self.k}]"
        b = f"[{self.n},{self.k}]^T" if self.transposed_b else f"[{self.k},{self.n}]"
        return f"{self.batch} x {a} @ {b}" if self.batch > 1 else f"{a} @ {b}"
