"""Rules of row demand by family of ops: the rows that an op reads (`demand_rule`), and how it is
packed (`pack_rule`)."""

from onward.graph.registry import files_of

files_of(__name__, __path__)  # importing them fills the tables
