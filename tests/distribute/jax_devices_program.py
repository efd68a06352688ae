"""Sharded layers by JAX on forced host devices: `python jax_devices_program.py IN.npz OUT.npz`.

The columns of the first weights and the rows of the last lie on the devices, as in Megatron-LM; the
program is written by hand with `jax.shard_map` and one `psum`. It reads weights, inputs and a
cotangent, and writes the output with each device's part of the gradients joined.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

RANKS = 4
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
os.environ["JAX_PLATFORMS"] = "cpu"


def main() -> None:
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax.sharding import NamedSharding  # pyright: ignore[reportMissingImports]
    from jax.sharding import PartitionSpec as P  # pyright: ignore[reportMissingImports]

    given = dict(np.load(sys.argv[1]))
    mesh = jax.make_mesh((RANKS,), ("tp",))
    assert len(jax.devices()) == RANKS

    def mlp(up: Any, down: Any, x: Any) -> Any:
        return jax.lax.psum(jax.nn.gelu(x @ up, approximate=False) @ down, "tp")

    def attention(q: Any, k: Any, v: Any, out: Any, x: Any) -> Any:
        heads = int(given["heads"]) // RANKS

        def split(w: Any) -> Any:  # [B,T,D/N] to [B,H/N,T,K]
            y = x @ w
            return y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2)

        scores = split(q) @ split(k).swapaxes(2, 3) / jnp.sqrt(given["q"].shape[1] / given["heads"])
        seen = jnp.tril(jnp.ones(scores.shape[2:], bool))
        y = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) @ split(v)
        y = y.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        return jax.lax.psum(y @ out, "tp")

    columns, rows, whole = P(None, "tp"), P("tp", None), P()
    layers = {
        "mlp": (mlp, ("up", "down"), (columns, rows)),
        "attention": (attention, ("q", "k", "v", "out"), (columns, columns, columns, rows)),
    }
    made = {}
    for name, (layer, weights, specs) in layers.items():
        run = jax.shard_map(layer, mesh=mesh, in_specs=(*specs, whole), out_specs=whole)
        values = [
            jax.device_put(given[w], NamedSharding(mesh, spec))
            for w, spec in zip((*weights, "x"), (*specs, whole), strict=True)
        ]
        y, back = jax.vjp(jax.jit(run), *values)
        made[name] = np.asarray(y)
        for w, gradient in zip((*weights, "x"), back(jnp.asarray(given["dy"])), strict=True):
            made[f"{name}.{w}"] = np.asarray(gradient)
    np.savez(sys.argv[2], **made)


if __name__ == "__main__":
    main()
