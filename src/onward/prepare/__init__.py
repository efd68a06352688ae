"""What a Trainer and the user's own loop share: a captured call, prepared to run on any batch.

In: a captured call (`CapturedModule`) and batches. Out: a `PreparedStep`, which runs each batch by
a padded or a packed plan; guards that say whether the capture still holds; reports of what ran.
Imports: compile.py and the stages before it, nothing of train, module or explanation.
"""
