# SPDX-License-Identifier: Apache-2.0
"""The tabletop's pictures: shapes, what is on them, one process or several, when they are drawn."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from robo_rl.types import ENVIRONMENT_STATE, IMAGES, STATE
from sims.mujoco.tabletop import TabletopConfig, TabletopEnv

FRONT, WRIST = IMAGES + "front", IMAGES + "wrist"


@pytest.fixture
def make():
    made = []

    def build(**fields):
        fields = {"num_envs": 4, "task": "lift", "cameras": ("front", "wrist")} | fields
        made.append(TabletopEnv(TabletopConfig(**fields)))
        return made[-1]

    yield build
    for env in made:
        env.close()


def start(env, task_id=0):
    return env.reset(init=torch.tensor([[task_id, e] for e in range(env.spec.num_envs)]))


def reddish(pictures):
    rgb = pictures.float()
    return (rgb[..., 0] > 60) & (rgb[..., 0] > 2 * rgb[..., 1]) & (rgb[..., 0] > 2 * rgb[..., 2])


def test_pictures_are_what_the_spec_says(make):
    env = make(image_size=64)
    obs = start(env)
    for key in (FRONT, WRIST):
        assert obs[key].shape == (4, 64, 64, 3)
        assert obs[key].dtype == torch.uint8
        assert env.spec.obs[key].shape == (64, 64, 3)
        assert obs[key].float().std() > 10
    assert WRIST not in make(cameras=("front",)).spec.obs
    assert env.render(torch.tensor([2, 0])).shape == (2, 240, 320, 3)


def test_front_camera_shows_the_object_where_it_is(make):
    env = make(num_envs=8)
    obs = start(env)
    names = env.spec.obs[ENVIRONMENT_STATE].names
    place = obs[ENVIRONMENT_STATE][:, [names.index("object.x"), names.index("object.y")]]
    centres = []
    for picture in obs[FRONT]:
        rows, columns = reddish(picture).nonzero(as_tuple=True)
        assert len(rows) > 5
        centres.append([rows.float().mean(), columns.float().mean()])
    centres = torch.tensor(centres)
    # The camera looks back at the arm: nearer to it is lower, and y grows to the right. Pictures are upright.
    assert np.corrcoef(centres[:, 0], place[:, 0])[0, 1] > 0.95
    assert np.corrcoef(centres[:, 1], place[:, 1])[0, 1] > 0.95


def test_objects_and_goals_are_drawn_in_their_colours(make):
    env = make(objects=("red cube", "blue cylinder"), task="pick_place")
    red, blue = start(env, 0)[FRONT].clone(), start(env, 1)[FRONT]
    assert reddish(red).sum() > 20
    assert reddish(blue).sum() < 3
    green = red.float()
    assert ((green[..., 1] > 100) & (green[..., 1] > 1.5 * green[..., 0])).flatten(1).sum(1).min() > 5


def test_last_picture_belongs_to_the_last_observation(make):
    env, held = make(horizon=3), make(horizon=3)
    held.autoreset = False
    start(env)
    start(held)
    action = torch.zeros(4, 6)
    action[:, 0] = 1.0
    for _ in range(3):
        a, b = env.step(action), held.step(action)
    assert a.truncated.all()
    assert torch.equal(a.final_obs[FRONT], b.obs[FRONT])
    assert not torch.equal(a.obs[FRONT], a.final_obs[FRONT])


def test_cameras_can_rest_inside_a_chunk(make):
    env, always = make(), make()
    first = start(env)[FRONT].clone()
    start(always)
    action = torch.ones(4, 6)
    env.cameras_on = False
    resting = env.step(action)
    always.step(action)
    assert torch.equal(resting.obs[FRONT], first)
    env.cameras_on = True
    a, b = env.step(action), always.step(action)
    for key in (FRONT, WRIST, STATE):
        assert torch.equal(a.obs[key], b.obs[key])
    assert not torch.equal(a.obs[FRONT], first)


def test_render_processes_draw_the_same_and_survive_resets(make):
    fields = {"horizon": 3, "objects": ("red cube", "yellow block"), "distractors": 1}
    one, many = make(**fields), make(render_processes=2, **fields)
    assert torch.equal(one.reset()[WRIST], many.reset()[WRIST])
    for _ in range(4):
        a, b = one.step(torch.ones(4, 6)), many.step(torch.ones(4, 6))
        for key in (FRONT, WRIST):
            assert torch.equal(a.obs[key], b.obs[key])
            assert torch.equal(a.final_obs[key], b.final_obs[key])


def test_osmesa_takes_over_where_egl_fails():
    code = (
        "import sys, torch\n"
        "from sims.mujoco.tabletop import TabletopConfig, TabletopEnv\n"
        "env = TabletopEnv(TabletopConfig(num_envs=2, cameras=('front',)))\n"
        "assert env.reset()['observation.images.front'].float().std() > 10\n"
        "assert 'mujoco.osmesa' in sys.modules and 'mujoco.egl' not in sys.modules\n"
        "env.close()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"MUJOCO_EGL_DEVICE_ID": "99"},
    )
    assert done.returncode == 0, done.stderr


def test_forgotten_renderer_is_closed_quietly_at_exit():
    code = (
        "import torch\n"
        "from sims.mujoco.tabletop import TabletopConfig, TabletopEnv\n"
        "env = TabletopEnv(TabletopConfig(num_envs=2, cameras=('front',)))\n"
        "env.reset(); env.render()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
