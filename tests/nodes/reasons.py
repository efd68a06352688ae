"""Node tests whose results or gradients are not compared, by a pattern of their names; why."""

OF_RESULTS = {
    "(attention|celu).*(bf16|bfloat16)": "its tolerance is finer than bf16, which rounds elsewhere",
    "attention_4d_causal_fp16": "its results are rounded to fp16 between steps that kernels join",
    "resize_downsample_scales_(linear|cubic)_align_corners": (
        "its corners are of a size that is not whole; onnxruntime's and torch's are of elements"
    ),
    "dft_inverse$": "zeros among its results are known to 2e-7 only, and the tolerance is 1e-7",
}

OF_GRADIENTS = {
    "attention.*(fullymasked|nan_robust|structural_empty|softmax_prec|local_window).*_expanded": (
        "it divides 0 by 0 and replaces the NaN: its gradient is NaN, in torch too"
    ),
    "mod_float_edge_cases": "an infinite dividend: the gradient is not finite in torch either",
}

OF_TORCH = {
    "(elu|leakyrelu|selu)_example_expanded": (
        "a body written out: at 0 it has the slope of what is above, the op that of what is below"
    ),
}
