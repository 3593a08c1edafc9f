# SPDX-License-Identifier: Apache-2.0
"""The on-policy loop: what it reports of the episodes that ended."""

from __future__ import annotations

import pytest
import torch

import sims
from policies.gaussian import GaussianConfig, GaussianPolicy
from robo_rl.algorithms.ppo import PPO, PPOConfig
from robo_rl.loops.on_policy import OnPolicy
from sims.mujoco.gym_tasks import MujocoConfig
from sims.mujoco.tabletop import TabletopConfig

EPISODES = {"rollout/ep_rew_mean", "rollout/ep_len_mean"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MujocoConfig("InvertedPendulum-v5", num_envs=2, horizon=4), EPISODES),
        (TabletopConfig("reach", num_envs=2, horizon=4), EPISODES | {"rollout/success_rate"}),
    ],
    ids=["without", "with"],
)
def test_success_is_reported_only_where_the_task_defines_it(config, expected):
    env = sims.make(config)
    try:
        policy = GaussianPolicy(GaussianConfig(hidden=(8,)), env.spec)
        loop = OnPolicy(env, policy, PPO(policy, PPOConfig(), 2), 8, torch.Generator().manual_seed(0))
        assert {name for name in next(loop) if name.startswith("rollout/")} == expected
    finally:
        env.close()
