"""What every Python process that a test starts does first: collect garbage more rarely.

A fifth of what a worker, a rank or a command takes until it begins is the garbage collector, which looks at the modules
that are loaded again and again. Tests start hundreds of such processes.
"""

import gc

gc.set_threshold(100_000, 20, 50)  # instead of 700, 10, 10
