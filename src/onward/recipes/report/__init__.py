"""The report of a run: one page, a trace of the planned step, and a model card.

`step_facts` and `text_samples` need torch, and run while the run has its model; everything else
reads the run's folder and needs matplotlib alone.
"""
