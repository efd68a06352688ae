"""Whole jobs: functions that turn a typed configuration into a described run and carry it out.

Nothing here imports torch or transformers until a job runs, so that `onward --help` stays fast.
"""
