# SPDX-License-Identifier: Apache-2.0
"""Every single step equals Gymnasium's: same state, warm start off on both sides; and the returns' distributions."""

from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest
import torch
from scipy import stats

from robo_rl.types import STATE
from sims.mujoco.gym_tasks import TASKS, MujocoConfig, MujocoEnv

STEPS = 60


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_step_equals_gymnasium(task, monkeypatch):
    theirs: Any = gymnasium.make(task).unwrapped
    theirs.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_WARMSTART
    theirs.reset(seed=0)
    ours = MujocoEnv(MujocoConfig(task=task, num_envs=1), warm_start=False)
    ours.autoreset = False
    assert ours.spec.max_episode_steps == gymnasium.spec(task).max_episode_steps
    assert ours.spec.obs[STATE].shape == theirs.observation_space.shape
    np.testing.assert_allclose(1 / ours.spec.control_hz, theirs.dt, rtol=1e-6)
    seen = []  # what the environment saw of each step, in float64
    monkeypatch.setattr(ours, "_after", lambda *a: seen.append(MujocoEnv._after(ours, *a)) or seen[-1])
    rng = np.random.default_rng(0)
    for t in range(STEPS):
        if t % 20 == 0:  # from time to time another state: the start, and thrown into the air
            first = ours.reset(rows=torch.tensor([0]), init=torch.tensor([[0, t]]))[STATE][0].numpy()
            qpos, qvel = ours._state[0, ours._physics.qpos].copy(), ours._state[0, ours._physics.qvel].copy()
            theirs.reset(seed=t)
            theirs.set_state(qpos, qvel)
            np.testing.assert_allclose(first, theirs._get_obs(), atol=1e-6)
        action = rng.uniform(theirs.action_space.low, theirs.action_space.high).astype(np.float32)
        seen.clear()
        step = ours.step(torch.from_numpy(action)[None])
        obs, reward, terminated, _, _ = theirs.step(action.astype(np.float64))
        after = seen[0]
        # In float64, before the observation is rounded to float32.
        np.testing.assert_allclose(ours.task.observe(after)[0], obs, rtol=0, atol=1e-8)
        assert ours.task.reward(after, ours.task.healthy(after))[0] == pytest.approx(reward, abs=1e-8)
        np.testing.assert_allclose(step.obs[STATE][0].numpy(), obs.astype(np.float32), rtol=1e-6, atol=1e-6)
        assert bool(step.terminated[0]) == terminated
        if terminated:
            init = torch.tensor([[0, 1000 + t]])
            ours.reset(rows=torch.tensor([0]), init=init)
            theirs.set_state(ours._state[0, ours._physics.qpos].copy(), ours._state[0, ours._physics.qvel].copy())
    ours.close()


@pytest.mark.parametrize("task", ["HalfCheetah-v5", "Hopper-v5", "Reacher-v5"])
def test_returns_are_distributed_as_gymnasiums(task):
    """Warm start as it is by default on either side; a fixed linear policy; two-sample Kolmogorov-Smirnov."""
    episodes, horizon = 48, 150
    rng = np.random.default_rng(1)
    theirs: Any = gymnasium.make(task, max_episode_steps=horizon)
    weights = 0.3 * rng.standard_normal((theirs.observation_space.shape[0], theirs.action_space.shape[0]))
    reference = []
    for episode in range(episodes):
        obs, _ = theirs.reset(seed=episode)
        total, done = 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = theirs.step(np.tanh(obs @ weights))
            total += reward
            done = terminated or truncated
        reference.append(total)
    ours = MujocoEnv(MujocoConfig(task=task, num_envs=episodes, horizon=horizon), seed=3)
    ours.autoreset = False
    obs, returns = ours.reset(), torch.zeros(episodes)
    for _ in range(horizon):
        step = ours.step(torch.tanh(obs[STATE].double() @ torch.from_numpy(weights)))
        returns += step.reward
        obs = step.obs
    ours.close()
    result: Any = stats.ks_2samp(reference, returns.numpy())
    assert result.pvalue > 1e-3


def test_a_broken_state_is_dropped_and_counted():
    env = MujocoEnv(MujocoConfig(num_envs=3))
    env.reset(seed=0)
    env._state[1, env._physics.qvel] = 1e300  # the next step overflows
    step = env.step(torch.zeros(3, 6))
    assert step.valid.tolist() == [True, False, True]
    assert env.counters["non_finite"] == 1
    assert all(v.isfinite().all() for v in (*step.obs.values(), *step.final_obs.values(), step.reward))
    env.close()
