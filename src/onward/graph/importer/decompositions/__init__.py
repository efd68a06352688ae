"""Decompositions, one file for each family; a new file is found by itself."""
