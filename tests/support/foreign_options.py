"""Options of other libraries, transcribed from their sources: what docs/migration has a row for.

onnxruntime-training: `orttraining/orttraining/python/training`, up to release 1.19; Optimum:
`optimum/onnxruntime`, up to 1.26.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


def _of(prefix: str, names: str, form: str = "{}.{}") -> list[str]:
    return [form.format(prefix, name) for name in names.split()]


CALL = "{}({})"

ORTTRAINER = [
    # the constructor, its methods, TrainStepInfo
    *_words("model model_desc optim_config loss_fn options is_loss train_step fetches eval_step"),
    *_words("save_as_onnx state_dict load_state_dict save_checkpoint load_checkpoint"),
    *_words("aggregate_checkpoints experimental_save_checkpoint experimental_load_checkpoint"),
    *_words("experimental_state_dict model_desc['inputs'] model_desc['outputs']"),
    "save_checkpoint(user_dict)", "save_checkpoint(include_optimizer_states)",
    "load_state_dict(strict=False)", "state_dict(pytorch_format=True)",
    *_of("TrainStepInfo", "optimizer_config all_finite fetches optimization_step step"),
    # ORTTrainerOptions
    "batch.gradient_accumulation_steps",
    *_of("device", "id mem_limit"),
    *_of("distributed", "world_rank world_size local_rank data_parallel_size"),
    *_of("distributed", "horizontal_parallel_size allreduce_post_accumulation enable_adasum"),
    *_of("distributed.pipeline_parallel", "pipeline_parallel_size num_pipeline_micro_batches"),
    *_of("distributed.pipeline_parallel", "pipeline_cut_info_string sliced_schema sliced_axes"),
    "distributed.pipeline_parallel.sliced_tensor_names",
    "distributed.deepspeed_zero_optimization.stage",
    "lr_scheduler",
    *_of("mixed_precision", "enabled loss_scaler"),
    *_of("graph_transformer", "attn_dropout_recompute gelu_recompute number_recompute_layers"),
    "graph_transformer.transformer_layer_recompute",
    *_of("graph_transformer.propagate_cast_ops_config", "strategy level allow"),
    *_of("utils", "frozen_weights grad_norm_clip memory_efficient_gradient"),
    "utils.run_symbolic_shape_infer",
    *_of("debug", "deterministic_compute check_model_export"),
    *_of("debug.graph_save_paths", "model_after_graph_transforms_path"),
    *_of("debug.graph_save_paths", "model_with_gradient_graph_path"),
    *_of("debug.graph_save_paths", "model_with_training_graph_path"),
    *_of("debug.graph_save_paths", "model_with_training_graph_after_optimization_path"),
    *_of("_internal_use", "enable_internal_postprocess extra_postprocess onnx_opset_version"),
    "_internal_use.enable_onnx_contrib_ops", "provider_options", "session_options",
    # optimizers, schedules, loss scalers
    "SGDConfig(lr)",
    *_of("AdamConfig", "params lr alpha beta lambda_coef epsilon max_norm_clip", CALL),
    *_of("AdamConfig", "do_bias_correction weight_decay_mode", CALL),
    *_of("LambConfig", "params lr alpha beta lambda_coef ratio_min ratio_max epsilon", CALL),
    *_of("LambConfig", "max_norm_clip do_bias_correction", CALL),
    *_words("ConstantWarmupLRScheduler CosineWarmupLRScheduler LinearWarmupLRScheduler"),
    *_words("PolyWarmupLRScheduler total_steps warmup get_lr get_last_lr"),
    *_words("LossScaler DynamicLossScaler automatic_update loss_scale up_scale_window"),
    *_words("min_loss_scale max_loss_scale"),
    # the first ORTTrainer
    *_words("device gradient_accumulation_steps ModelDescription IODescription"),
    *_words("training_optimizer_name map_optimizer_attributes get_lr_this_step global_step"),
    *_words("IODescription(Learning_Rate) world_rank world_size allreduce_post_accumulation"),
    *_words("deepspeed_zero_stage enable_adasum use_mixed_precision loss_scaler"),
    *_words("enable_grad_norm_clip frozen_weights _opset_version _extra_postprocess"),
    *_words("use_memory_efficient_gradient run_symbolic_shape_infer optimized_model_filepath"),
]  # fmt: skip

ORTMODULE = [
    *_of("ORTMODULE", "ONNX_OPSET_VERSION FALLBACK_POLICY FALLBACK_RETRY LOG_LEVEL", "{}_{}"),
    *_of("ORTMODULE", "SAVE_ONNX_PATH SKIPCHECK_POLICY ALLOW_AUTOGRAD_CHECKPOINT", "{}_{}"),
    *_of("ORTMODULE", "ENABLE_CUSTOM_AUTOGRAD ENABLE_COMPUTE_OPTIMIZER CACHE_DIR", "{}_{}"),
    *_of("ORTMODULE", "PRINT_INPUT_DENSITY PRINT_MEMORY_STATS CONV_ALGO_SEARCH", "{}_{}"),
    *_of("ORTMODULE", "ENABLE_EMBEDDING_SPARSE_OPTIMIZER", "{}_{}"),
    *_of("ORTMODULE", "ENABLE_LABEL_SPARSE_OPTIMIZER USE_EFFICIENT_ATTENTION", "{}_{}"),
    *_of("ORTMODULE", "ATEN_SDPA_FALLBACK DEEPCOPY_BEFORE_MODEL_EXPORT", "{}_{}"),
    *_of("ORTMODULE", "MEMORY_OPT_LEVEL MEMORY_OPT_CONFIG", "{}_{}"),
    *_of("ORTMODULE", "ENABLE_MEM_EFFICIENT_GRAD_MGMT USE_TRITON TRITON_CONFIG_FILE", "{}_{}"),
    *_of("ORTMODULE", "TRITON_DEBUG ENABLE_TUNING MAX_TUNING_DURATION_MS", "{}_{}"),
    *_of("ORTMODULE", "TUNING_RESULTS_PATH USE_FLASH_ATTENTION ENABLE_ZERO_STAGE3", "{}_{}"),
    *_of("DebugOptions", "log_level save_onnx onnx_prefix save_path config"),
    *_words("VERBOSE DEVINFO INFO WARNING ERROR FATAL"),
    *_of("FALLBACK", "DISABLE FORCE_TORCH_FORWARD FORCE_TORCH_BACKWARD", "{}_{}"),
    *_of("FALLBACK", "UNSUPPORTED_DEVICE UNSUPPORTED_DATA UNSUPPORTED_TORCH_MODEL", "{}_{}"),
    *_of("FALLBACK", "UNSUPPORTED_ONNX_MODEL BAD_INITIALIZATION", "{}_{}"),
    *_of("SKIP_CHECK", "DISABLED DEVICE BUILD_GRADIENT EXECUTION_AGENT", "{}_{}"),
    *_words("use_static_shape run_symbolic_shape_infer use_external_gpu_allocator loglevel"),
    *_words("enable_grad_acc_optimization use_memory_efficient_gradient"),
    "propagate_cast_ops level", "propagate_cast_ops strategy",
    *_words("PropagateCastOps UseExternalGPUAllocator EnableCustomAutogradFunction"),
    *_words("EnableGradAccOptimization RunSymbolicShapeInference UseStaticShape SkipCheck"),
    *_words("DebugOptions UseMemoryEfficientGradient FallbackPolicy OnnxOpsetVersion"),
    *_words("register_graph_optimizer CustomOpSymbolicRegistry.register_symbolic"),
    *_words("CustomGradientRegistry.register_gradient PythonOp PythonOpGrad"),
    *_words("HierarchicalORTModule ORTPipelineModule export_gradient_graph ModuleWithLoss"),
    *_words("optim.FusedAdam optim.FP16_Optimizer"),
    *_of("FusedAdam", "lr bias_correction betas eps adam_w_mode weight_decay", CALL),
    "FusedAdam(set_grad_none)",
    *_words("LoadBalancingDistributedSampler LoadBalancingDistributedBatchSampler"),
    *_words("GlobalSubscriberManager StatisticsSubscriber inspect_activation"),
    *_words("merge_activation_summary ZeROOffloadSubscriber torch_profile_utils"),
    *_words("configure_ort_compatible_zero_stage3 torch_ort.configure ort_moe torch_ort_infer"),
    "set_propagate_cast_ops_optimization",
]  # fmt: skip

OPTIMUM = [
    'optim="adamw_ort_fused"',
    *_words("use_module_with_loss loss_in_train save_onnx onnx_prefix onnx_log_level"),
    *_of("ORTTrainer", "model args data_collator train_dataset eval_dataset tokenizer", CALL),
    *_of("ORTTrainer", "model_init compute_metrics callbacks optimizers feature", CALL),
    "ORTTrainer(preprocess_logits_for_metrics)",
    *_words("ORTSeq2SeqTrainer ORTSeq2SeqTrainingArguments train evaluate predict"),
    "evaluate(inference_with_ort=True)", "predict(inference_with_ort=True)", "ModuleWithLoss",
]  # fmt: skip

# Settings of torch by name, looked up in the installed torch. `TORCH_COMPILE` adds options and
# environment variables.
TORCH_SETTINGS = [
    *_of("torch._dynamo.config", "suppress_errors recompile_limit cache_size_limit verbose"),
    *_of("torch._dynamo.config", "accumulated_recompile_limit automatic_dynamic_shapes"),
    *_of("torch._dynamo.config", "assume_static_by_default capture_scalar_outputs"),
    *_of("torch._dynamo.config", "capture_dynamic_output_shape_ops optimize_ddp"),
    *_of("torch._dynamo.config", "compiled_autograd"),
    *_of("torch._dynamo", "mark_dynamic mark_static explain reset graph_break"),
    *_of("torch.compiler", "reset disable is_compiling set_stance"),
    *_of("torch._functorch.config", "activation_memory_budget donated_buffer"),
    *_of("torch._inductor.config", "max_autotune max_autotune_gemm coordinate_descent_tuning"),
    *_of("torch._inductor.config", "epilogue_fusion pattern_matcher aggressive_fusion"),
    *_of("torch._inductor.config", "memory_planning inplace_buffers allow_buffer_reuse"),
    *_of("torch._inductor.config", "triton.cudagraphs freezing shape_padding cpp_wrapper"),
    *_of("torch._inductor.config", "compile_threads fx_graph_cache fallback_random"),
    "torch._inductor.config.cpp.threads", "torch.set_float32_matmul_precision",
]  # fmt: skip

TORCH_COMPILE = [
    *_words("model fullgraph dynamic backend mode options disable"),
    *TORCH_SETTINGS,
    *_words("TORCH_LOGS TORCHDYNAMO_VERBOSE TORCH_COMPILE_DEBUG TORCHINDUCTOR_CACHE_DIR"),
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
]

OPTIONS = {
    "from-ortmodule": ORTMODULE,
    "from-orttrainer": ORTTRAINER,
    "from-optimum": OPTIMUM,
    "from-torch-compile": TORCH_COMPILE,
}
