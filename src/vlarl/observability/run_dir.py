"""The run directory: all files of one run, and the interface to every tool that reads them.

runs/<name>/  config.yaml  status.json  metrics.jsonl  episodes.jsonl  samples.jsonl  curriculum.json  report.html
              trace.json  logs/  checkpoints/  videos/  data/  samples/  eval/  tensorboard/
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, get_args

from vlarl.config import trust
from vlarl.config.paths import brief
from vlarl.config.resume_command import resume_command
from vlarl.config.secrets import masked
from vlarl.errors import UsageError
from vlarl.json_files import read_object
from vlarl.observability.files import read_jsonl, write_atomically
from vlarl.observability.log_file import log_to_file
from vlarl.observability.machine import describe_machine

RunState = Literal["running", "finished", "failed", "interrupted"]

END_OF_CONFIG = "# end of the configuration"
FOLDERS = ("logs", "checkpoints", "videos", "eval", "tensorboard")


@dataclass(frozen=True)
class RunStatus:
    """The content of status.json: enough for a person, or a scheduler, to know the state of a run."""

    state: RunState
    iteration: int
    iterations: int
    started: float  # unix time of the run's first session, kept over resumes
    updated: float
    pid: int
    host: str
    machine: str
    message: str
    resume: (
        str  # the command, or the call in Python, that resumes the run; empty for supervised runs of earlier versions
    )


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path
    made_in: Path | None = field(default=None, compare=False)  # create: the nearest folder that existed before

    @classmethod
    def create(cls, root: Path | str, name: str) -> RunDirectory:
        """Make the folder of a new run. An existing one is refused; a failure leaves nothing behind."""
        cls.refuse_existing(root, name)
        path = Path(root) / name
        made_in = nearest_existing(path.parent)
        try:
            path.mkdir(parents=True, exist_ok=_never_began(path))
            for folder in FOLDERS:
                (path / folder).mkdir(exist_ok=True)
        except FileExistsError:
            raise UsageError(f"another process has just created {path}: choose another `--run.name`") from None
        except OSError as error:
            raise UsageError(_unwritable(path, error)) from error
        return cls(path, made_in)

    @staticmethod
    def refuse_existing(root: Path | str, name: str) -> None:
        """Refuse a name that is taken or a folder that can't be written to, before anything is made."""
        path = Path(root) / name
        if not name or Path(name).name != name or name in {".", ".."}:
            raise UsageError(f"run.name is {name!r}, which is not a valid folder name: leave out slashes")
        if path.exists() and not _never_began(path):
            raise UsageError(
                f"the run {brief(path)} exists already, and runs are never overwritten: "
                f"continue it by `{resume_command(path)}`, or choose another `--run.name`"
            )
        check_writable(Path(root))

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """The folder of an earlier run, to resume or to report on."""
        path = Path(path)
        if not path.is_dir():
            raise UsageError(f"{path} is not a run: there is no such folder{_known_runs(path.parent)}")
        if not (path / "config.yaml").is_file() and not (path / "status.json").is_file():
            raise UsageError(
                f"{path} is not a run: it holds neither config.yaml nor status.json{_known_runs(path)}"
                " Name the run's own folder, for example runs/<name>."
            )
        for folder in FOLDERS:
            try:
                (path / folder).mkdir(exist_ok=True)
            except OSError as error:
                raise UsageError(_unwritable(path, error)) from error
        return cls(path)

    def remove(self) -> None:
        """Delete all files of a new run that was refused before it began, including its root if that is new."""
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in self.path.parents:
            if self.made_in is None or folder == self.made_in:
                break
            with suppress(OSError):  # another run has been made there
                folder.rmdir()

    def lock(self) -> IO[str]:
        """Keep every other process from working on this run, for as long as the returned file is open."""
        file = (self.path / ".lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise self._in_use() from None
        return file

    def refuse_locked(self) -> None:
        """Refuse a run that another process works on, as `lock` does; nothing is written."""
        if self.is_locked():
            raise self._in_use()

    def _in_use(self) -> UsageError:
        pid = self.read_status().get("pid")
        return UsageError(f"the run {brief(self.path)} is in use by another process (pid {pid}): stop that one first")

    def claim(self) -> IO[str]:
        """The lock of a new run. A folder in which another process has begun its run first is refused."""
        file = self.lock()
        if self.config_file.exists():
            file.close()
            raise UsageError(f"another process has just created {self.path}: choose another `--run.name`")
        return file

    def is_locked(self) -> bool | None:
        """Whether a process works on this run; None where the lock can't say."""
        try:
            with (self.path / ".lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # never locked, not ours to read, or a disk without locks
            return None
        return False

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.resolve().name

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    def write_config(self, text: str) -> None:
        """Write the resolved configuration, with a last line that marks it complete and a seal that says whose it is.

        The seal is written first, see `trust.seals`.
        """
        text = f"{text}{END_OF_CONFIG}\n"
        if seals := trust.seals(self.config_file, text):
            write_atomically(trust.seal_file(self.config_file), seals)
        write_atomically(self.config_file, text)

    @property
    def status_file(self) -> Path:
        """The state of the run."""
        return self.path / "status.json"

    @property
    def metrics_file(self) -> Path:
        """One row per iteration."""
        return self.path / "metrics.jsonl"

    @property
    def episodes_file(self) -> Path:
        """One row per episode."""
        return self.path / "episodes.jsonl"

    @property
    def samples_file(self) -> Path:
        """Prompts, responses and rewards of some episodes; there is none without prompts."""
        return self.path / "samples.jsonl"

    @property
    def sample_images(self) -> Path:
        """Folder of the images of these prompts."""
        return self.path / "samples"

    @property
    def curriculum_file(self) -> Path:
        """The success of each task, and how often each is sampled for training."""
        return self.path / "curriculum.json"

    @property
    def report_file(self) -> Path:
        """The report a person reads."""
        return self.path / "report.html"

    @property
    def trace_file(self) -> Path:
        """The timeline of every role."""
        return self.path / "trace.json"

    @property
    def logs(self) -> Path:
        """Folder of log files."""
        return self.path / "logs"

    @property
    def log_file(self) -> Path:
        """The training log."""
        return self.logs / "train.log"

    @property
    def output_file(self) -> Path:
        """What a detached run prints."""
        return self.logs / "output.log"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def videos(self) -> Path:
        """Folder of videos of episodes."""
        return self.path / "videos"

    @property
    def data(self) -> Path:
        """Folder of saved training episodes, a dataset for each suite; there is none without rollout.save."""
        return self.path / "data"

    @property
    def evaluations(self) -> Path:
        """Folder of later evaluations, one subfolder each."""
        return self.path / "eval"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard files."""
        return self.path / "tensorboard"

    def write_status(self, state: RunState, iteration: int, iterations: int, message: str = "") -> None:
        """Write the state of the run, in one atomic step."""
        now = time.time()
        status = RunStatus(
            state=state,
            iteration=iteration,
            iterations=iterations,
            started=float(self.read_status().get("started") or now),
            updated=now,
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=describe_machine(),
            message=masked(message),
            resume=resume_command(self.path),
        )
        write_atomically(self.status_file, json.dumps(asdict(status), indent=2) + "\n")

    def read_status(self) -> dict[str, Any]:
        """The content of status.json, without values of a wrong type; empty when there is none."""
        status = read_object(self.status_file)
        return {name: value for name, value in status.items() if _is_of_kind(name, value)}

    def status_problem(self) -> str:
        """What is wrong with status.json, for a message; empty where it is valid or missing."""
        if not self.status_file.exists():
            return ""
        status = read_object(self.status_file)
        odd = [name for name, value in status.items() if not _is_of_kind(name, value)]
        if status and not odd:
            return ""
        return f"{self.status_file} is damaged" + (f" ({', '.join(odd)})" if odd else "")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl."""
        return list(read_jsonl(self.metrics_file)) if self.metrics_file.is_file() else []

    def truncate_after(self, iteration: int, unfinished: bool = False) -> None:
        """Drop the rows of later iterations from metrics, episodes and samples: a resumed run writes them again.

        An unfinished iteration has its rollout's episodes; its evaluation and its row of metrics are repeated, too.
        """

        def is_kept(row: dict[str, Any]) -> bool:
            of = row.get("iteration", 0)
            if not isinstance(of, int):
                return False
            again = unfinished and of == iteration and row.get("phase") != "rollout"
            return of <= iteration and not again

        for path in (self.metrics_file, self.episodes_file, self.samples_file):
            if path.exists() and not path.is_file():  # a pipe: writing to it would block without a reader
                raise UsageError(f"{path} is not a file: move it away, then resume the run.")
            if path.is_file():
                kept = (row for row in read_jsonl(path) if is_kept(row))
                write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))

    def log_to_file(
        self, logger: str = "vlarl", level: int = logging.INFO, is_shown: bool = False
    ) -> AbstractContextManager[Path]:
        """Send a logger's records, and Python's warnings, to logs/train.log while the block runs."""
        return log_to_file(self.log_file, logger, level, is_shown)


LATEST_TIME = 1e11  # unix time of any status
LARGEST_COUNT = 2**53
LARGEST_PID = 2**31 - 1


def _is_of_kind(name: str, value: Any) -> bool:
    """Whether an entry of status.json can be what was written under its name."""
    if name in ("iteration", "iterations", "pid"):
        largest = LARGEST_PID if name == "pid" else LARGEST_COUNT
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest
    if name in ("started", "updated"):
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LATEST_TIME
    if name == "state":
        return value in get_args(RunState)
    return isinstance(value, str) or (name == "resume" and isinstance(value, bool))


ROOT_REMEDY = "choose a folder you can write to with `--run.root`"


def check_writable(root: Path, remedy: str = ROOT_REMEDY) -> None:
    """Check with a temporary file that the root, or the folder it will be made in, is writable: permission bits
    don't say."""
    try:
        with tempfile.TemporaryFile(dir=nearest_existing(root)) as file:
            file.write(b"vlarl")
            file.flush()
    except OSError as error:
        raise UsageError(_unwritable(root, error, remedy)) from error


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists: whatever is made at the path is made on the same disk."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _never_began(path: Path) -> bool:
    """Whether a folder is left from a run that was killed before its configuration was written: empty folders, a free
    lock, the configuration's seal, and temporary files."""
    if not path.is_dir() or path.is_symlink():
        return False
    seal = trust.seal_file(RunDirectory(path).config_file).name
    for entry in path.iterdir():
        is_empty_folder = entry.name in FOLDERS and entry.is_dir() and not any(entry.iterdir())
        is_part = entry.name.startswith((".config.yaml.", f".{seal}.")) and entry.suffix == ".tmp"
        is_rest = entry.name in (".lock", seal) or is_part
        if not is_empty_folder and not is_rest:
            return False
    return RunDirectory(path).is_locked() is not True


def _unwritable(path: Path, error: OSError, remedy: str = ROOT_REMEDY) -> str:
    return f"cannot write to {path} ({error.strerror or error}): {remedy}"


def _known_runs(root: Path) -> str:
    if not root.is_dir():
        return "."
    names = sorted(p.name for p in root.iterdir() if (p / "status.json").is_file() or (p / "config.yaml").is_file())
    return f"; runs in {root}: {', '.join(names[-8:])}." if names else "."
