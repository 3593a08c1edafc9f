# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's MuJoCo v5 tasks, stepped natively in batches: same models, observations, rewards and ends.

From the same state with the solver's warm start off on both sides every step equals Gymnasium's. Left on, as here and
there by default, `mujoco.rollout` starts each control step without it, so trajectories part after some contacts while
their distribution stays the same. Settings are those of `gymnasium.make` without arguments.

Axes: N num_envs, M some of the rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

import mujoco
import numpy as np

from robo_rl.errors import ConfigError, ContractError, missing_extra, unknown_name
from robo_rl.seeding import first_training_episode, uniforms
from robo_rl.types import STATE, ArraySpec, Continuous, EnvSpec, Step
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
    """Physics threads; None takes every core. Results do not depend on it."""


@dataclass(frozen=True, slots=True)
class After:
    """M rows after a control step.

    `qpos`, `qvel` now, the qpos `before`, and the `action`. What MuJoCo derives from a state is not of that state after
    `mj_step` but of where the integrator last looked, and Gymnasium reads it so: the positions (M, 3) of the task's
    `bodies`, now and `bodies_before`, and `contact`, the external forces (M, nbody, 6).
    """

    qpos: np.ndarray
    qvel: np.ndarray
    before: np.ndarray
    action: np.ndarray
    bodies: dict[str, np.ndarray]
    bodies_before: dict[str, np.ndarray]
    contact: np.ndarray
    dt: float


@dataclass(frozen=True)
class Task:
    xml: str
    frame_skip: int
    horizon: int
    observe: Callable[[After], np.ndarray]
    reward: Callable[[After, np.ndarray], np.ndarray]  # of the step and whether the row is healthy
    healthy: Callable[[After], np.ndarray]
    noise: float  # half-width of the uniform position noise at the start
    velocity_noise: Literal["uniform", "normal"] = "uniform"
    bodies: tuple[str, ...] = ()
    contact: bool = False
    place: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None  # writes goals; from uniforms (M, 64)


def _always(s: After) -> np.ndarray:
    return np.ones(len(s.qpos), bool)


def _speed(s: After) -> np.ndarray:
    return (s.qpos[:, 0] - s.before[:, 0]) / s.dt


def _effort(s: After) -> np.ndarray:
    return np.square(s.action).sum(1)


def _within(x: np.ndarray, low: float, high: float) -> np.ndarray:
    return (low < x) & (x < high)


def _hopper_healthy(s: After) -> np.ndarray:
    rest = np.concatenate([s.qpos[:, 2:], s.qvel], axis=1)
    return (np.abs(rest) < 100).all(1) & (s.qpos[:, 1] > 0.7) & _within(s.qpos[:, 2], -0.2, 0.2)


def _walker_healthy(s: After) -> np.ndarray:
    return _within(s.qpos[:, 1], 0.8, 2.0) & _within(s.qpos[:, 2], -1.0, 1.0)


def _ant_healthy(s: After) -> np.ndarray:
    return (s.qpos[:, 2] >= 0.2) & (s.qpos[:, 2] <= 1.0)


def _clipped_contact(s: After) -> np.ndarray:
    return s.contact.clip(-1.0, 1.0)


def _ant_observe(s: After) -> np.ndarray:
    forces = _clipped_contact(s)[:, 1:].reshape(len(s.qpos), -1)  # the world body's are always 0
    return np.concatenate([s.qpos[:, 2:], s.qvel, forces], axis=1)


def _ant_reward(s: After, healthy: np.ndarray) -> np.ndarray:
    speed = (s.bodies["torso"][:, 0] - s.bodies_before["torso"][:, 0]) / s.dt
    return speed + healthy - 0.5 * _effort(s) - 5e-4 * np.square(_clipped_contact(s)).sum((1, 2))


def _walking(skip: int, clip: float = np.inf) -> Callable[[After], np.ndarray]:
    """Positions without the first `skip`, and velocities within `clip`."""

    def observe(s: After) -> np.ndarray:
        velocity = s.qvel if clip == np.inf else s.qvel.clip(-clip, clip)
        return np.concatenate([s.qpos[:, skip:], velocity], axis=1)

    return observe


def _forward(effort: float, alive: float = 0.0) -> Callable[[After, np.ndarray], np.ndarray]:
    return lambda s, healthy: _speed(s) + alive * healthy - effort * _effort(s)


def _reacher_observe(s: After) -> np.ndarray:
    theta, gap = s.qpos[:, :2], s.bodies["fingertip"] - s.bodies["target"]
    return np.concatenate([np.cos(theta), np.sin(theta), s.qpos[:, 2:], s.qvel[:, :2], gap[:, :2]], axis=1)


def _reacher_reward(s: After, healthy: np.ndarray) -> np.ndarray:
    return -np.linalg.norm(s.bodies["fingertip"] - s.bodies["target"], axis=1) - _effort(s)


def _reacher_place(u: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
    # Uniform in the disc by rejection, as there; the first of 16 draws that lies in it (all miss once in 10^10).
    draws = 0.4 * u[:, :32].reshape(-1, 16, 2) - 0.2
    inside = np.linalg.norm(draws, axis=-1) < 0.2
    qpos[:, -2:] = draws[np.arange(len(u)), inside.argmax(1)]
    qvel[:, -2:] = 0.0


def _pusher_observe(s: After) -> np.ndarray:
    return np.concatenate(
        [s.qpos[:, :7], s.qvel[:, :7], *(s.bodies[b] for b in ("tips_arm", "object", "goal"))], axis=1
    )


def _pusher_reward(s: After, healthy: np.ndarray) -> np.ndarray:
    near = np.linalg.norm(s.bodies["object"] - s.bodies["tips_arm"], axis=1)
    distance = np.linalg.norm(s.bodies["object"] - s.bodies["goal"], axis=1)
    return -distance - 0.1 * _effort(s) - 0.5 * near


def _pusher_place(u: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
    draws = u[:, :64].reshape(-1, 32, 2) * np.array([0.3, 0.4]) + np.array([-0.3, -0.2])
    apart = np.linalg.norm(draws, axis=-1) > 0.17
    qpos[:, -4:-2] = draws[np.arange(len(u)), apart.argmax(1)]
    qpos[:, -2:] = 0.0
    qvel[:, -4:] = 0.0


TASKS: dict[str, Task] = {
    "HalfCheetah-v5": Task("half_cheetah.xml", 5, 1000, _walking(1), _forward(0.1), _always, 0.1, "normal"),
    "Hopper-v5": Task("hopper.xml", 4, 1000, _walking(1, 10.0), _forward(1e-3, 1.0), _hopper_healthy, 5e-3),
    "Walker2d-v5": Task("walker2d_v5.xml", 4, 1000, _walking(1, 10.0), _forward(1e-3, 1.0), _walker_healthy, 5e-3),
    "Ant-v5": Task("ant.xml", 5, 1000, _ant_observe, _ant_reward, _ant_healthy, 0.1, "normal", ("torso",), True),
    "Swimmer-v5": Task("swimmer.xml", 4, 1000, _walking(2), _forward(1e-4), _always, 0.1),
    "InvertedPendulum-v5": Task(
        "inverted_pendulum.xml",
        2,
        1000,
        _walking(0),
        lambda s, healthy: healthy.astype(np.float64),
        lambda s: np.abs(s.qpos[:, 1]) <= 0.2,
        0.01,
    ),
    "Reacher-v5": Task(
        "reacher.xml",
        2,
        50,
        _reacher_observe,
        _reacher_reward,
        _always,
        0.1,
        bodies=("fingertip", "target"),
        place=_reacher_place,
    ),
    "Pusher-v5": Task(
        "pusher_v5.xml",
        5,
        100,
        _pusher_observe,
        _pusher_reward,
        _always,
        0.0,
        bodies=("tips_arm", "object", "goal"),
        place=_pusher_place,
    ),
}
VELOCITY_NOISE = {"Reacher-v5": 0.005, "Pusher-v5": 0.005}  # where it differs from the position noise


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
        self._initial = model.qpos0.copy()
        self._renderer: mujoco.Renderer | None = None
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
        """Pictures from the model's own tracking camera, (M, 240, 320, 3) uint8."""
        model = self._physics.model
        if self._renderer is None:
            self._renderer = mujoco.Renderer(model, 240, 320)
        which = range(self.config.num_envs) if rows is None else np.asarray(rows).tolist()
        pictures = []
        for row in which:
            mujoco.mj_setState(model, self._data, self._state[row], FULL)
            mujoco.mj_forward(model, self._data)
            self._renderer.update_scene(self._data, camera=0 if model.ncam else -1)
            pictures.append(self._renderer.render())
        return np.stack(pictures)

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
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

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

        Row by row: MuJoCo gives these to nobody but the owner of an MjData. The last physics step is made again.
        """
        model, data = self._physics.model, self._data
        ids = [model.body(name).id for name in self.task.bodies]
        positions = np.empty((len(state), len(ids), 3))
        for row in range(len(state)):
            mujoco.mj_setState(model, data, state[row], FULL)
            if placed:  # no step has been made, so no contact force has been worked out
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
