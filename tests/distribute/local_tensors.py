"""A program: the collectives of four ranks by torch's LocalTensor, and redistributions of DTensors.

python local_tensors.py GIVEN.npz MADE.npz
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def main(given: str, into: str) -> None:
    xs = [torch.from_numpy(x) for x in np.load(given).values()]
    ranks = len(xs)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    made: dict[str, np.ndarray] = {}

    def note(name: str, found: torch.Tensor) -> None:
        assert isinstance(found, LocalTensor)
        for rank, tensor in found._local_tensors.items():
            made[f"{name}.{rank}"] = tensor.detach().clone().numpy()

    def local() -> torch.Tensor:
        return LocalTensor({rank: x.clone() for rank, x in enumerate(xs)})

    with LocalTensorMode(ranks):
        for name, by in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
            tensor = local()
            dist.all_reduce(tensor, by)
            note(name, tensor)
        tensor = local()
        dist.broadcast(tensor, src=1)
        note("sent", tensor)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))

        def moved(source: Partial | Shard, target: Replicate | Shard) -> torch.Tensor:
            tensor = DTensor.from_local(local(), mesh, [source], run_check=False)
            return tensor.redistribute(mesh, [target]).to_local()

        note("scattered", moved(Partial(), Shard(0)))
        note("gathered", moved(Shard(0), Replicate()))
        note("mean", moved(Partial("avg"), Replicate()))
    dist.destroy_process_group()
    np.savez(into, **made)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
