"""What a seed means: a mesh, a model, an optimizer, and the shares of a window of micro-batches.

A case is plain values that JSON can hold. `MESHES` draws the axes: a mode of its own is one line
there, and what its ranks have of each tensor is `world.py`'s to say.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Case = dict[str, Any]
Sizes = dict[str, int]
MOST = 16  # ranks


def _replicas(dice: random.Random) -> tuple[Sizes, Case]:
    return {"dp_replicate": dice.randint(2, 8)}, {}


def _shards(dice: random.Random) -> tuple[Sizes, Case]:
    return {"dp_shard": dice.randint(2, 8)}, {"zero": dice.choice([0, 1, 1, 2, 2, 3, 3])}


def _replicas_of_shards(dice: random.Random) -> tuple[Sizes, Case]:
    sizes = {"dp_replicate": dice.randint(2, 4), "dp_shard": dice.randint(2, 4)}
    return sizes, {"zero": dice.choice([0, 1, 2, 3, 3])}


def _tensor(dice: random.Random) -> tuple[Sizes, Case]:
    return {"tp": dice.choice([2, 2, 3, 4, 8])}, _cuts(dice)


def _replicas_of_tensor(dice: random.Random) -> tuple[Sizes, Case]:
    axis = dice.choice(["dp_replicate", "dp_replicate", "dp_shard"])
    return {axis: dice.randint(2, 4), "tp": dice.choice([2, 2, 3, 4])}, _cuts(dice)


def _three_axes(dice: random.Random) -> tuple[Sizes, Case]:
    return {"dp_replicate": 2, "dp_shard": 2, "tp": dice.choice([2, 2, 3, 4])}, _cuts(dice)


def _sequences(dice: random.Random) -> tuple[Sizes, Case]:
    sizes = {"cp": dice.choice([2, 2, 3, 4])}
    if dice.random() < 0.4:
        sizes = {dice.choice(["dp_replicate", "dp_shard"]): 2, **sizes}
    return sizes, {}


def _sequences_and_weights(dice: random.Random) -> tuple[Sizes, Case]:
    sizes = {"cp": dice.choice([2, 2, 3, 4]), "tp": dice.choice([2, 2, 3])}
    if dice.random() < 0.3:
        sizes = {"dp_replicate": 2, "cp": 2, "tp": 2}
    return sizes, _cuts(dice)


def _positions_between_weights(dice: random.Random) -> tuple[Sizes, Case]:
    sizes, more = {"tp": dice.choice([2, 2, 3, 4])}, {"sequence": True, **_cuts(dice)}
    if dice.random() < 0.5:
        sizes = {dice.choice(["dp_replicate", "dp_shard"]): 2, **sizes}
    if "dp_shard" in sizes:
        more["zero"] = dice.choice([0, 1, 2, 3])
    return sizes, more


def _state_beside_others(dice: random.Random) -> tuple[Sizes, Case]:
    """Rows of state where ranks have parts of sequences, of weights, or of both."""
    inner = dice.choice([("cp",), ("cp",), ("tp",), ("cp", "tp"), ("cp", "tp")])
    sizes = {"dp_shard": dice.choice([2, 2, 3]), **dict.fromkeys(inner, 2)}
    if len(inner) == 1 and dice.random() < 0.3:
        sizes = {"dp_replicate": 2, **sizes}
    cuts = _cuts(dice) if "tp" in inner else {}
    return sizes, {"zero": dice.choice([1, 2, 2, 3, 3]), **cuts}


def _layers(dice: random.Random) -> tuple[Sizes, Case]:
    """Pipelines by every schedule, alone and beside each other axis."""
    beside = dice.choice(_BESIDE_LAYERS)
    sizes = {"pp": dice.choice([2, 2, 3, 4]) if len(beside) < 2 else 2, **dict.fromkeys(beside, 2)}
    axes = list(sizes)
    dice.shuffle(axes)
    more: Case = {
        "schedule": dice.choice(SCHEDULES), "micro_batches": dice.choice([1, 2, 2, 3, 4])
    }  # fmt: skip
    if "dp_shard" in sizes:
        more["zero"] = dice.choice([0, 1, 2, 3, 3])
    if "tp" in sizes:
        more |= {**_cuts(dice), "sequence": "cp" not in sizes and dice.random() < 0.3}
    return {axis: sizes[axis] for axis in axes}, more


def _adaptive(dice: random.Random) -> tuple[Sizes, Case]:
    sizes = {"dp_replicate": dice.choice([2, 4, 8])}
    if dice.random() < 0.3:
        sizes["dp_shard"] = 2
    return sizes, {"adasum": True}


def _cuts(dice: random.Random) -> Case:
    """Cuts that the search chooses for slow devices, or any that fit."""
    return {"cuts": dice.choice(["chosen", "drawn", "drawn"])}


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
_BESIDE_LAYERS: tuple[tuple[str, ...], ...] = (
    (), (), ("dp_replicate",), ("dp_shard",), ("dp_shard",), ("tp",), ("cp",), ("cp",),
    ("dp_replicate", "tp"), ("dp_shard", "tp"), ("dp_shard", "cp"), ("cp", "tp"),
)  # fmt: skip
# each draws sizes by axis, the last axis with neighbours, and settings; with its weight
MESHES: tuple[tuple[int, Callable[[random.Random], tuple[Sizes, Case]]], ...] = (
    (3, _replicas),
    (5, _shards),
    (3, _replicas_of_shards),
    (5, _tensor),
    (4, _replicas_of_tensor),
    (1, _three_axes),
    (3, _sequences),
    (4, _sequences_and_weights),
    (5, _state_beside_others),
    (4, _positions_between_weights),
    (8, _layers),
    (3, _adaptive),
)
FAMILIES = ("gpt2", "gpt2", "bert", "t5", "llama")
OPTIMIZERS = (
    "SGD", "SGD", "AdamW", "AdamW", "Adam", "Adamax", "Adagrad", "RMSprop", "NAdam", "RAdam", "Lion"
)  # fmt: skip
_ROWS = (2, 2, 2, 3, 3, 4, 5)
# updates that read all of a parameter: not with zero, nor where ranks share layers and weights
WHOLE_TENSORS = ("LAMB", "Adafactor")


def case_of(seed: int) -> Case:
    """The case of a seed."""
    dice = random.Random(f"mesh {seed}")
    [(_, draw)] = dice.choices(MESHES, [weight for weight, _ in MESHES])
    sizes, settings = draw(dice)
    shares = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    window = dice.choice([1, 1, 1, 2, 3]) if shares <= 8 else 1
    parts = sizes.get("tp" if settings.get("sequence") else "cp", 1)
    least = settings.get("micro_batches", 1)  # a row for each micro-batch of a pipeline
    longest = 7 if parts == 1 else 8 // parts  # positions of a rank
    case: Case = {
        "seed": seed, "sizes": sizes, "zero": 0, "adasum": False, "cuts": "", "sequence": False,
        "schedule": "", "micro_batches": 1, **settings,
        "window": window,
        "rows": [[max(dice.choice(_ROWS), least) for _ in range(shares)] for _ in range(window)],
        "lengths": [
            [parts * dice.randint(min(3, longest), longest) for _ in range(shares)]
            for _ in range(window)
        ],
        "is_program": dice.random() < 0.45,
        "is_packed": dice.random() < 0.4 and parts == 1 and "pp" not in sizes,
        "average": dice.choice(["labels", "labels", "labels", "micro_batches"]),
        "max_grad_norm": dice.choice([None, None, 0.05, 0.5, 100.0]),
        "max_grad_value": None,
        "skip_nonfinite": dice.random() < 0.7,
        "groups": dice.choice([1, 1, 2]),
        "bucket": dice.choice([0, 0, 600, 4000]),  # bytes; 0: as it is
    }  # fmt: skip
    if "pp" in sizes:  # whose loss is the mean over all labels
        case["average"] = "labels"
    if case["max_grad_norm"] is None and dice.random() < 0.3:
        case["max_grad_value"] = dice.choice([1e-4, 1e-2])
    case["optimizer"] = _optimizer(dice, case)
    case["model"] = {} if case["is_program"] else _family(dice)
    return case


def _optimizer(dice: random.Random, case: Case) -> str:
    if case["adasum"]:
        return "SGD"
    is_whole = not case["zero"] and not {"pp", "tp"} <= case["sizes"].keys()
    if is_whole and dice.random() < 0.1:
        return dice.choice(WHOLE_TENSORS)
    return dice.choice(OPTIMIZERS)


def _family(dice: random.Random) -> Case:
    """A tiny transformer: sizes that ranks divide, and such that they do not."""
    heads = dice.choice([1, 2, 3, 4, 4, 6, 8])
    return {
        "kind": dice.choice(FAMILIES), "layers": dice.choice([1, 1, 2]), "heads": heads,
        "width": heads * dice.choice([2, 4]), "vocabulary": dice.choice([96, 97, 64]),
        "dropout": dice.choice([0.0, 0.2, 0.2]), "is_tied": dice.random() < 0.6,
        "is_padded": dice.random() < 0.6, "labelled": dice.choice([0.2, 0.6, 1.0]),
        "frozen": dice.random() < 0.15,
    }  # fmt: skip


__all__ = ["MESHES", "MOST", "SCHEDULES", "Case", "case_of"]
