"""Compiled scenes: made once, read many times, never trusted when they could be wrong; and memory that stays flat."""

import os
import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest

from vlarl.envs.libero import models
from vlarl.envs.libero.models import SceneReader

MESH = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for compiled scenes; MuJoCo writes MUJOCO_LOG.TXT to the working directory when one is damaged."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary" / f"vlarl-libero-models-{os.getuid()}"


@pytest.fixture
def xml(tmp_path):
    """A scene with one mesh."""
    (tmp_path / "mesh.obj").write_text(MESH)
    asset = f'<asset><mesh name="m" file="{tmp_path}/mesh.obj"/></asset>'
    return (
        f'<mujoco>{asset}<worldbody><body name="b" pos="1 2 3"><geom type="mesh" mesh="m"/></body></worldbody></mujoco>'
    )


def test_a_scene_is_compiled_once_and_read_back_the_same(folder, xml):
    compiled = mujoco.MjModel.from_xml_string(xml)
    first = SceneReader().read(xml)
    (file,) = folder.iterdir()
    written = file.stat().st_ino
    second = SceneReader().read(xml)
    assert [entry.stat().st_ino for entry in folder.iterdir()] == [written]
    for scene in (first, second):
        np.testing.assert_array_equal(scene.model.body_pos, compiled.body_pos)
        np.testing.assert_array_equal(scene.model.mesh_vert, compiled.mesh_vert)
        np.testing.assert_array_equal(scene.original["body_pos"], compiled.body_pos)


def test_the_same_scene_is_the_same_object_with_its_first_values(folder, xml):
    reader = SceneReader()
    scene = reader.read(xml)
    scene.model.body_pos[1] = 0
    assert reader.read(xml) is scene
    np.testing.assert_array_equal(scene.original["body_pos"][1], [1, 2, 3])
    assert reader.read(xml.replace("1 2 3", "3 2 1")) is not scene


def test_a_changed_mesh_is_another_scene(folder, xml, tmp_path):
    SceneReader().read(xml)
    (tmp_path / "mesh.obj").write_text(MESH.replace("v 1 0 0", "v 5 0 0"))
    assert SceneReader().read(xml).model.mesh_vert.max() > 2
    assert len(list(folder.iterdir())) == 2


def test_a_missing_mesh_is_named(folder, xml, tmp_path):
    (tmp_path / "mesh.obj").unlink()
    with pytest.raises(FileNotFoundError) as error:
        SceneReader().read(xml)
    assert error.value.filename == f"{tmp_path}/mesh.obj"


def test_a_damaged_file_is_replaced(folder, xml):
    SceneReader().read(xml)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert SceneReader().read(xml).model.nmesh == 1
    assert SceneReader().read(xml).model.nmesh == 1
    (file,) = folder.iterdir()
    assert file.read_bytes() == whole


def test_a_folder_that_others_can_write_to_is_not_used(folder, xml):
    folder.mkdir()
    folder.chmod(0o777)
    assert models.models_folder() is None
    assert SceneReader().read(xml).model.nmesh == 1
    assert list(folder.iterdir()) == []


def test_the_oldest_scenes_are_deleted_for_new_ones(folder, xml, monkeypatch):
    scenes = [xml.replace("1 2 3", f"1 2 {number}") for number in range(4)]
    SceneReader().read(scenes[0])
    (first,) = folder.iterdir()
    monkeypatch.setattr(models, "MOST_BYTES", int(2.5 * first.stat().st_size))
    SceneReader().read(scenes[1])
    os.utime(first, (1, 1))
    SceneReader().read(scenes[2])
    assert not first.exists() and len(list(folder.iterdir())) == 2
    monkeypatch.setattr(models, "MOST_BYTES", 10)
    assert SceneReader().read(scenes[3]).model.nmesh == 1
    assert list(folder.iterdir()) == []


SWITCH = """
import os, sys
from vlarl.config.schema import EnvConfig
from vlarl.envs.libero import libero_factory
from vlarl.types import Task
factory = libero_factory(EnvConfig(suite="libero_object"), 48, "sparse")
os.environ.update(factory.variables(0))
env = factory.build()
for round in range(8):
    env.reset(Task("libero_object", round % 2, round, 0))
    env.observe()
    with open("/proc/self/statm") as status:
        print(int(status.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20)
env.close()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a process from /proc")
def test_memory_stays_flat_when_tasks_change(libero_assets):
    done = subprocess.run([sys.executable, "-c", SWITCH], capture_output=True, text=True, check=True, timeout=300)
    megabytes = [int(line) for line in done.stdout.split()]
    assert max(megabytes) < 900, megabytes
    assert megabytes[-1] - megabytes[1] < 60 and megabytes[-2] - megabytes[2] < 60, megabytes
