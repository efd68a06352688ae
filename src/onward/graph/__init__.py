"""What a program is: values with types, nodes, ops, building, printing, checking, evaluating."""
