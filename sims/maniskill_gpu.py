# SPDX-License-Identifier: Apache-2.0
"""ManiSkill 3 on a GPU: ManiSkill's own batch, all tensors on its device.

Not run on a GPU by us so far; the contract's test carries the marker `gpu`.

Two differences to the CPU form. Evaluation states (`init` given) are set row by row, because ManiSkill seeds one
generator per reset call; training states are drawn in one call per step, seeded by the first episode number among the
rows that start, so that a run repeats but a row's state also depends on which rows start with it. Physics on a GPU is
not bit-reproducible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from robo_rl.errors import ContractError
from robo_rl.seeding import first_training_episode
from robo_rl.types import Continuous, Obs, Step
from sims.maniskill_worker import build, flat_obs, seed_of

if TYPE_CHECKING:
    from sims.maniskill import ManiSkillConfig


class ManiSkillGpuEnv:
    """A `VecEnv` on `spec.device`. `counters`: `dropped` episodes with `non_finite` observations or rewards."""

    def __init__(self, config: ManiSkillConfig, seed: int = 0):
        self._env, self.spec = build(config, config.num_envs, gpu=True)
        self.autoreset = True
        self.counters = {"dropped": 0, "non_finite": 0}
        self._images = config.obs_mode != "state"
        self._success_ends = config.success_ends
        self._next_episode = first_training_episode(seed)
        device = self._env.device
        self._rows = torch.arange(config.num_envs, device=device)
        self._elapsed_steps = torch.zeros(config.num_envs, dtype=torch.int64, device=device)
        self._ended = torch.ones(config.num_envs, dtype=torch.bool, device=device)

    def reset(self, seed: int | None = None, rows: Tensor | None = None, init: Tensor | None = None) -> Obs:
        """See `VecEnv.reset`."""
        if seed is not None:
            if rows is not None:
                raise ContractError("reset(seed=...) restarts the training sequence of all rows; leave out `rows`.")
            self._next_episode = first_training_episode(seed)
        index = self._rows if rows is None else rows.to(self._rows.device)
        if init is None:
            return self._start(index, 0, self._draw(len(index)))
        if tuple(init.shape) != (len(index), 2):
            raise ContractError(f"reset: expected init of shape ({len(index)}, 2), got {tuple(init.shape)}.")
        if (init[:, 0] != 0).any():
            raise ContractError(f"reset: {self.spec.name} has task_id 0 only, got {init[:, 0].tolist()}.")
        obs: Obs = {}
        for row, (task_id, episode) in zip(index, init.tolist(), strict=True):
            obs = self._start(row[None], task_id, episode)
        return obs

    def step(self, action: Tensor) -> Step:
        """See `VecEnv.step`."""
        assert isinstance(self.spec.action, Continuous)
        expected = (self.spec.num_envs, self.spec.action.dim)
        if tuple(action.shape) != expected:
            raise ContractError(f"step: expected action {expected}, got {tuple(action.shape)}.")
        active = ~self._ended
        raw, reward, _, _, info = self._env.step(action.to(self._env.device))
        final_obs = {k: v.clone() for k, v in flat_obs(raw, self._images).items()}
        self._elapsed_steps += 1
        nothing = torch.zeros_like(active)
        success = info.get("success", nothing).bool() & active
        failed = info.get("fail", nothing).bool() & active
        bad = ~torch.isfinite(reward)
        for value in final_obs.values():
            if value.is_floating_point():
                bad |= ~torch.isfinite(value).flatten(1).all(dim=1)
        bad &= active
        count = int(bad.sum())
        self.counters["non_finite"] += count
        self.counters["dropped"] += count
        valid = active & ~bad
        terminated = (failed | success if self._success_ends == "terminated" else failed) & valid
        truncated = (self._elapsed_steps >= self.spec.max_episode_steps) & active | bad
        if self._success_ends == "truncated":
            truncated |= success
        truncated &= ~terminated
        for value in final_obs.values():
            value[~valid] = 0
        obs = final_obs
        self._ended |= terminated | truncated
        if self.autoreset and bool(self._ended.any()):
            rows = self._ended.nonzero().flatten()
            obs = self._start(rows, 0, self._draw(len(rows)))
        return Step(
            obs=obs,
            final_obs=final_obs,
            reward=reward.float().where(valid, torch.zeros_like(reward, dtype=torch.float32)),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            info={"success": success & valid},
        )

    def render(self, rows: Tensor | None = None) -> np.ndarray:
        """See `VecEnv.render`."""
        if self._env.render_mode is None:
            raise ContractError("Pictures need `render: true` (and a Vulkan driver) in the ManiSkill configuration.")
        pictures = self._env.render()
        return (pictures if rows is None else pictures[rows]).cpu().numpy()

    def state_dict(self) -> dict[str, Tensor] | None:
        """None: physics on a GPU does not continue bit-identically; resume restarts its episodes."""
        return None

    def load_state_dict(self, state: dict[str, Tensor]) -> Obs:
        raise ContractError(f"{self.spec.name} cannot continue from a saved state; start new episodes with reset().")

    def close(self) -> None:
        self._env.close()

    def _draw(self, count: int) -> int:
        """Take `count` training episodes; the number of the first."""
        first = self._next_episode
        self._next_episode += count
        return first

    def _start(self, rows: Tensor, task_id: int, episode: int) -> Obs:
        obs, _ = self._env.reset(seed=seed_of(task_id, episode), options={"env_idx": rows})
        self._elapsed_steps[rows] = 0
        self._ended[rows] = False
        return {k: v.clone() for k, v in flat_obs(obs, self._images).items()}
