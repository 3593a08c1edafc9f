# SPDX-License-Identifier: Apache-2.0
"""Our tasks through Gymnasium's own interface and checker."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import ENVIRONMENT_STATE, IMAGES, STATE
from sims.gymnasium_export import TASKS, register
from sims.mujoco.tabletop import TabletopConfig, TabletopEnv


@pytest.mark.parametrize("name", TASKS)
def test_passes_gymnasiums_checker(name):
    register()  # again: harmless
    env = gymnasium.make(f"robo_rl/{name}-v0", render_mode="rgb_array")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*infinity.*")  # states have no bounds
        check_env(env.unwrapped)
    env.reset(seed=3)
    for _ in range(env.spec.max_episode_steps):
        *_, truncated, info = env.step(env.action_space.sample())
        assert info["is_success"] is info["success"]
    assert truncated
    env.close()


def test_single_and_vector_are_the_same_task():
    single = gymnasium.make("robo_rl/Lift-v0", control="joint_delta")
    vector = gymnasium.make_vec("robo_rl/Lift-v0", num_envs=3, max_episode_steps=9)
    ours = TabletopEnv(TabletopConfig(task="lift", num_envs=3, horizon=9, stagger=False))
    options = {"init": np.array([[0, 7]] * 3)}
    expected = ours.reset(init=torch.from_numpy(options["init"]))
    a, _ = single.reset(options={"init": (0, 7)})
    b, _ = vector.reset(options=options)
    rng = np.random.default_rng(0)
    for t in range(9):
        for key, value in expected.items():
            np.testing.assert_array_equal(a[key], value[0].numpy())
            np.testing.assert_array_equal(b[key], value.numpy())
        action = rng.uniform(-1, 1, 6).astype(np.float32)
        a, *_ = single.step(action)
        obs, reward, terminated, truncated, info = vector.step(np.stack([action] * 3))
        step = ours.step(torch.from_numpy(np.stack([action] * 3)))
        expected, b = step.final_obs, info.get("final_obs", obs)
        np.testing.assert_array_equal(reward, step.reward.numpy())
        assert truncated.all() == (t == 8) and not terminated.any()
    assert info["_final_obs"].all() and not np.array_equal(obs[STATE], b[STATE])
    assert obs in vector.observation_space and vector.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    for env in (single, vector, ours):
        env.close()


def test_seeds_reproduce_and_unseeded_differ():
    env = gymnasium.make_vec("robo_rl/Reach-v0", num_envs=2)
    first, _ = env.reset(seed=5)
    kept = first[ENVIRONMENT_STATE].copy()
    second, _ = env.reset()
    assert not np.array_equal(second[ENVIRONMENT_STATE], kept)
    np.testing.assert_array_equal(env.reset(seed=5)[0][ENVIRONMENT_STATE], kept)
    each, _ = env.reset(seed=[5, 2**32 - 1])
    np.testing.assert_array_equal(each[ENVIRONMENT_STATE][0], kept[0])
    single = gymnasium.make("robo_rl/Reach-v0")
    np.testing.assert_array_equal(single.reset(seed=2**32 - 1)[0][ENVIRONMENT_STATE], each[ENVIRONMENT_STATE][1])
    fresh = [gymnasium.make_vec("robo_rl/Reach-v0").reset()[0][ENVIRONMENT_STATE] for _ in range(2)]
    assert not np.array_equal(*fresh)
    with pytest.raises(ContractError, match="restarts all rows"):
        env.reset(seed=1, options={"reset_mask": np.array([True, False])})


def test_disabled_mode_leaves_ended_rows_to_the_mask():
    env = gymnasium.make_vec("robo_rl/Reach-v0", num_envs=2, max_episode_steps=4, autoreset_mode="Disabled")
    env.reset(seed=0)
    for _ in range(4):
        obs, _, _, truncated, info = env.step(env.action_space.sample())
    assert truncated.all() and "final_obs" not in info
    after, _ = env.reset(options={"reset_mask": np.array([False, True])})
    np.testing.assert_array_equal(after[STATE][0], obs[STATE][0])
    info = env.step(env.action_space.sample())[-1]
    assert info["valid"].tolist() == [False, True]
    env.close()


def test_cameras_and_wrong_settings():
    env = gymnasium.make("robo_rl/Reach-v0", cameras=("front",), image_size=32)
    obs, _ = env.reset(seed=0)
    assert obs in env.observation_space and obs[IMAGES + "front"].shape == (32, 32, 3)
    env.close()
    with pytest.raises(ConfigError, match="Did you mean `cameras`"):
        gymnasium.make("robo_rl/Reach-v0", camera="front")
    with pytest.raises(ConfigError, match="SAME_STEP and DISABLED"):
        gymnasium.make_vec("robo_rl/Reach-v0", autoreset_mode="NextStep")
