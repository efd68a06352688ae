"""What the benchmark scripts are made of; each module has one reason to change.

It imports no script, and its modules import each other in one direction only.
"""
