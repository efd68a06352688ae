"""Patches for modules of torch.nn whose trace would differ from eager PyTorch.

In: a call of such a module. Out: the same numbers, by operators that a trace records.
Imports: `model_state`.
"""
