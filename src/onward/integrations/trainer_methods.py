"""Overridden methods of transformers' Trainer, and callback events: how each is treated.

Honoured methods are called by transformers' own loop around the step, as always. Served methods are
called between forward, backward and update, where a whole-step graph has nothing to show. A run
with a served override works differently: forward and backward run as graphs (`onward.accelerate`),
the rest of the step is transformers' own code, and gradients are in `p.grad`. Names are of
transformers 4.57 and 5.x.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

HONOURED = "honoured"
OWN = ("transformers", "onward", "accelerate")  # packages whose own methods are not overrides

# name -> the reason why gradients must be visible
SERVED_METHODS: dict[str, str] = {
    "training_step": "it makes a micro-batch's gradients",
    "compute_loss": "it makes the loss",
    "compute_loss_context_manager": "the model and its loss are called within it",
    "autocast_smart_context_manager": "the model and its loss are called within it",
    "_clip_grad_norm": "it reads and scales gradients",
    "_get_grad_norm": "it reads gradients",
    "_mixed_mesh_grad_norm": "it reads and scales gradients",
    "_has_mixed_mesh_grads": "it reads gradients",
    "_prepare_context_parallel_inputs": "it is called within a step",
    "_inner_training_loop": "a loop of one's own may read gradients anywhere",
    "_run_epoch": "a loop of one's own may read gradients anywhere",
}
SERVED_EVENTS: dict[str, str] = {
    "on_pre_optimizer_step": "gradients are clipped, the update has not been made",
    "on_optimizer_step": "gradients are those of the update that was made",
    "on_substep_end": "gradients are those of a part of the window",
}
_HONOURED_METHODS = """
    add_callback call_model_init compare_trainer_and_checkpoint_args
    create_accelerator_and_postprocess create_model_card create_optimizer
    create_optimizer_and_scheduler create_scheduler end evaluate evaluation_loop
    floating_point_ops get_batch_samples get_cp_size get_decay_parameter_names
    get_eval_dataloader get_learning_rates get_num_trainable_parameters
    get_optimizer_cls_and_kwargs get_optimizer_group get_sp_size get_test_dataloader
    get_total_train_batch_size get_tp_size get_train_dataloader hyperparameter_search
    init_hf_repo is_local_process_zero is_world_process_zero load_generation_config log
    log_metrics metrics_format num_examples num_tokens pop_callback predict prediction_loop
    prediction_step propagate_args_to_deepspeed push_to_hub remove_callback save_metrics
    save_model save_state set_initial_training_values store_flos tokenizer
    torch_jit_model_eval train
    _activate_neftune _add_sm_patterns_to_gitignore _align_special_tokens
    _build_accelerator_args _deactivate_neftune _defer_fsdp_gradient_reduction
    _determine_best_metric _evaluate _finalize_training _finish_current_push
    _fsdp_qlora_plugin_updates _gather_and_numpify _get_collator_with_removed_columns
    _get_dataloader _get_eval_sampler _get_learning_rate _get_num_items_in_batch
    _get_output_dir _get_train_sampler _hp_search_setup _init_training_state
    _is_attention_mask_causal _issue_warnings_after_load _load_best_model
    _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state
    _load_scaler _maybe_log_save_evaluate _move_model_to_device _nested_gather
    _pad_tensors_to_max_len _prepare_for_training _prepare_input _prepare_inputs
    _push_from_checkpoint _remove_unused_columns _report_to_hp_search _rotate_checkpoints
    _save _save_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler
    _save_tpu _set_signature_columns_if_needed _sorted_checkpoints
    _sync_replicated_trainable_parameters _track_num_input_tokens _tune_save_checkpoint
    _update_auto_batch_size _validate_args _wrap_model
"""
_HONOURED_EVENTS = """
    on_epoch_begin on_epoch_end on_evaluate on_init_end on_log on_predict on_prediction_step
    on_push_begin on_save on_step_begin on_step_end on_train_begin on_train_end
"""

METHODS: dict[str, str] = dict.fromkeys(_HONOURED_METHODS.split(), HONOURED) | SERVED_METHODS
EVENTS: dict[str, str] = dict.fromkeys(_HONOURED_EVENTS.split(), HONOURED) | SERVED_EVENTS
# methods of an Accelerator that a whole-step graph does not call, so that a replacement has no
# effect
ACCELERATOR: dict[str, str] = {
    "backward": "its gradients are the graph's",
    "clip_grad_norm_": "clipping is in the graph",
}


def overridden(trainer: object) -> str | None:
    """The first served method that is overridden on the trainer, in its class or by a patch of
    transformers' classes; None where there is none."""
    return _foreign(trainer, SERVED_METHODS)


def heard(callback: object) -> str | None:
    """The first served event that the callback handles in code of its own. transformers' own
    callbacks read no gradients: the one with `on_pre_optimizer_step` saves a checkpoint."""
    return _foreign(callback, SERVED_EVENTS)


def replaced(accelerator: object) -> str | None:
    """The first method of an Accelerator that a whole-step graph does not call and that has been
    replaced."""
    return _foreign(accelerator, ACCELERATOR)


def _foreign(of: object, names: Mapping[str, str]) -> str | None:
    """The first of the names whose code is not the packages' own, as `Owner.name`."""
    held = getattr(of, "__dict__", {})
    kind = type(of)
    for name in names:
        if name in held and not _is_own(held[name]):
            return f"{kind.__name__}.{name}"
    found = _of_class(kind, tuple((name, getattr(kind, name, None)) for name in names))
    return next((f"{owner}.{name}" for owner, name in found if name not in held), None)


@lru_cache(maxsize=64)  # called for each micro-batch; patching a class changes `now`
def _of_class(kind: type, now: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, str], ...]:
    """Owner and name of methods of a class whose code is not the packages' own."""
    found: list[tuple[str, str]] = []
    for name, _ in now:
        owner = next((k for k in kind.__mro__ if name in vars(k)), None)
        if owner is None:
            if hasattr(kind, "__getattr__"):  # it answers to any name
                found.append((kind.__name__, name))
        elif not (_package(owner.__module__) in OWN and _is_own(vars(owner)[name])):
            found.append((owner.__name__, name))
    return tuple(found)


def _is_own(value: Any) -> bool:
    """Whether a function was written in one of the packages, looking through decorators."""
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return False
    return _package(str(function.__globals__.get("__name__"))) in OWN


def _package(module: str) -> str:
    return module.partition(".")[0]


__all__ = [
    "ACCELERATOR", "EVENTS", "HONOURED", "METHODS", "SERVED_EVENTS", "SERVED_METHODS", "heard",
    "overridden", "replaced",
]  # fmt: skip
