# SPDX-License-Identifier: Apache-2.0
"""What Flow-SDE costs: updating one denoising step of each chunk against all of them, and exploring against the ODE."""

from __future__ import annotations

from dataclasses import replace

import torch

import policies
import sims
from policies.flow.config import FlowConfig
from robo_rl.algorithms.ppo import PPO, PPOConfig
from robo_rl.app import results
from robo_rl.app.bench import BenchConfig, Contender, interleave, ratio_row
from robo_rl.app.evaluate import chunked_for
from robo_rl.loops.on_policy import OnPolicy
from robo_rl.types import ENVIRONMENT_STATE, STATE
from sims.mujoco.tabletop import TabletopConfig

ENV = TabletopConfig(task="lift", num_envs=256, reward="success")
POLICY = FlowConfig(obs_keys=(STATE, ENVIRONMENT_STATE), denoise_steps=4)
# Every minibatch is used: a KL stop would make the two updates unequal.
ALGORITHM = PPOConfig(num_steps=12, minibatch_size=1024, epochs=4, schedule="constant", kl_stop=None)


def flow(config: BenchConfig) -> list[results.Row]:
    """The rows `flow-update` and `flow-rollout`."""
    one = replace(POLICY, stochastic_steps="one")
    updates = interleave([_update("one", one), _update("all", replace(one, stochastic_steps="all"))], config)
    rollouts = interleave([_rollout("sde", deterministic=False), _rollout("ode", deterministic=True)], config)
    return [
        ratio_row(
            "flow-update",
            "PPO's update of Flow-SDE at K = 4: one random denoising step a chunk against all",
            updates,
            "all",
            1.8,
            ours="one",
        ),
        ratio_row(
            "flow-rollout",
            "Rollouts of Flow-SDE against those of the ODE, physics and critic included",
            rollouts,
            "ode",
            1 / 1.05,
            ours="sde",
        ),
    ]


def _update(name: str, policy_config: FlowConfig) -> Contender:
    """Gradient steps on one stored rollout."""
    torch.manual_seed(0)
    env = sims.make(ENV, 0)
    policy = policies.make(policy_config, env.spec)
    algorithm = PPO(policy, ALGORITHM, env.spec.num_envs)
    loop = OnPolicy(chunked_for(env, policy), policy, algorithm, ALGORITHM.num_steps, torch.Generator().manual_seed(0))
    rollout = loop.collect()
    env.close()

    def advance() -> int:
        algorithm.update(rollout, loop.generator)
        return loop.env_steps

    return Contender(name, advance)


def _rollout(name: str, deterministic: bool) -> Contender:
    """Acting and stepping; the critic is asked in both."""
    torch.manual_seed(0)
    env = sims.make(ENV, 0)
    policy = policies.make(POLICY, env.spec)
    chunked = chunked_for(env, policy)
    obs, generator = chunked.reset(seed=0), torch.Generator().manual_seed(0)

    @torch.no_grad()
    def advance() -> int:
        nonlocal obs
        sample = policy.act(obs, deterministic=deterministic, generator=generator)
        if sample.value is None:
            policy.value(obs)
        step = chunked.step(sample.action)
        obs = step.obs
        return int(step.valid.sum())

    return Contender(name, advance, env.close)
