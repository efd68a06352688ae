"""Conflicts of options: those of a Trainer or a module that do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.errors import OnwardError
from onward.mesh_sizes import check_pipeline, check_positions, check_sharing


def check_recompute(recompute: str, budget: object) -> None:
    """Raises OnwardError for a memory budget beside a fixed choice of what is recomputed."""
    if recompute != "auto" and budget is not None:
        raise OnwardError(
            f"recompute={recompute!r} and memory_budget are two ways to say what is recomputed; "
            "fix: leave one of them out"
        )


def check_together(options: Mapping[str, Any]) -> None:
    """Raises OnwardError for options of a Trainer, by name and as they were read, that contradict
    one another or that are not there together yet."""
    check_recompute(options["recompute"], options["memory_budget"])
    if options["max_grad_norm"] is not None and options["max_grad_value"] is not None:
        raise OnwardError(
            "max_grad_norm and max_grad_value are two ways to clip the same gradients; fix: "
            "leave one of them out"
        )
    if (options["offload_optimizer"] == "disk") != (options["offload_dir"] is not None):
        raise OnwardError(
            'offload_optimizer="disk" and offload_dir go together: the one asks for files, the '
            "other says where; fix: give both, or leave both out"
        )
    mesh, average = options["mesh"], options["gradient_accumulation_average"]
    check_sharing(mesh, options["zero"], options["adasum"])
    check_pipeline(mesh, options)
    if options["sequence_parallel"]:
        check_positions(mesh)
    if options["auto_micro_batch"] and average == "micro_batches":
        raise OnwardError(
            "auto_micro_batch adds up the parts of a batch by their labels, which "
            'gradient_accumulation_average="micro_batches" does not count; fix: leave one of '
            "them out"
        )


__all__ = ["check_recompute", "check_together"]
