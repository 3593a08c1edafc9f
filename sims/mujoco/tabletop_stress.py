# SPDX-License-Identifier: Apache-2.0
"""Random actions for a long time: does the tabletop's physics stay finite?"""

from __future__ import annotations

import time

from robo_rl.errors import ContractError
from sims.mujoco.tabletop import TabletopConfig, TabletopEnv


def stress(config: TabletopConfig, env_steps: int, seed: int = 0) -> dict[str, float]:
    """Step with uniform random actions until `env_steps` are done; one of four rows holds its action for 10 steps.

    Returns:
        `env_steps` done, `non_finite` rows that the guard caught, `wall_s`.

    Raises:
        ContractError: something that is not finite got past the guard.
    """
    import torch

    env = TabletopEnv(config, seed)
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)  # type: ignore[union-attr]
    action = torch.zeros(config.num_envs, len(low))
    env.reset()
    done, start = 0, time.perf_counter()
    while done < env_steps:
        fresh = low + (high - low) * torch.rand(action.shape, generator=generator)
        held = torch.arange(config.num_envs) % 4 == 0
        action = torch.where((held & (done // config.num_envs % 10 != 0))[:, None], action, fresh)
        step = env.step(action)
        values = [
            step.reward,
            *(v for obs in (step.obs, step.final_obs) for v in obs.values() if v.is_floating_point()),
        ]
        if not all(bool(v.isfinite().all()) for v in values):
            raise ContractError(f"{env.spec.name}: an observation or reward is not finite after {done} steps.")
        done += config.num_envs
    wall = time.perf_counter() - start
    env.close()
    return {"env_steps": done, "non_finite": env.counters["non_finite"], "wall_s": wall}
