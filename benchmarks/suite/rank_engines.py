"""Steps of one model on several ranks over Gloo, by an engine; run in a process for each rank.

The last answer has the seconds of every timed step, memory in bytes, the loss of each step (the
mean of the ranks'), and the bytes that the machine's loopback device carried for one step of all
ranks. Steps of a narrow model of as many layers come first: what the engine's modules, its graphs,
its compiler and torch hold from then on is `runtime_bytes`, which `peak_bytes` leaves out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from transformers import GPT2Config, GPT2LMHeadModel

import onward
from suite.memory import Memory
from suite.question import answer
from suite.twin_bert import TINY as TINY_TWINS
from suite.twin_bert import twin_batch, twin_bert

Batch = Mapping[str, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]
RATE = 1e-3
TINY = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 32}


def gpt2(size: Mapping[str, int]) -> nn.Module:
    torch.manual_seed(0)
    dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**size, **dropout, use_cache=False)
    return GPT2LMHeadModel(config).train()


def _loss(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def gpt2_batch(
    size: Mapping[str, int], rows: int, length: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Random tokens, each of which is a label."""
    ids = torch.randint(size["vocab_size"], (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        loss = _loss(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def _ddp(model: nn.Module) -> Step:
    """DistributedDataParallel, whose gradients are views of its buckets."""
    shared = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _by_hand(shared, _adamw(model.parameters()))


def _zero_optimizer(model: nn.Module) -> Step:
    """DistributedDataParallel with torch's ZeroRedundancyOptimizer: whole parameters by rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    shared = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    made = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE, fused=True)
    return _by_hand(shared, made)


def _fsdp2(model: nn.Module) -> Step:
    """fully_shard of each block and of the whole: weights, gradients and moments are cut."""
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    return _by_hand(model, _adamw(model.parameters()))


def _onward(model: nn.Module, **options: Any) -> Step:
    optimizer = onward.optim.AdamW(lr=RATE)
    trainer = onward.Trainer(model, optimizer, options=options)
    return lambda batch: trainer.train_step(batch).loss


def _mesh(axis: str) -> dict[str, int]:
    return {axis: distributed.get_world_size()}


def _mode(axis: str, zero: int = 0) -> Callable[[nn.Module], Step]:
    return lambda model: _onward(model, mesh=_mesh(axis), zero=zero)


def _deepspeed(stage: int) -> Callable[[nn.Module], Step]:
    """DeepSpeed's ZeRO of a stage around the fused AdamW, fp32, on its accelerator of CPUs."""

    def made(model: nn.Module) -> Step:
        deepspeed = import_module("deepspeed")
        # DeepSpeed would compile exchanges in shared memory first; all engines here have Gloo's
        compiled = deepspeed.ops.__compatible_ops__
        compiled.update(dict.fromkeys(compiled, False))
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # what a rank has; losses are means by rank
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=_adamw(model.parameters()), config=settings,
            dist_init_required=False,
        )  # fmt: skip

        def step(batch: Batch) -> torch.Tensor:
            loss = _loss(engine(**batch))
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return made


# Onward's: axis of the mesh, stage of ZeRO
MODES: dict[str, tuple[str, int]] = {
    "onward": ("dp_replicate", 0),
    "onward-zero": ("dp_shard", 1),
    "onward-zero2": ("dp_shard", 2),
    "onward-zero3": ("dp_shard", 3),
    "onward-tp": ("tp", 0),
    "onward-pp": ("pp", 0),
}
ENGINES: dict[str, Callable[[nn.Module], Step]] = {
    "ddp": _ddp,
    "ddp-zero": _zero_optimizer,
    "fsdp2": _fsdp2,
    **{f"deepspeed-{stage}": _deepspeed(stage) for stage in (1, 2, 3)},
    "onward-deepspeed-1": lambda model: _deepspeed(1)(onward.accelerate(model)),
    **{name: _mode(*mode) for name, mode in MODES.items()},
}


ONE_BATCH = ("tp", "pp")  # axes along which ranks have the batch of all
# by model: how it is made, batches of it, sizes of a narrow one
MODELS: dict[str, tuple[Any, Any, Mapping[str, int]]] = {
    "gpt2": (gpt2, gpt2_batch, TINY),
    "twin bert": (twin_bert, twin_batch, TINY_TWINS),
}


def carried() -> int:
    """Bytes that the loopback device has carried."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the steps of one rank."""
    rank, ranks, rows = request["rank"], request["ranks"], request["rows"]
    torch.set_num_threads(request["threads"])
    place = f"file://{request['folder']}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
    memory = Memory("cpu")
    start = memory.now()
    generator = torch.Generator().manual_seed(1)
    axis, _ = MODES.get(request["engine"], ("", 0))
    is_one_batch = axis in ONE_BATCH

    make, batch_of, tiny = MODELS[request["model"]]

    def batch(size: Mapping[str, int], length: int) -> Batch:
        whole = batch_of(size, rows * ranks, length, generator)
        own = slice(rank * rows, (rank + 1) * rows)
        return whole if is_one_batch else {n: x[own].contiguous() for n, x in whole.items()}

    def trained(model: nn.Module, size: Mapping[str, int], steps: int, length: int) -> Step:
        step = ENGINES[request["engine"]](model)
        losses.extend(step(batch(size, length)) for _ in range(steps))
        return step

    losses: list[torch.Tensor] = []
    layers = {name: n for name, n in request["size"].items() if "layer" in name}
    narrow = {**tiny, **layers}
    trained(make(narrow), narrow, 2, 8)
    losses.clear()
    before = memory.now()
    step = trained(make(request["size"]), request["size"], request["warmup"], request["length"])
    memory.reset_peak()
    distributed.barrier()
    carried_before, seconds = carried(), list[float]()
    for _ in range(request["steps"]):
        given = batch(request["size"], request["length"])
        distributed.barrier()
        began = time.perf_counter()
        losses.append(step(given))
        distributed.barrier()
        seconds.append(time.perf_counter() - began)
    sent = carried() - carried_before
    mean = torch.stack([loss.double() for loss in losses])
    distributed.all_reduce(mean)
    return {
        "seconds": seconds,
        "losses": (mean / ranks).tolist(),
        "peak_bytes": memory.peak() - before,
        "runtime_bytes": before - start,
        "carried_bytes": sent // request["steps"],
    }


if __name__ == "__main__":
    answer(run)
