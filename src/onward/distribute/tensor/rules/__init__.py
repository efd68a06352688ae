"""Rules of tensor parallelism by family of ops: the ways to run a call on parts (`way_rule`)."""
