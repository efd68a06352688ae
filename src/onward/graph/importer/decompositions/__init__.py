"""Decompositions, one file for each family; new files are found automatically."""
