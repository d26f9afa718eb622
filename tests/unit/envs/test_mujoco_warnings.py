"""Simulators leave no file in the folder that the program is called from."""

import os
import subprocess
import sys

from fakes.processes import MODULES

UNSTABLE = """
import logging, os, sys
import gymnasium, numpy
from vlarl.config.schema import GymConfig
from vlarl.envs.gym.source import make_env

SCENE = "<mujoco><worldbody><body><freejoint/><geom size='1'/></body></worldbody></mujoco>"

class Exploding(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self):
        import mujoco

        model = mujoco.MjModel.from_xml_string(SCENE)
        self.data = mujoco.MjData(model)
        self.advance = lambda: mujoco.mj_step(model, self.data)

logging.basicConfig(level=logging.WARNING)
env = make_env(GymConfig(env="__main__:Exploding", images=("pixels",)), 10)
env.data.qvel[:] = numpy.nan
env.advance()
"""


def test_what_mujoco_warns_of_goes_to_the_log(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", UNSTABLE],
        env={**os.environ, "PYTHONPATH": MODULES},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING:vlarl.envs.mujoco:MuJoCo: Nan, Inf or huge value" in done.stderr
    assert not list(tmp_path.iterdir()), "such as MUJOCO_LOG.TXT"
