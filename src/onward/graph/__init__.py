"""Programs: values with types, nodes, ops, building, printing, checking, evaluating."""
