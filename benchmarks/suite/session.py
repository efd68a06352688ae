"""A model that is trained step by step under one engine, in the process that is measured."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from suite.batches import Batch
from suite.cases import Case
from suite.engines import LEARNING_RATE, Engine
from suite.workloads import make_batches, make_model


class Session:
    """A model and its step under one engine; lives in the process that is measured."""

    def __init__(self, engine: Engine, case: Case, device: str, batch_count: int) -> None:
        import torch

        self.precision = engine.precision or case.precision
        tf32 = self.precision == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        if device == "cuda":
            torch.backends.cudnn.allow_tf32 = tf32
        self.engine, self.case, self.device = engine, case, device
        self.batches: list[Batch] = []
        self.feed(case, batch_count)
        self.model = make_model(case).to(device)
        if engine.change is not None:
            self.model = engine.change(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, fused=engine.fused or None
        )
        self.trainer: Any = None
        self.forward: Callable[..., Any] = self.model
        self.arena_bytes = 0

    def feed(self, case: Case, batch_count: int) -> None:
        """Take this case's batches from now on."""
        self.batches = [
            {name: value.to(self.device) for name, value in batch.items()}
            for batch in make_batches(case, batch_count)
        ]

    def attach(self) -> None:
        """Hand the model to the engine: what this costs belongs to its first step."""
        import torch

        if self.engine.onward:
            import onward

            # A mapping: a version without an option says so in its row of the table.
            options: dict[str, Any] = {"disable": self.engine.disable, "seed": self.engine.seed}
            if self.precision == "bf16":
                options["mixed_precision"] = "bf16"
            self.trainer = onward.Trainer(self.model, self.optimizer, options=options)
        if self.engine.module:
            import onward

            onward.accelerate(self.model, disable=self.engine.disable)
        if self.engine.liger:
            liger = importlib.import_module("liger_kernel.transformers")
            liger._apply_liger_kernel_to_instance(model=self.model)
        if self.engine.compiled:
            torch._dynamo.reset()
            self.forward = torch.compile(self.model, mode=self.engine.mode or None)

    def step(self, batch: Batch) -> Any:
        """One training step; returns the loss, still on its device."""
        import torch

        if self.trainer is not None:
            return self.trainer.train_step(**batch).loss
        if self.engine.mode:
            torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16"):
            output = self.forward(**batch)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def slowest(self, most: int) -> list[dict[str, Any]]:
        """The slowest launches of one more step of Onward's, each with its FLOPs and bytes."""
        import onward
        from suite.arithmetic import op_bytes, op_flops

        found = onward.explain(self.trainer, profile=True).launch_seconds
        pairs = zip(self.trainer.plan.launches, found, strict=True)
        slow = sorted(pairs, key=lambda pair: -pair[1])[:most]
        return [
            {
                "op": x.op, "kernel": x.kernel.name, "module": x.module, "backward": x.backward,
                "seconds": seconds,
                "flops": op_flops(x.op, x.spec.inputs, x.spec.outputs, x.spec.attrs),
                "bytes": op_bytes(x.op, x.spec.inputs, x.spec.outputs, x.spec.attrs),
            }
            for x, seconds in slow
        ]  # fmt: skip

    def sync(self) -> None:
        """Wait for the device."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, start: int, count: int) -> dict[str, Any]:
        """Steps `start` .. `start + count`: the CPU times each, a GPU the whole block."""
        losses, seconds = [], []
        self.sync()
        block = time.perf_counter()
        for batch in self.batches[start : start + count]:
            begin = time.perf_counter()
            losses.append(self.step(batch))
            if self.device == "cpu":
                losses[-1] = float(losses[-1])
                seconds.append(time.perf_counter() - begin)
        self.sync()
        if self.device != "cpu":  # a wait in every step would hide how launches overlap
            seconds = [(time.perf_counter() - block) / count] * count
        return {"seconds": seconds, "losses": [float(loss) for loss in losses]}

    def report(self) -> dict[str, Any]:
        """What the trainer itself says; empty for the other engines."""
        if self.trainer is None and not self.engine.module:
            return {}
        from suite.kernel_table import native_level

        if self.trainer is None:
            from onward.module import accelerated

            held = accelerated(self.model)
            assert held is not None
            said, plan = held.report(), held.plan
        else:
            said, plan = self.trainer.report(), self.trainer.plan
        # A session's arenas are as large as the largest plan that it has run.
        self.arena_bytes = max(self.arena_bytes, plan.arena_bytes)
        return {
            "compile_seconds": said["compile_seconds"],
            "predicted_peak_bytes": said["predicted_peak_bytes"],
            "launches": said["launches"],
            "pass_edits": _edits(said["passes"]),
            "native": native_level(),
            "arena_bytes": self.arena_bytes,
        }


def _edits(passes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Edits by pass; one that is in both lists is summed, as one name switches it off."""
    total: dict[str, int] = {}
    for item in passes:
        total[item["name"]] = total.get(item["name"], 0) + item["edits"]
    return total
