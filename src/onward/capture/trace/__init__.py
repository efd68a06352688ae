"""The trace: `torch.export` of one call of a model, with the patches that it needs.

In: a `FlatCall`, the batch's tensors. Out: torch's exported program, and what the run recorded
(`FlatCall.noted`).
Imports: `custom_ops`, `regions`, `huggingface`, `masked_rows`, `expert_loops`, `model_state`.
"""
