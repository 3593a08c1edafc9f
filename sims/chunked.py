# SPDX-License-Identifier: Apache-2.0
"""Action chunks: one `step` runs several actions in a row. Axes: N num_envs, H the actions of a chunk, A action_dim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import IMAGES, Continuous, Step, VecEnv

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from robo_rl.types import Obs


class ChunkedEnv:
    """A VecEnv whose `step` takes (N, H, A): the policy sees an observation only where a chunk starts.

    The wrapped environment runs with autoreset off, so a row whose episode ends inside a chunk stands still for the
    rest of it; with `autoreset` on, it is reset before the next chunk. Cameras draw at the end of chunks only.
    """

    def __init__(self, env: VecEnv, chunk: int):
        """Raises ConfigError where there are no continuous actions to put into chunks."""
        if not isinstance(env.spec.action, Continuous) or chunk < 1:
            raise ConfigError(
                f"Chunks need continuous actions and at least one of them; got {env.spec.action} and chunk = {chunk}."
            )
        self.env, self.chunk = env, chunk
        self.spec = env.spec
        self.counters = env.counters
        self.autoreset = True
        env.autoreset = False

    def reset(self, seed: int | None = None, rows: Tensor | None = None, init: Tensor | None = None) -> Obs:
        """See `VecEnv.reset`."""
        return self.env.reset(seed, rows, init)

    def step(self, action: Tensor) -> Step:
        """Run a chunk (N, H, A).

        Returns:
            A Step with one row per action where it can have one: `reward` (N, H) and `valid` (N, H), False (and reward
            0) for actions that were not executed because the episode had ended, and for the whole chunk of a row in
            which something broke. Ends are (N,), of the chunk. `info["success"]` (N,) is that of the last executed
            action, `info["success_once"]` (N,) that of any.
        """
        import torch

        expected = (self.spec.num_envs, self.chunk, self.spec.action.dim)  # type: ignore[union-attr]
        if tuple(action.shape) != expected:
            raise ContractError(
                f"A chunk of actions must have shape {expected}, (num_envs, chunk, action_dim); got "
                f"{tuple(action.shape)}. The policy's `executed` and the environment's chunk have to agree."
            )
        draws = hasattr(self.env, "cameras_on")
        terminated, truncated, broken, success, success_once = torch.zeros(
            5, self.spec.num_envs, dtype=torch.bool, device=action.device
        )
        final_obs: Obs = {}
        reward, valid = [], []
        for i in range(self.chunk):
            if draws:
                self.env.cameras_on = i == self.chunk - 1  # type: ignore[attr-defined]
            step = self.env.step(action[:, i])
            running = ~(terminated | truncated)
            broken |= running & ~step.valid
            terminated |= step.terminated & running
            truncated |= step.truncated & running
            success = torch.where(running, step.info["success"], success)
            success_once |= step.info["success"] & step.valid
            for key, value in step.final_obs.items():
                # An ended row stands still: the pictures drawn at the end of the chunk are its last ones.
                rows = slice(None) if i == 0 or (draws and key.startswith(IMAGES)) else running
                final_obs.setdefault(key, torch.empty_like(value))[rows] = value[rows]
            reward.append(step.reward.clone())
            valid.append(step.valid.clone())
        ended = terminated | truncated
        obs = step.obs  # pyright: ignore[reportPossiblyUnboundVariable]  # a chunk has at least one action
        if self.autoreset and bool(ended.any()):
            obs = self.env.reset(rows=ended.nonzero().squeeze(-1))
        usable = torch.stack(valid, dim=1) & ~broken[:, None]
        return Step(
            obs=obs,
            final_obs=final_obs,
            reward=torch.where(usable, torch.stack(reward, dim=1), 0.0),
            terminated=terminated,
            truncated=truncated & ~terminated,
            valid=usable,
            info={"success": success, "success_once": success_once},
        )

    def render(self, rows: Tensor | None = None) -> np.ndarray:
        """See `VecEnv.render`."""
        return self.env.render(rows)

    def state_dict(self) -> dict[str, Tensor] | None:
        """See `VecEnv.state_dict`; chunks leave nothing to remember between them."""
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> Obs:
        """See `VecEnv.load_state_dict`."""
        obs = self.env.load_state_dict(state)
        self.counters = self.env.counters
        return obs

    def close(self) -> None:
        self.env.close()
