"""Ray's workers have the same right to a core as everything else that runs: deadlines are the same, however busy it is."""

import os

os.environ.setdefault("RAY_worker_niceness", "0")
