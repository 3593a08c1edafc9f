# SPDX-License-Identifier: Apache-2.0
"""Our environments as Stable-Baselines3's VecEnv, without a process or a wrapper per environment:

    from sims.sb3 import SB3VecEnv
    model = PPO("MlpPolicy", SB3VecEnv(sims.make(TabletopConfig(num_envs=64)), keys=(STATE, ENVIRONMENT_STATE)))

Stable-Baselines3 cannot be told to leave a step out. A row that nobody may learn from (`Step.valid` False: broken
physics, a lost worker) reaches it as an episode that terminated with reward 0 and `info["valid"]` False.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from robo_rl.errors import ConfigError, missing_extra
from robo_rl.types import IMAGES, TASK_ID, Continuous, EnvSpec, Obs, VecEnv

try:
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv as Base
except ImportError as error:
    raise missing_extra("stable-baselines3", "sb3") from error


class SB3VecEnv(Base):
    """A VecEnv of ours behind Stable-Baselines3's interface, numpy in and out.

    Attributes:
        env: ours; its `autoreset` is switched on, as Stable-Baselines3 expects.
    """

    def __init__(self, env: VecEnv, keys: Sequence[str] | None = None):
        """
        Args:
            keys: vectors to concatenate into one Box for `MlpPolicy`, or one image for `CnnPolicy`; None gives a Dict
                of everything for `MultiInputPolicy`, its names without dots (`observation_state`).

        Raises:
            ConfigError: unknown keys, or images among several keys.
        """
        self.env, self._keys = env, None if keys is None else tuple(keys)
        env.autoreset = True
        super().__init__(env.spec.num_envs, _observation_space(env.spec, self._keys), _action_space(env.spec))
        self._action: np.ndarray | None = None
        self._seed: int | None = None

    def reset(self) -> Any:
        seed, self._seed = self._seed, None
        obs = self.env.reset(seed=seed) if seed is not None else self.env.reset()
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return self._numpy(obs)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """The seed of the next full reset; every row has its own initial states under one."""
        self._seed = seed
        return [seed] * self.num_envs

    def step_async(self, actions: np.ndarray) -> None:
        self._action = np.asarray(actions)

    def step_wait(self) -> Any:
        """Observation, reward (N,), done (N,), and infos: `is_success`, `valid`, and where an episode ended
        `terminal_observation` and `TimeLimit.truncated`."""
        import torch

        assert self._action is not None, "step_wait without step_async"
        dtype = torch.float32 if isinstance(self.env.spec.action, Continuous) else torch.int64
        step = self.env.step(torch.as_tensor(self._action, dtype=dtype, device=self.env.spec.device))
        terminated, truncated, valid = (x.cpu().numpy() for x in (step.terminated, step.truncated, step.valid))
        done = terminated | truncated | ~valid
        success = step.info["success"].cpu().numpy()
        infos: list[dict[str, Any]] = [
            {"is_success": bool(s), "valid": bool(v), "TimeLimit.truncated": False}
            for s, v in zip(success, valid, strict=True)
        ]
        if done.any():
            final = self._numpy(step.final_obs)
            for row in np.flatnonzero(done):
                infos[row]["terminal_observation"] = (
                    {k: v[row] for k, v in final.items()} if isinstance(final, dict) else final[row]
                )
                infos[row]["TimeLimit.truncated"] = bool(truncated[row] and not terminated[row] and valid[row])
        reward = np.where(valid, step.reward.cpu().numpy(), 0.0).astype(np.float32)
        return self._numpy(step.obs), reward, done, infos

    def close(self) -> None:
        self.env.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        return list(self.env.render())

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of the batched environment, once per row: the rows share it."""
        value = "rgb_array" if attr_name == "render_mode" else getattr(self.env, attr_name)
        return [value] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the batched environment; it cannot differ between rows."""
        if indices is not None:
            raise ConfigError(f"`{attr_name}` is one attribute of all rows; set it without `indices`.")
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call a method of the batched environment, once; its result is repeated for every row."""
        return [getattr(self.env, method_name)(*args, **kwargs)] * len(list(self._get_indices(indices)))

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))

    def _numpy(self, obs: Obs) -> Any:
        """Copies: our buffers are overwritten by the next step, and rollout buffers keep references."""
        if self._keys is None:
            return {_name(k): v.cpu().numpy().copy() for k, v in obs.items()}
        if len(self._keys) == 1:
            return obs[self._keys[0]].cpu().numpy().copy()
        return np.concatenate([obs[k].cpu().numpy() for k in self._keys], axis=1)


def _name(key: str) -> str:
    return key.replace(".", "_")  # torch refuses modules with dots in their names


def _observation_space(spec: EnvSpec, keys: tuple[str, ...] | None) -> gymnasium.Space:
    def box(key: str) -> gymnasium.Space:
        entry = spec.obs[key]
        if key == TASK_ID:
            return gymnasium.spaces.Discrete(len(spec.tasks))
        if entry.dtype == "uint8":
            return gymnasium.spaces.Box(0, 255, entry.shape, np.uint8)
        return gymnasium.spaces.Box(-np.inf, np.inf, entry.shape, np.dtype(entry.dtype).type)

    if keys is None:
        return gymnasium.spaces.Dict({_name(key): box(key) for key in spec.obs})
    unknown = [key for key in keys if key not in spec.obs]
    if unknown or not keys:
        raise ConfigError(f"`keys` names {unknown}, but `{spec.name}` gives {sorted(spec.obs)}.")
    if len(keys) == 1 and keys[0] != TASK_ID:
        return box(keys[0])
    if any(key.startswith(IMAGES) or len(spec.obs[key].shape) != 1 for key in keys):
        raise ConfigError(
            f"Only vectors can be concatenated; got keys {keys}. Give keys=None for a Dict of everything."
        )
    return gymnasium.spaces.Box(-np.inf, np.inf, (sum(spec.obs[key].shape[0] for key in keys),), np.float32)


def _action_space(spec: EnvSpec) -> gymnasium.Space:
    if isinstance(spec.action, Continuous):
        return gymnasium.spaces.Box(np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32))
    return gymnasium.spaces.Discrete(spec.action.n)
