"""One iteration as tasks in arrays, and the compiled replay that says when each of them runs.

``Program`` holds the tasks, ``replay`` finds their ``Times``, and readers make timelines of these.
"""
