# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's MuJoCo v5 tasks, stepped natively in batches: same models, observations, rewards and ends.

From the same state with the solver's warm start off on both sides every step equals Gymnasium's. Left on, as here and
there by default, `mujoco.rollout` starts each control step without it, so trajectories part after some contacts while
their distribution stays the same. Settings are those of `gymnasium.make` without arguments.

Axes: N num_envs, M some of the rows.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

import mujoco
import numpy as np

from robo_rl.errors import ConfigError, ContractError, missing_extra, unknown_name
from robo_rl.seeding import first_training_episode, uniforms
from robo_rl.types import STATE, ArraySpec, Continuous, EnvSpec, Step
from sims.mujoco.cameras import Renderer
from sims.mujoco.gym_rewards import TASKS, VELOCITY_NOISE, After
from sims.mujoco.physics import FULL, BatchPhysics

if TYPE_CHECKING:
    from torch import Tensor

    from robo_rl.types import Obs


@dataclass(frozen=True)
class MujocoConfig:
    kind: Literal["mujoco"] = "mujoco"
    task: str = "HalfCheetah-v5"
    """Gymnasium's id of the task."""
    num_envs: int = 64
    horizon: int | None = None
    """Steps per episode; None takes Gymnasium's time limit."""
    num_threads: int | None = None
    """Physics threads; None takes every core that gets 8 environments or more. Results do not depend on it."""


class MujocoEnv:
    """A VecEnv. The observation is `observation.state`, float32; there is no success."""

    def __init__(self, config: MujocoConfig, seed: int = 0, warm_start: bool = True):
        """`warm_start` False turns the solver's off altogether, for comparisons step by step.

        Raises ConfigError for an unknown task and where gymnasium is missing.
        """
        if config.task not in TASKS:
            raise unknown_name("MuJoCo task", config.task, TASKS)
        if config.num_envs < 1:
            raise ConfigError(f"env.num_envs must be at least 1, got {config.num_envs}.")
        self.config, self.task = config, TASKS[config.task]
        self.autoreset = True
        self.counters = {"non_finite": 0}
        self.horizon = config.horizon or self.task.horizon
        model = mujoco.MjModel.from_xml_path(str(_assets() / self.task.xml))
        # Otherwise MuJoCo restarts a diverged row from the model's default pose and says nothing.
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        if not warm_start:
            model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_WARMSTART
        n = config.num_envs
        self._physics = BatchPhysics(model, n, self.task.frame_skip, config.num_threads)
        self._dt = model.opt.timestep * self.task.frame_skip
        self._low, self._high = model.actuator_ctrlrange.T.astype(np.float64).copy()
        self._data = mujoco.MjData(model)
        self._restep = self.task.contact or model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4
        self._initial = model.qpos0.copy()
        self._studio: Renderer | None = None
        self._state = np.zeros((n, self._physics.nstate))
        self._bodies = np.zeros((n, len(self.task.bodies), 3))
        self._elapsed = np.zeros(n, np.int64)
        self._ended = np.zeros(n, bool)
        self._next_episode = np.array([first_training_episode(seed)])
        self._place(np.arange(n), np.zeros(n, np.int64), np.arange(n))
        self._obs = self._observe(slice(None))
        self.spec = EnvSpec(
            name=config.task,
            num_envs=n,
            obs={STATE: ArraySpec(self._obs.shape[1:])},
            action=Continuous(tuple(self._low.tolist()), tuple(self._high.tolist())),
            control_hz=round(1 / self._dt, 6),
            max_episode_steps=self.horizon,
            simulator=f"mujoco {mujoco.__version__}",
        )

    def reset(self, seed: int | None = None, rows: Tensor | None = None, init: Tensor | None = None) -> Obs:
        """See `VecEnv.reset`."""
        if seed is not None:
            if rows is not None:
                raise ContractError("`seed` restarts the whole sequence of episodes: give it without `rows`.")
            self._next_episode[0] = first_training_episode(seed)
        which = np.arange(self.config.num_envs) if rows is None else np.asarray(rows, dtype=np.int64)
        if init is None:
            self._start_training(which)
        else:
            pairs = np.asarray(init, dtype=np.int64)
            if pairs.shape != (len(which), 2) or (pairs[:, 0] != 0).any() or (pairs[:, 1] < 0).any():
                raise ContractError(f"`init` must be ({len(which)}, 2) of (0, episode >= 0), got shape {pairs.shape}.")
            self._place(which, pairs[:, 0], pairs[:, 1])
        self._obs = self._obs.copy()
        self._obs[which] = self._observe(which)
        return self._tensors(self._obs)

    def step(self, action: Tensor) -> Step:
        """See `VecEnv.step`. Actions beyond the bounds are applied clipped and cost what they say, as in Gymnasium."""
        import torch

        action_array = np.asarray(action, dtype=np.float64)
        if action_array.shape != (self.config.num_envs, len(self._low)):
            raise ContractError(
                f"Action must have shape {(self.config.num_envs, len(self._low))}, got {action_array.shape}."
            )
        physics = self._physics
        before = self._state
        path, _ = physics.advance(before, action_array)
        state = path[:, -1].copy()
        waiting = self._ended.copy()
        state[waiting] = before[waiting]
        finite = np.isfinite(state).all(1)
        valid = finite & ~waiting
        broken = np.flatnonzero(~finite)
        if len(broken):
            state[broken] = 0.0  # nobody ever sees a broken state: the model's own pose stands in until the reset
            state[broken, physics.qpos] = self._initial
            before[broken] = state[broken]
            self.counters["non_finite"] += len(broken)
        self._state = state
        previous = path[:, -2].copy()
        previous[~valid] = before[~valid]
        after = self._after(state, before, action_array, previous)
        healthy = self.task.healthy(after)
        reward = self.task.reward(after, healthy).astype(np.float32)
        reward[~valid] = 0.0
        self._elapsed += ~waiting
        terminated = (~healthy | ~finite) & ~waiting
        truncated = (self._elapsed >= self.horizon) & ~terminated & ~waiting
        obs = self.task.observe(after).astype(np.float32)
        final_obs = obs
        ended = terminated | truncated
        if ended.any():
            if self.autoreset:
                final_obs = obs.copy()
                which = np.flatnonzero(ended)
                self._start_training(which)
                obs[which] = self._observe(which)
            else:
                self._ended |= ended
        self._obs = obs
        tensors = self._tensors(obs)
        return Step(
            obs=tensors,
            final_obs=tensors if final_obs is obs else self._tensors(final_obs),
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            valid=torch.from_numpy(valid),
            info={"success": torch.zeros(self.config.num_envs, dtype=torch.bool)},
        )

    def render(self, rows: Tensor | None = None) -> np.ndarray:
        """Pictures from the model's own camera, where it has one, (M, 240, 320, 3) uint8."""
        model = self._physics.model
        if self._studio is None:
            self._studio = Renderer([model], (model.camera(0).name if model.ncam else "",), 240, 320)
        state = self._state if rows is None else self._state[np.asarray(rows, dtype=np.int64)]
        nowhere, first = np.zeros((len(state), 3)), np.zeros(len(state), np.int64)
        return self._studio.render(state, nowhere, first)[:, 0].copy()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to continue bit-identically."""
        import torch

        state = {name: torch.from_numpy(getattr(self, f"_{name}").copy()) for name in _SAVED}
        return state | {"non_finite": torch.tensor(self.counters["non_finite"])}

    def load_state_dict(self, state: dict[str, Tensor]) -> Obs:
        """Continue from `state_dict` of an environment with the same configuration."""
        if state["state"].shape != self._state.shape:
            raise ContractError(f"The state has shape {tuple(state['state'].shape)}, expected {self._state.shape}.")
        for name in _SAVED:
            setattr(self, f"_{name}", state[name].numpy().copy())
        self.counters["non_finite"] = int(state["non_finite"])
        return self._tensors(self._obs)

    def close(self) -> None:
        self._physics.close()
        if self._studio is not None:
            self._studio.close()
            self._studio = None

    def _start_training(self, rows: np.ndarray) -> None:
        episode = self._next_episode[0] + np.arange(len(rows))
        self._next_episode[0] += len(rows)
        self._place(rows, np.zeros(len(rows), np.int64), episode)

    def _place(self, rows: np.ndarray, task_id: np.ndarray, episode: np.ndarray) -> None:
        """Write the initial state of each `(task_id, episode)`, distributed as Gymnasium's."""
        model, physics, task = self._physics.model, self._physics, self.task
        u = uniforms(task_id, episode, model.nq + model.nv)
        scale = VELOCITY_NOISE.get(self.config.task, task.noise)
        qpos = self._initial + task.noise * (2 * u[:, : model.nq] - 1)
        unit = u[:, model.nq :]
        qvel = scale * (_normal(unit) if task.velocity_noise == "normal" else 2 * unit - 1)
        if task.place is not None:
            task.place(uniforms(task_id, episode, 64, stream=1), qpos, qvel)
        state = np.zeros((len(rows), physics.nstate))
        state[:, physics.qpos], state[:, physics.qvel] = qpos, qvel
        self._state[rows] = state
        self._elapsed[rows] = 0
        self._ended[rows] = False

    def _observe(self, rows: np.ndarray | slice) -> np.ndarray:
        """First observations (M, ...) float32 of rows that have just been placed."""
        state = self._state[rows]
        after = self._after(state, state, np.zeros((len(state), len(self._low))), None, rows)
        return self.task.observe(after).astype(np.float32)

    def _after(
        self,
        state: np.ndarray,
        before: np.ndarray,
        action: np.ndarray,
        previous: np.ndarray | None,
        rows: np.ndarray | slice = slice(None),
    ) -> After:
        """Full states (M, nstate) now, a control step ago, and one physics step ago (None: just placed)."""
        physics, model = self._physics, self._physics.model
        bodies_before = self._bodies[rows].copy()
        contact = np.zeros((len(state), model.nbody, 6) if self.task.contact else (0, 0, 0))
        if self.task.bodies:
            self._bodies[rows] = self._derive(
                state if previous is None else previous, action, previous is None, contact
            )
        names = self.task.bodies
        return After(
            qpos=state[:, physics.qpos],
            qvel=state[:, physics.qvel],
            before=before[:, physics.qpos],
            action=action,
            bodies={name: self._bodies[rows, i] for i, name in enumerate(names)},
            bodies_before={name: bodies_before[:, i] for i, name in enumerate(names)},
            contact=contact,
            dt=self._dt,
        )

    def _derive(self, state: np.ndarray, action: np.ndarray, placed: bool, contact: np.ndarray) -> np.ndarray:
        """Body positions (M, bodies, 3) as Gymnasium would read them, and the contact forces into `contact`.

        Row by row: MuJoCo gives these to nobody but the owner of an MjData. The last physics step is made again where
        it takes more than the kinematics of the state before it.
        """
        model, data = self._physics.model, self._data
        ids = [model.body(name).id for name in self.task.bodies]
        positions = np.empty((len(state), len(ids), 3))
        for row in range(len(state)):
            mujoco.mj_setState(model, data, state[row], FULL)
            if placed or not self._restep:  # just placed: no contact force has been worked out
                mujoco.mj_kinematics(model, data)
            else:
                data.qacc_warmstart[:] = 0.0
                data.ctrl[:] = action[row]
                mujoco.mj_step(model, data)
                if self.task.contact:
                    mujoco.mj_rnePostConstraint(model, data)
                    contact[row] = data.cfrc_ext
            positions[row] = data.xpos[ids]
        return positions

    def _tensors(self, obs: np.ndarray) -> Obs:
        import torch

        return {STATE: torch.from_numpy(obs)}


_SAVED = ("state", "bodies", "elapsed", "ended", "next_episode", "obs")


def _normal(u: np.ndarray) -> np.ndarray:
    """Standard normals from uniforms; by the inverse distribution function, so that they stay a function of them."""
    inverse = NormalDist().inv_cdf
    return np.vectorize(inverse, otypes=[np.float64])(u.clip(1e-12, 1 - 1e-12))


def _assets() -> Path:
    spec = importlib.util.find_spec("gymnasium")
    if spec is None or not spec.submodule_search_locations:
        raise missing_extra("gymnasium", "train")
    return Path(spec.submodule_search_locations[0]) / "envs" / "mujoco" / "assets"
