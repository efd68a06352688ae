"""The trace: `torch.export` of one call of a model, with what it needs patched for that time.

In: a `FlatCall`, the batch's tensors. Out: torch's exported program, and what the call noted.
Imports: `custom_ops`, `regions`, `huggingface`, `masked_rows`, `expert_loops`, `model_state`.
"""
