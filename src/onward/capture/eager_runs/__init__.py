"""Runs of the call in eager PyTorch, which say what a trace cannot.

In: a `FlatCall`, the batch. Out: what it sets, the types that autocast gives.
Imports: `trace`, `translate`, `model_state`.
"""
