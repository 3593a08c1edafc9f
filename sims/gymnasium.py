# SPDX-License-Identifier: Apache-2.0
"""Any Gymnasium environment or vector environment as a `VecEnv`.

Observations: `Dict` spaces are walked. Keys that are ours already stay; images, (height, width, 3) uint8, become
`observation.images.<name>` (`camera` where the space has no name for it); `achieved_goal` and `desired_goal` become
`observation.achieved_goal` and `observation.goal`; all other numbers are flattened, discrete ones as one-hot, and
joined in the space's order into `observation.state`, float32.

Autoreset: Gymnasium's own vector environments and those in its DISABLED mode let us reset single rows to named initial
states: with them the whole contract holds. Others reset themselves. In SAME_STEP mode the true last observation comes
from `info["final_obs"]`. In NEXT_STEP mode the observation of an ended row stays the last one, and the row's next step,
in which nothing but the reset happens, is `valid` False. Neither can be told an initial state, so they train but are
not evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from robo_rl.errors import ConfigError, ContractError, missing_extra, unknown_name
from robo_rl.seeding import TRAIN_EPISODES, first_training_episode, uniforms
from robo_rl.types import (
    ACHIEVED_GOAL,
    ENVIRONMENT_STATE,
    GOAL,
    IMAGES,
    STATE,
    TASK_ID,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
    Obs,
    Step,
)

if TYPE_CHECKING:
    import gymnasium
    from torch import Tensor


@dataclass(frozen=True)
class GymnasiumConfig:
    kind: Literal["gymnasium"] = "gymnasium"
    id: str = "CartPole-v1"
    """Gymnasium's id; `module:Name-v0` imports the module that registers it."""
    num_envs: int = 8
    vector: Literal["sync", "async", "own"] = "sync"
    """One after another, one process each, or the environment's own vector version (`vector_entry_point`)."""
    kwargs: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    """Arguments for the environment's constructor."""
    max_episode_steps: int | None = None
    """Time limit; None takes the registered one."""
    control_hz: float | None = None
    """Control rate [Hz]; None takes the environment's `render_fps`, or 1 where it has none."""
    task: str = ""
    """The instruction."""
    render: bool = False
    """Make `render()` possible."""


def make(config: GymnasiumConfig, seed: int = 0) -> GymnasiumVecEnv:
    """The registered environment `config.id` as a VecEnv.

    Raises:
        ConfigError: unknown id, no time limit, refused arguments, spaces that have no counterpart here.
    """
    try:
        import gymnasium
    except ImportError:
        raise missing_extra("gymnasium", "train") from None
    kwargs: dict[str, Any] = dict(config.kwargs)
    if config.render:
        kwargs["render_mode"] = "rgb_array"
    if config.max_episode_steps is not None:
        kwargs["max_episode_steps"] = config.max_episode_steps
    disabled = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    options: dict[str, Any] = {} if config.vector == "own" else disabled
    if config.vector == "async":
        options["context"] = "spawn"
    mode = "vector_entry_point" if config.vector == "own" else config.vector
    try:
        env = gymnasium.make_vec(config.id, config.num_envs, mode, options, **kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        if config.id in gymnasium.registry:
            raise ConfigError(f"{config.id}: {error}") from error
        raise unknown_name("Gymnasium environment", config.id, gymnasium.registry) from error
    except (gymnasium.error.Error, TypeError, ImportError) as error:
        raise ConfigError(f"Gymnasium cannot make {config.id} with {kwargs}: {error}") from error
    return GymnasiumVecEnv(env, seed, config.max_episode_steps, config.control_hz, config.task)


class GymnasiumVecEnv:
    """A `gymnasium.vector.VectorEnv` as a VecEnv. `info["success"]` is the environment's `success` or `is_success`,
    False where it has neither. Actions are clipped to the space's bounds. `close` closes the environment.
    """

    def __init__(
        self,
        env: gymnasium.vector.VectorEnv,
        seed: int = 0,
        max_episode_steps: int | None = None,
        control_hz: float | None = None,
        task: str = "",
    ):
        """`max_episode_steps` and `control_hz` None are read from `env`.

        Raises:
            ConfigError: no time limit, or spaces that have no counterpart here.
        """
        from gymnasium import spaces, vector

        self._env, name = env, env.spec.id if env.spec else type(env.unwrapped).__name__
        steps = max_episode_steps or (env.spec.max_episode_steps if env.spec else None)
        if not steps:
            env.close()
            raise ConfigError(f"{name} has no time limit. Set `max_episode_steps`.")
        self._mode = env.metadata.get("autoreset_mode")
        if not isinstance(self._mode, vector.AutoresetMode):
            raise ConfigError(f"{name} does not say in metadata['autoreset_mode'] when it resets, got {self._mode!r}.")
        own = isinstance(env.unwrapped, vector.SyncVectorEnv | vector.AsyncVectorEnv)
        self.nameable = own or self._mode is vector.AutoresetMode.DISABLED
        """Whether single rows can be reset to named initial states."""
        self._next_step = self._mode is vector.AutoresetMode.NEXT_STEP and not self.nameable
        self._same_step = self._mode is vector.AutoresetMode.SAME_STEP
        self._leaves = _leaves(env.single_observation_space, name)
        match env.single_action_space:
            case spaces.Discrete():
                action = Discrete(int(env.single_action_space.n))
            case spaces.Box():
                low, high = env.single_action_space.low.ravel(), env.single_action_space.high.ravel()
                action = Continuous(tuple(low.tolist()), tuple(high.tolist()))
            case other:
                raise ConfigError(f"{name}: expected a Box or Discrete action space, got {other}.")
        n = env.num_envs
        self.autoreset = True
        self.counters = {"non_finite": 0}
        self._next_episode = first_training_episode(seed)
        self._restarting = np.zeros(n, bool)  # NEXT_STEP mode: the next step only resets these
        self._waiting = np.zeros(n, bool)  # ended with autoreset off, not yet reset by the user
        self._obs: dict[str, np.ndarray] = {}
        self._draw(np.arange(n))
        self.spec = EnvSpec(
            name=name,
            num_envs=n,
            obs={key: _array_spec(key, value, self._leaves) for key, value in self._obs.items()},
            action=action,
            control_hz=control_hz or float(env.metadata.get("render_fps") or 1.0),
            max_episode_steps=steps,
            tasks=(task,),
            simulator=f"gymnasium {version('gymnasium')}",
        )

    # --- the contract --------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None, rows: Tensor | None = None, init: Tensor | None = None) -> Obs:
        """See `VecEnv.reset`. Raises ContractError for `rows` and `init` where `nameable` is False."""
        n = self.spec.num_envs
        if seed is not None:
            if rows is not None:
                raise ContractError("`seed` restarts the whole sequence of episodes: give it without `rows`.")
            self._next_episode = first_training_episode(seed)
        if not self.nameable and (rows is not None or init is not None):
            raise ContractError(
                f"{self.spec.name} resets itself ({self._mode}) and cannot be told an initial state. "
                "Use `vector: sync` or `async`, or its DISABLED autoreset mode."
            )
        which = np.arange(n) if rows is None else np.asarray(rows.cpu(), dtype=np.int64)
        if init is None:
            self._draw(which)
        else:
            pairs = np.asarray(init.cpu(), dtype=np.int64)
            if pairs.shape != (len(which), 2) or (pairs[:, 0] != 0).any() or (pairs[:, 1] < 0).any():
                raise ContractError(f"`init` must be ({len(which)}, 2) of (0, episode >= 0), got {pairs.tolist()[:3]}.")
            self._place(which, pairs[:, 1])
        return self._tensors(self._obs)

    def step(self, action: Tensor) -> Step:
        """See `VecEnv.step`."""
        import torch

        if not self.autoreset and not self.nameable:
            raise ContractError(f"{self.spec.name} resets itself ({self._mode}): `autoreset` cannot be off.")
        skipped = (self._restarting if self._next_step else self._waiting).copy()
        raw, reward, terminated, truncated, info = self._env.step(self._action(action))
        obs, success = self._mapped(raw), _success(info, self.spec.num_envs)
        reward = np.array(reward, dtype=np.float32)
        terminated, truncated = np.array(terminated, dtype=bool), np.array(truncated, dtype=bool)
        final_obs = obs
        if self._same_step and (terminated | truncated).any():
            final_obs = {key: value.copy() for key, value in obs.items()}
            self._finals(final_obs, success, info, np.flatnonzero(terminated | truncated))
        broken = (_blank_non_finite(reward) | _blank_non_finite(*obs.values(), *final_obs.values())) & ~skipped
        self.counters["non_finite"] += int(broken.sum())
        if self.nameable:
            truncated |= broken  # the others can only go on
        ended, valid = terminated | truncated, ~(skipped | broken)
        reward[~valid], success[~valid] = 0.0, False
        terminated &= ~skipped
        truncated &= ~skipped & ~terminated
        self._obs = obs
        if self._next_step:
            self._restarting = ended & ~skipped
        elif self.nameable and ended.any():
            rows = np.flatnonzero(ended)
            if self.autoreset:
                self._draw(rows)
            else:
                self._obs = final_obs
                self._waiting |= ended
                # An ended environment must not be stepped: start something that nobody looks at.
                self._reset(rows, np.zeros(len(rows), np.int64))
        tensors = self._tensors(self._obs)
        return Step(
            obs=tensors,
            final_obs=tensors if final_obs is self._obs else self._tensors(final_obs),
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            valid=torch.from_numpy(valid),
            info={"success": torch.from_numpy(success)},
        )

    def render(self, rows: Tensor | None = None) -> np.ndarray:
        """See `VecEnv.render`. Raises ConfigError where the environment was made without `rgb_array`."""
        if self._env.render_mode != "rgb_array":
            raise ConfigError(f"{self.spec.name} was made without pictures. Set `render: true`.")
        frames: Any = self._env.render()
        which = range(self.spec.num_envs) if rows is None else rows.tolist()
        return np.stack([np.asarray(frames[row], dtype=np.uint8) for row in which])

    def state_dict(self) -> dict[str, Tensor] | None:
        """None: Gymnasium has no way to save an environment; resume restarts its episodes."""
        return None

    def load_state_dict(self, state: dict[str, Tensor]) -> Obs:
        raise ContractError(f"{self.spec.name} cannot continue from a saved state; start new episodes with reset().")

    def close(self) -> None:
        self._env.close()

    # --- starting episodes ---------------------------------------------------------------------------------------

    def _draw(self, rows: np.ndarray) -> None:
        """Start the next training episodes in `rows`, or in all from one seed where rows cannot be named."""
        episode = self._next_episode + np.arange(len(rows))
        self._next_episode += len(rows)
        if self.nameable:
            self._place(rows, episode)
        else:
            self._restarting[:] = False
            self._obs = self._mapped(self._env.reset(seed=int(_seeds(episode)[0]))[0])

    def _place(self, rows: np.ndarray, episode: np.ndarray) -> None:
        """Start the named episodes and show their first observations."""
        if not len(rows):
            return
        self._waiting[rows] = False
        first = self._mapped(self._reset(rows, _seeds(episode)))
        if not self._obs:
            self._obs = first
            return
        self._obs = {key: value.copy() for key, value in self._obs.items()}
        for key, value in first.items():
            self._obs[key][rows] = value[rows]

    def _reset(self, rows: np.ndarray, seeds: np.ndarray) -> Any:
        n = self._env.num_envs
        given: list[int | None] = [None] * n
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            given[row] = seed
        mask = np.zeros(n, bool)
        mask[rows] = True
        # The type says int only; lists are documented and accepted.
        return self._env.reset(seed=given, options=None if mask.all() else {"reset_mask": mask})[0]  # type: ignore[arg-type]

    # --- translating ---------------------------------------------------------------------------------------------

    def _action(self, action: Tensor) -> np.ndarray:
        space: Any = self._env.single_action_space
        array = action.detach().cpu().numpy()
        discrete = isinstance(self.spec.action, Discrete)
        expected = (self.spec.num_envs,) if discrete else (self.spec.num_envs, self.spec.action.dim)  # type: ignore[union-attr]
        if array.shape != expected:
            raise ContractError(f"{self.spec.name}: action must have shape {expected}, got {array.shape}.")
        if discrete:
            return array.astype(space.dtype) + space.start
        if not np.isfinite(array).all():
            raise ContractError(f"{self.spec.name}: the action has a NaN or infinity.")
        return np.clip(array.reshape(-1, *space.shape), space.low, space.high).astype(space.dtype)

    def _mapped(self, raw: Any) -> dict[str, np.ndarray]:
        """Gymnasium's batched observation under our keys."""
        parts: dict[str, list[np.ndarray]] = {}
        for leaf in self._leaves:
            value = raw
            for key in leaf.path:
                value = value[key]
            parts.setdefault(leaf.key, []).append(leaf.convert(np.asarray(value)))
        return {key: np.concatenate(arrays, axis=1) if len(arrays) > 1 else arrays[0] for key, arrays in parts.items()}

    def _finals(self, final_obs: dict[str, np.ndarray], success: np.ndarray, info: dict, rows: np.ndarray) -> None:
        """Write what SAME_STEP mode hides in `info` about the ended rows."""
        if "final_obs" not in info:
            raise ContractError(f"{self.spec.name} resets in the same step but gives no info['final_obs'].")
        finals = info["final_obs"]
        per_row = isinstance(finals, np.ndarray) and finals.dtype == object
        last = {} if per_row else self._mapped(finals)
        for row in rows.tolist():
            values = self._mapped(_batch_of_one(finals[row])) if per_row else {k: v[[row]] for k, v in last.items()}
            for key, value in values.items():
                final_obs[key][row] = value[0]
        if "final_info" in info:
            success[rows] = _success(info["final_info"], len(success))[rows]

    def _tensors(self, obs: dict[str, np.ndarray]) -> Obs:
        import torch

        return {key: torch.from_numpy(value) for key, value in obs.items()}


@dataclass(frozen=True)
class _Leaf:
    """One array inside Gymnasium's observation: where it is, under which key it goes and how, and its numbers there."""

    path: tuple[str, ...]
    key: str
    convert: Callable[[np.ndarray], np.ndarray]
    size: int = 0


_OURS = {key: key for key in (STATE, ENVIRONMENT_STATE, GOAL, ACHIEVED_GOAL, TASK_ID)}
_KNOWN = _OURS | {"achieved_goal": ACHIEVED_GOAL, "desired_goal": GOAL}


def _leaves(space: gymnasium.Space, name: str, path: tuple[str, ...] = ()) -> list[_Leaf]:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return [leaf for key, sub in space.spaces.items() for leaf in _leaves(sub, name, (*path, key))]
    last = path[-1] if path else ""
    key = _KNOWN.get(last, STATE)
    match space:
        case spaces.Box() if len(space.shape) == 3 and space.dtype == np.uint8:
            if space.shape[2] != 3:
                raise ConfigError(f"{name}: image `{last}` must be (height, width, 3), got {space.shape}.")
            return [_Leaf(path, last if last.startswith(IMAGES) else IMAGES + (".".join(path) or "camera"), np.array)]
        case spaces.Discrete() if last == TASK_ID:
            return [_Leaf(path, TASK_ID, lambda x: x.astype(np.int64))]
        case spaces.Discrete():
            n, start = int(space.n), int(space.start)
            return [_Leaf(path, key, lambda x: np.eye(n, dtype=np.float32)[x - start], n)]
        case spaces.Box() | spaces.MultiBinary():
            return [_Leaf(path, key, _flat, int(np.prod(space.shape)))]
    raise ConfigError(
        f"{name}: observation `{'.'.join(path)}` must be Box, Discrete, MultiBinary or Dict, got {space}."
    )


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1).astype(np.float32)


def _array_spec(key: str, value: np.ndarray, leaves: list[_Leaf]) -> ArraySpec:
    parts = [leaf for leaf in leaves if leaf.key == key]
    names = [f"{'.'.join(part.path)}.{i}" for part in parts for i in range(part.size)] if len(parts) > 1 else []
    return ArraySpec(value.shape[1:], value.dtype.name, tuple(names))


def _blank_non_finite(*arrays: np.ndarray) -> np.ndarray:
    """(N,) bool, the rows where any array has a NaN or infinity; they become 0 there."""
    broken = np.zeros(len(arrays[0]), bool)
    for array in arrays:
        if array.dtype.kind == "f":
            bad = ~np.isfinite(array).reshape(len(array), -1).all(1)
            array[bad] = 0.0
            broken |= bad
    return broken


def _batch_of_one(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _batch_of_one(sub) for key, sub in value.items()}
    return np.asarray(value)[None]


def _success(info: dict[str, Any], n: int) -> np.ndarray:
    for name in ("success", "is_success"):
        if name in info:
            value = np.asarray(info[name])
            return np.array([bool(x) for x in value]) if value.dtype == object else value.astype(bool).reshape(n).copy()
    return np.zeros(n, bool)


def _seeds(episode: np.ndarray) -> np.ndarray:
    """(M,) seeds below 2**32, even for evaluation and odd for training, so that the two never meet."""
    half = (uniforms(np.zeros_like(episode), episode, 1)[:, 0] * 2**31).astype(np.int64)
    return 2 * half + (episode >= TRAIN_EPISODES)
