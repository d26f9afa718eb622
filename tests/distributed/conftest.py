"""Ray's workers run at the same priority as everything else: deadlines also hold on a busy machine."""

import os

os.environ.setdefault("RAY_worker_niceness", "0")
