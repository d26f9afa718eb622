"""Looking at the processes of a run from outside."""

import subprocess


def simulators(pid: int) -> list[int]:
    """The simulator processes of a trainer."""
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid=,args="], capture_output=True, text=True, check=False)
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "vlarl.envs.worker" in line]
