"""Per family of ops: which rows one reads (`demand_rule`), how it is packed (`pack_rule`)."""

from onward.graph.registry import files_of

files_of(__name__, __path__)  # whose import fills the tables
