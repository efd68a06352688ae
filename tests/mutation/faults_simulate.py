"""Faults of steps on paper: what the software of a layout costs and holds."""

from __future__ import annotations

from fault import Fault

LAYOUTS = ("simulate/test_software_of_layouts.py",)
MEMORY = ("simulate/test_memory_of_a_rank.py",)

SIMULATE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "simulate: bytes that move beside a product are added to it", "simulate/work.py",
        "max(seconds, moved) if work.beside else seconds + moved", "seconds + moved", LAYOUTS,
    ),
    Fault(
        "simulate: flash attention is as fast for few tokens as for many", "simulate/layer.py",
        "sizes.tokens / (sizes.tokens + _FLASH_HALF)", "1.0", LAYOUTS,
    ),
    Fault(
        "simulate: an input's gradient is waited for before the weight's", "simulate/passes.py",
        'summed = line.collective(kind, nbytes, "tp", line.last)',
        'summed = line.wait(kind, nbytes, "tp")', LAYOUTS,
    ),
    Fault(
        "simulate: a kernel adds what a product has added", "simulate/layer.py",
        "layout.fused_accumulation and layout.zero < 2", "False", LAYOUTS,
    ),
    Fault(
        "simulate: inputs that are kept are gathered again", "simulate/passes.py",
        "gathers = whole and layout.gathers_again", "gathers = whole", LAYOUTS,
    ),
    Fault(
        "simulate: a selective recomputation gathers nothing", "simulate/passes.py",
        "for _ in range(2):", "for _ in range(0):", LAYOUTS,
    ),
    Fault(
        "simulate: weights that are copied are copied in forward alone", "simulate/passes.py",
        "gathered = _weights(line, before, i) if layout.zero == 3 else ()",
        "gathered = _gather(line, before, i) if layout.zero == 3 else ()", LAYOUTS,
    ),
    Fault(
        "simulate: repeated keys are passed as if they were grouped", "simulate/layer.py",
        "model.hidden if layout.repeat_keys else model.kv_width", "model.kv_width", LAYOUTS,
    ),
    Fault(
        "simulate: a ring waits for all keys", "simulate/passes.py",
        "if not sizes.layout.ring or cp == 1:", "if True:", LAYOUTS,
    ),
    Fault(
        "simulate: a ring over many nodes runs on adapters alone", "simulate/passes.py",
        "self.cluster.across if group.in_node == 1 else",
        "self.cluster.across if group.nodes > 1 else", LAYOUTS,
    ),
    Fault(
        "simulate: a collective reads and writes at one adapter's rate", "simulate/passes.py",
        "2 * rate(group, self.cluster)", "2 * link.bandwidth", LAYOUTS,
    ),
    Fault(
        "simulate: fp8 gathers what is not quantized", "simulate/layer.py",
        'return self.hidden_bytes / (2 if self.layout.dtype == "fp8" else 1)',
        "return self.hidden_bytes", LAYOUTS,
    ),
    Fault(
        "simulate: both ends of a model are never whole", "simulate/memory.py",
        "model.embedding_parameters + model.head_parameters if layout.pp == 1 else 0", "0", MEMORY,
    ),
    Fault(
        "simulate: kept inputs are held in parts", "simulate/memory.py",
        "(sequence if layout.gathers_again else 1)", "sequence", LAYOUTS,
    ),
)  # fmt: skip

__all__ = ["SIMULATE_FAULTS"]
