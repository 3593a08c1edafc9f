# SPDX-License-Identifier: Apache-2.0
"""Our environments in Gymnasium's interface. Importing this module registers the tabletop's tasks:

    import gymnasium, sims.gymnasium_export
    gymnasium.make("robo_rl/Lift-v0")
    gymnasium.make_vec("robo_rl/Lift-v0", num_envs=64)

or in one, `gymnasium.make("sims.gymnasium_export:robo_rl/Lift-v0")`. Keyword arguments are fields of `TabletopConfig`,
but for the time limit, which is Gymnasium's `max_episode_steps`.
Observations are a Dict with our keys. `info` has `success` and, as Stable-Baselines3 calls it, `is_success`.
`reset(options={"init": ...})` takes the initial states' names, see `VecEnv.reset`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from robo_rl.errors import ConfigError, ContractError, unknown_name
from robo_rl.seeding import first_training_episode
from robo_rl.types import IMAGES, TASK_ID, Continuous, EnvSpec, Obs, VecEnv

if TYPE_CHECKING:
    from torch import Tensor

TASKS = {"Reach": "reach", "Push": "push", "Lift": "lift", "PickPlace": "pick_place", "Stack": "stack"}
NO_LIMIT = 2**31 - 1
PICTURES: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}


def register() -> None:
    """Make `robo_rl/Reach-v0`, `Push`, `Lift`, `PickPlace` and `Stack` known to Gymnasium."""
    from sims.mujoco import tabletop_tasks

    for name, task in TASKS.items():
        if f"robo_rl/{name}-v0" not in gymnasium.registry:
            gymnasium.register(
                f"robo_rl/{name}-v0",
                entry_point="sims.gymnasium_export:make_single",
                vector_entry_point="sims.gymnasium_export:make_vector",
                kwargs={"task": task},
                max_episode_steps=tabletop_tasks.TASKS[task].horizon,
            )


def make_single(task: str, render_mode: str | None = None, **settings: Any) -> SingleEnv:
    """The entry point of `gymnasium.make`, whose TimeLimit ends episodes. Raises ConfigError for an unknown setting."""
    return SingleEnv(_tabletop(task, 1, NO_LIMIT, {"num_threads": 1, **settings}), render_mode)


def make_vector(
    task: str,
    num_envs: int = 1,
    max_episode_steps: int | None = None,
    render_mode: str | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    **settings: Any,
) -> VectorEnv:
    """The entry point of `gymnasium.make_vec`. Raises ConfigError for an unknown setting."""
    return VectorEnv(_tabletop(task, num_envs, max_episode_steps, settings), render_mode, AutoresetMode(autoreset_mode))


def _tabletop(task: str, num_envs: int, horizon: int | None, settings: dict[str, Any]) -> VecEnv:
    from sims.mujoco.tabletop import TabletopConfig, TabletopEnv

    given = {"task": task, "num_envs": num_envs, "horizon": horizon, "stagger": False}
    known = {field.name for field in fields(TabletopConfig)} - given.keys()
    for name in settings.keys() - known:
        raise unknown_name("tabletop setting", name, known)
    return TabletopEnv(TabletopConfig(**given, **settings))


class SingleEnv(gymnasium.Env):
    """A VecEnv of one environment as a `gymnasium.Env`."""

    metadata = PICTURES

    def __init__(self, env: VecEnv, render_mode: str | None = None):
        if env.spec.num_envs != 1:
            raise ConfigError(f"{env.spec.name}: a gymnasium.Env is one environment, got num_envs {env.spec.num_envs}.")
        self.sim, self.render_mode = env, render_mode
        self.sim.autoreset = False
        self.metadata = {**PICTURES, "render_fps": round(env.spec.control_hz)}
        self.observation_space, self.action_space = _spaces(env.spec)
        self._started = False

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict[str, np.ndarray], dict]:
        """`options["init"]`: `(task_id, episode)`."""
        super().reset(seed=seed)
        if seed is None and not self._started:
            seed = int(self.np_random.integers(2**31))  # unseeded runs differ, as everywhere in Gymnasium
        self._started = True
        named = None if options is None or "init" not in options else _tensor(np.array([options["init"]], np.int64))
        obs = self.sim.reset(seed=None if seed is None else _small(seed), init=named)
        return _first(obs), {}

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        step = self.sim.step(_tensor(np.asarray(action)[None]))
        info: dict[str, Any] = {key: value[0].item() for key, value in step.info.items() if value.ndim == 1}
        info["is_success"] = info["success"]
        return _first(step.obs), float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), info

    def render(self) -> np.ndarray | None:
        return self.sim.render()[0] if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self.sim.close()


class VectorEnv(gymnasium.vector.VectorEnv):
    """A VecEnv as a `gymnasium.vector.VectorEnv`. Time limits are the environment's own.

    SAME_STEP (as the VecEnv works inside): `info["final_obs"]`, a dict of arrays for all rows, is the true next
    observation; `info["_final_obs"]` says where an episode ended. DISABLED: reset ended rows by
    `reset(options={"reset_mask": mask})`.
    """

    def __init__(
        self, env: VecEnv, render_mode: str | None = None, autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP
    ):
        if autoreset_mode is AutoresetMode.NEXT_STEP:
            raise ConfigError(f"{env.spec.name} has the autoreset modes SAME_STEP and DISABLED, not NEXT_STEP.")
        self.sim, self.render_mode = env, render_mode
        self.sim.autoreset = autoreset_mode is AutoresetMode.SAME_STEP
        self.metadata = {**PICTURES, "render_fps": round(env.spec.control_hz), "autoreset_mode": autoreset_mode}
        self.num_envs = env.spec.num_envs
        self.single_observation_space, self.single_action_space = _spaces(env.spec)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._started = False

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """`seed`: one for the sequence of all episodes, or one for each row's next. `options`: `reset_mask` (N,) bool,
        and `init` (rows, 2) of `(task_id, episode)`."""
        options = options or {}
        mask, init = options.get("reset_mask"), options.get("init")
        rows = np.arange(self.num_envs) if mask is None else np.flatnonzero(np.asarray(mask, dtype=bool))
        one = None
        if isinstance(seed, int | np.integer):
            one = int(seed)
        elif seed is not None and init is None:
            each = [seed[row] for row in rows]
            if None not in each:
                episode = np.array([first_training_episode(_small(s)) for s in each if s is not None])
                init = np.stack([episode % len(self.sim.spec.tasks), episode], axis=1)
        super().reset(seed=one)
        if one is not None and mask is not None:
            raise ContractError("One `seed` restarts all rows: give a list of seeds with `reset_mask`.")
        if one is None and init is None and mask is None and not self._started:
            one = int(self.np_random.integers(2**31))  # unseeded runs differ, as everywhere in Gymnasium
        self._started = True
        obs = self.sim.reset(
            seed=None if one is None else _small(one),
            rows=None if mask is None else _tensor(rows),
            init=None if init is None else _tensor(np.asarray(init, dtype=np.int64)),
        )
        return _arrays(obs), {}

    def step(self, actions: Any) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        step = self.sim.step(_tensor(np.asarray(actions)))
        info: dict[str, Any] = {key: value.numpy(force=True).copy() for key, value in step.info.items()}
        info["is_success"] = info["success"]
        info["valid"] = step.valid.numpy(force=True).copy()
        ended = (step.terminated | step.truncated).numpy(force=True)
        if self.sim.autoreset and ended.any():
            info |= {"final_obs": _arrays(step.final_obs), "_final_obs": ended}
        reward = step.reward.numpy(force=True).astype(np.float64)
        terminated, truncated = (x.numpy(force=True).copy() for x in (step.terminated, step.truncated))
        return _arrays(step.obs), reward, terminated, truncated, info

    def render(self) -> tuple[np.ndarray, ...] | None:
        return tuple(self.sim.render()) if self.render_mode == "rgb_array" else None

    def close_extras(self, **kwargs: Any) -> None:
        self.sim.close()


def _spaces(spec: EnvSpec) -> tuple[spaces.Dict, spaces.Space]:
    obs: dict[str, spaces.Space] = {}
    for key, array in spec.obs.items():
        if key == TASK_ID:
            obs[key] = spaces.Discrete(len(spec.tasks))
        elif key.startswith(IMAGES):
            obs[key] = spaces.Box(0, 255, array.shape, np.uint8)
        else:
            obs[key] = spaces.Box(-np.inf, np.inf, array.shape, np.dtype(array.dtype).type)
    match spec.action:
        case Continuous(low, high):
            return spaces.Dict(obs), spaces.Box(np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32)
        case discrete:
            return spaces.Dict(obs), spaces.Discrete(discrete.n)


def _small(seed: int) -> int:
    """Seeds name sequences of 2**32 episodes each, in int64."""
    return seed % (2**31 - 1)


def _arrays(obs: Obs) -> dict[str, np.ndarray]:
    """Copies: Gymnasium's observations outlive the next step."""
    return {key: value.numpy(force=True).copy() for key, value in obs.items()}


def _first(obs: Obs) -> dict[str, np.ndarray]:
    return {key: value[0] for key, value in _arrays(obs).items()}


def _tensor(array: np.ndarray) -> Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))


register()
