"""Fault: one to plant in the sources, and the tests that must find it.

A fault replaces a text that occurs exactly once in its file (below `src/onward`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """In `file`, `old` becomes `new`; `tests`, files below `tests` or single ones, fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


RULES = ("differentiate/test_walk.py", "differentiate/test_rules.py")
CALLS = ("kernels/test_native_calls.py",)
KERNELS = ("kernels/test_kernels.py", "kernels/test_vectorised.py", "kernels/test_norm.py")
NODES = ("nodes/test_nodes.py",)
TORCH_FORMS = ("nodes/test_torch_forms.py",)
PLAN = ("plan",)
ROWS = ("rewrite/test_rows.py", "rewrite/test_rows_sets.py", "models/test_row_programs.py")
CAPTURE = (
    "capture/test_capture_ops.py",
    "capture/test_capture_numbers.py",
    "capture",
)  # the likeliest first
CONVOLUTIONS = ("capture/test_capture_convolutions.py",)
STATE = (
    "train/test_trainer_state.py",
    "train/test_trainer_api.py",
    "train/test_late_parameters.py",
    "train/test_optimizer_state.py",
    "train/test_saved_state.py",
    "train/test_come_and_go.py",
)

GUARDS = ("train/test_stale_graphs.py", "train/test_trainer_guards.py")
EFFECTS = ("capture/test_effects.py",)
RANDOM = ("capture/test_capture_random.py", "capture/test_aten_table.py")
CACHE_POSITION = ("capture/test_cache_position.py",)
SAME_TENSOR = ("capture/test_same_tensor.py",)
IN_PLACE = ("capture/test_in_place.py",)
OWN_GRADIENTS = ("capture/test_own_gradients.py",)
ONE_ROW = ("models/test_one_row.py",)
BIASED = ("models/test_trained_bias.py", "capture/test_attention_by_hand.py")
BY_HAND = ("capture/test_attention_by_hand.py",)
EINSUM = ("capture/test_einsum.py",)
SLICES = ("capture/test_slice_bounds.py",)
CHOSEN = ("capture/test_chosen_rows.py",)
INDEXING = ("capture/test_capture_indexing.py",)
FORMS = ("capture/test_capture_forms.py",)
KINKS = ("capture/test_kinks.py",)
CTC = ("capture/test_ctc.py", "graph/test_ops.py", "kernels/test_kernels.py")
RECURRENT = ("capture/test_recurrent.py",)
RECURRENT_STEPS = ("graph/test_ops.py", "kernels/test_kernels.py")
SPECIAL = ("capture/test_special.py",)
CORE = ("capture/test_core_ops.py",)
BUFFERS = ("train/test_buffer_updates.py",)
AS_EAGER = ("capture/test_as_eager.py",)
PATCHES = ("capture/test_patches.py",)
HOOKS = ("train/test_refused_hooks.py",)
STEPS = ("train/test_whole_steps.py",)
TARGET = ("kernels/test_target.py",)
