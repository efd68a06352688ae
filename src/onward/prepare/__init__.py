"""What a Trainer and the user's own loop share: a captured call, prepared to run on any batch.

In: a captured call (`CapturedModule`) and batches. Out: a `PreparedStep`, which runs a batch by
padded or packed plans, its guards, and reports of what it does.
Imports: compile.py and the stages before it, nothing of train, module or explanation.
"""
