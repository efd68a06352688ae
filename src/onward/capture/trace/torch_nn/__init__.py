"""Modules of torch.nn that a trace would take otherwise than eager PyTorch runs them.

In: such a module's call. Out: the same in operators that a trace keeps.
Imports: `model_state`.
"""
