"""Run with TRITON_INTERPRET=1: prints the sum 1 + 2 + ... + 8 of bf16 numbers as Triton's
interpreter computes it, and as it does where they are cast to f32 first."""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _sums(x, plain, cast, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(plain, tl.sum(tl.load(x + i), 0))
    tl.store(cast, tl.sum(tl.load(x + i).to(tl.float32), 0))


def main() -> None:
    x = torch.arange(1, 9).to(torch.bfloat16)
    plain, cast = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    kernel: Any = _sums
    kernel[(1,)](x, plain, cast, SIZE=8)
    print(plain.item(), cast.item())


if __name__ == "__main__":
    main()
