"""The paths of a cluster that need a GPU, each run once and checked: learners over NCCL, weights by nccl and ipc, vLLM
in bfloat16 with and without graphs, its sleep, and Ray. One GPU is enough. Prints a table, writes JSON.

    python benchmarks/gpu_paths.py [--cases NAME ...] [--folder FOLDER] [--out gpu_paths.json]
    python benchmarks/gpu_paths.py --toy      # gloo and torch engines on a CPU: seconds, for CI

Each case is a process of its own with a deadline of its own: one that fails or hangs is reported, and the next one
begins. FOLDER gets the logs, the runs and, for the cases of 7B, a checkpoint with random weights (15 GB, as
benchmarks/openvla_7b.py writes it). Cases with vLLM need the extra `vllm`, those with Ray the extra `cluster`.

NCCL refuses two ranks on one GPU, unless they say that they are on different hosts: so each has a `NCCL_HOSTID` of its
own here, and they talk over sockets. That shows that the calls are right, and nothing of NCCL's speed.

How results are judged. Learners: two ranks may differ from one process by 4 times as much as one process differs from
itself when it cuts the batch into other microbatches. Engines: their log-probs may differ from the learner's in float32
by 4 times as much as the learner itself differs in the engine's type. Both are computed in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

CASES: dict[str, tuple[Callable[..., dict[str, Any]], float, dict[str, Any]]] = {}  # work, deadline in s, arguments
TOY = ("learners", "learners_full", "sync_torch")
TAIL = 1500  # characters of a failed case's output that its row keeps


def case(name: str, deadline_s: float, **arguments: Any) -> Callable[[Any], Any]:
    """Registers a case; one function may be several."""

    def registered(work: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        CASES[name] = (work, deadline_s, arguments)
        return work

    return registered


def main() -> None:
    import gpu_path_cases  # noqa: F401 - registers cases; it finds this module by its name
    import gpu_path_ray  # noqa: F401
    import gpu_paths

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(gpu_paths.CASES))
    parser.add_argument("--folder", type=Path, default=Path("gpu_paths"))
    parser.add_argument("--out", type=Path, default=Path("gpu_paths.json"))
    parser.add_argument("--toy", action="store_true", help="on a CPU, without vLLM and Ray")
    parser.add_argument("--run-case", choices=tuple(gpu_paths.CASES), help="run one case in this process")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.run_case:
        work, _, arguments = gpu_paths.CASES[given.run_case]
        result = work(given.folder.absolute(), "cpu" if given.toy else "cuda", **arguments)
        _result_file(given.folder, given.run_case).write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # not by the interpreter's own end, which threads of gloo and vLLM can hold up or abort
    results = {}
    for name in given.cases or (TOY if given.toy else tuple(gpu_paths.CASES)):
        results[name] = run_case(name, given.folder, gpu_paths.CASES[name][1], given.toy)
        print(table({name: results[name]}), flush=True)
        given.out.write_text(json.dumps(results, indent=2))
    print("\n" + "\n".join(f"{name:22} {result['state']}" for name, result in results.items()))
    sys.exit(any(result["state"] != "passed" for result in results.values()))


def run_case(name: str, folder: Path, deadline_s: float, toy: bool) -> dict[str, Any]:
    """The case's result, or why there is none; all its processes have ended."""
    log, started = folder / f"{name}.log", time.perf_counter()
    _result_file(folder, name).unlink(missing_ok=True)
    command = [sys.executable, __file__, "--run-case", name, "--folder", str(folder), *(["--toy"] if toy else [])]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            problem = f"exit code {code}" if (code := process.wait(deadline_s)) else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {deadline_s:.0f} s"
        finally:
            _end_group(process.pid)
            process.wait()
    seconds = round(time.perf_counter() - started, 1)
    if problem or not _result_file(folder, name).is_file():
        text = log.read_text(errors="replace").strip()[-TAIL:]
        return {"state": "failed", "seconds": seconds, "problem": problem or "no result", "output": text}
    result = json.loads(_result_file(folder, name).read_text())
    return {"state": "passed" if result.pop("passed") else "WRONG", "seconds": seconds} | result


def _end_group(group: int) -> None:
    """End what a case has left running, such as an engine whose caller has failed."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _result_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line for each case: its state, its time and what it measured."""
    lines = []
    for name, result in results.items():
        rest = {key: value for key, value in result.items() if key not in ("state", "seconds", "output")}
        lines.append(f"{name:22} {result['state']:7} {result['seconds']:7.1f} s  {json.dumps(rest)}")
        if result["state"] == "failed":
            lines.append("    " + result["output"].replace("\n", "\n    "))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
