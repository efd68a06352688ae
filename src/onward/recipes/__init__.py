"""Recipes: whole jobs, from a typed configuration to a described run and its execution.

Nothing here imports torch or transformers until a job runs, so that `onward --help` stays fast.
"""
