"""Logs of processes stay small, and their last lines are there."""

import os
import subprocess

from vlarl.envs import process_log
from vlarl.envs.process_log import appended_file, last_lines, shorten


def test_a_log_that_grows_too_large_keeps_its_newest_part_while_its_writer_continues(monkeypatch):
    monkeypatch.setattr(process_log, "LARGEST", 1000)
    monkeypatch.setattr(process_log, "KEPT", 100)
    with appended_file() as log:
        command = ["sh", "-c", "seq 1 1000; echo begun >&2; read line; echo $line"]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.PIPE, text=True)
        assert writer.stderr is not None and writer.stderr.readline() == "begun\n"
        assert os.fstat(log.fileno()).st_size > 3000
        shorten(log)
        assert os.fstat(log.fileno()).st_size < 150
        writer.communicate("the end\n")
        assert last_lines(log, 3) == ["999", "1000", "the end"]
        log.seek(0)
        assert log.readline() == b"(older output was left out)\n"
        size = os.fstat(log.fileno()).st_size
        shorten(log)
        assert os.fstat(log.fileno()).st_size == size, "one that is small enough is left alone"


def test_lines_in_a_message_are_cut():
    with appended_file() as log:
        log.write(b"x" * 10_000_000 + b"\nlast\n")
        log.flush()
        long, last = last_lines(log, 12)
    assert last == "last" and "characters left out" in long and len(long) < 1100
