"""Search: the layouts of a number of ranks that fit into memory, the fastest first."""
