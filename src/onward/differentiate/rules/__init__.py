"""Gradient rules, one file for each family of ops (`rule`, `unary`, `binary` of
`rule_table.py`)."""

from onward.graph.registry import files_of

files_of(__name__, __path__)  # importing them fills the table
