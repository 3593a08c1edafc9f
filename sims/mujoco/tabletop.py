# SPDX-License-Identifier: Apache-2.0
"""The SO-101 tabletop as a VecEnv: N scenes stepped natively, everything else vectorised numpy.

Every task has the same six actions, one per motor. Where nothing needs grasping (reach, push) the gripper's range is
nearly shut. `joint_delta` moves each motor's target by up to 0.08 rad per step (gripper 0.2 rad), `joint_position`
names the targets [rad]; `ee_delta` has five actions: it moves the commanded tool centre by up to 2 cm per step along
the world's axes with the fingers kept down, the wrist's roll by up to 0.16 rad and the gripper by up to 0.2 rad. In all
of them a target stays within 0.3 rad of the measured angle (no wind-up against an obstacle).

Axes: N num_envs, M some of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import mujoco
import numpy as np

from robo_rl.errors import ConfigError, ContractError, unknown_name
from robo_rl.seeding import first_training_episode, uniforms
from robo_rl.types import ENVIRONMENT_STATE, STATE, TASK_ID, ArraySpec, Continuous, EnvSpec, Step
from sims.mujoco import so101
from sims.mujoco.kinematics import Chain, solve_down
from sims.mujoco.physics import BatchPhysics
from sims.mujoco.tabletop_tasks import TASKS, UNIFORMS, Scene

if TYPE_CHECKING:
    from torch import Tensor

    from robo_rl.types import Obs

CONTROL_HZ = 20.0
MAX_DELTA = np.array([0.08, 0.08, 0.08, 0.08, 0.08, 0.2])  # rad per step
EE_STEP = np.array([0.02, 0.02, 0.02, 0.16, 0.2])  # m, m, m, rad, rad per step
MAX_LEAD = 0.3  # rad between target and measured angle
MAX_SPEED = 100.0  # rad/s or m/s; beyond it the physics has failed
EFFORT_COST = 0.01


@dataclass(frozen=True)
class TabletopConfig:
    kind: Literal["tabletop"] = "tabletop"
    task: Literal["reach", "push", "lift", "pick_place", "stack"] = "lift"
    num_envs: int = 256
    reward: Literal["dense", "sparse"] = "dense"
    """dense: shaped at every step. sparse: 1 at the episode's first successful step, else 0."""
    control: Literal["joint_delta", "joint_position", "ee_delta"] = "joint_delta"
    objects: tuple[str, ...] = ("red cube",)
    """Objects to handle, one task each; names from `sims.mujoco.so101.CATALOGUE`."""
    distractors: int = 0
    """Further objects on the table that have no part in the task."""
    horizon: int | None = None
    """Steps per episode; None takes the task's own."""
    terminate_on_success: bool = False
    """End an episode as soon as it succeeds. Dense rewards then favour not quite succeeding."""
    stagger: bool = True
    """Start the rows of a full reset at different elapsed steps, so that episodes end evenly; never with `init`."""
    num_threads: int | None = None
    """Physics threads; None takes every core. Results do not depend on it."""


class TabletopEnv:
    """A VecEnv. Observations besides pictures: `observation.state` (what the robot itself knows),
    `observation.environment_state` (object and goal, exact) and `task_id`, the index of the object in `objects`."""

    def __init__(self, config: TabletopConfig, seed: int = 0):
        """Raises ConfigError for unknown names and impossible sizes."""
        if config.task not in TASKS:
            raise unknown_name("task", config.task, TASKS)
        if not config.objects or config.num_envs < 1:
            raise ConfigError("The tabletop needs at least one object and num_envs >= 1.")
        self.config = config
        self.task = TASKS[config.task]
        self.horizon = config.horizon or self.task.horizon
        self.autoreset = True
        self.counters = {"non_finite": 0}
        scenes = [_bodies(config, target) for target in config.objects]
        self._models = [mujoco.MjModel.from_xml_string(so101.build_xml(bodies, self.task.marker)) for bodies in scenes]
        model = self._models[0]
        self._bodies = len(scenes[0])
        self._physics = BatchPhysics(
            model, config.num_envs, round(1 / (CONTROL_HZ * model.opt.timestep)), config.num_threads
        )
        self._chain = Chain(model, "tcp")
        self._low, self._high = model.actuator_ctrlrange.T.copy()
        self._low[5], self._high[5] = self.task.gripper_range
        n = config.num_envs
        self._state = np.zeros((n, self._physics.nstate))
        self._ctrl = np.zeros((n, 6))
        self._move = np.zeros((n, 6))  # the last change of targets, as a fraction of MAX_DELTA
        self._goal = np.zeros((n, 3))
        self._task_id = np.zeros(n, np.int64)
        self._episode = np.zeros(n, np.int64)
        self._elapsed = np.zeros(n, np.int64)
        self._held = np.zeros(n, np.int64)
        self._succeeded = np.zeros(n, bool)
        self._ended = np.zeros(n, bool)
        self._next_episode = np.array([first_training_episode(seed)])
        self._row_models = [model] * n
        self._place(np.arange(n), np.arange(n) % len(self._models), np.arange(n))
        self._obs = self._observe()
        self.spec = self._make_spec(scenes)

    # --- the contract --------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None, rows: Tensor | None = None, init: Tensor | None = None) -> Obs:
        """See `VecEnv.reset`."""
        if seed is not None:
            if rows is not None:
                raise ContractError("`seed` restarts the whole sequence of episodes: give it without `rows`.")
            self._next_episode[0] = first_training_episode(seed)
        which = np.arange(self.config.num_envs) if rows is None else np.asarray(rows, dtype=np.int64)
        if init is None:
            self._start_training(which)
            if rows is None and self.config.stagger:
                self._elapsed[:] = np.arange(len(which)) * self.horizon // len(which)
        else:
            pairs = np.asarray(init, dtype=np.int64)
            if pairs.shape != (len(which), 2) or (pairs < 0).any() or (pairs[:, 0] >= len(self._models)).any():
                raise ContractError(
                    f"`init` must be ({len(which)}, 2) of (task_id < {len(self._models)}, episode >= 0); "
                    f"got shape {pairs.shape} with {pairs.tolist()[:3]}..."
                )
            self._place(which, pairs[:, 0], pairs[:, 1])
        self._obs = self._observe()
        return self._tensors(self._obs)

    def step(self, action: Tensor) -> Step:
        """See `VecEnv.step`. `info`: `success`, and `distance` [m] to the goal."""
        import torch

        self._command(self._checked(action))
        after, _ = self._physics.advance(self._state, self._ctrl, self._row_models if len(self._models) > 1 else None)
        state = after[:, -1].copy()
        waiting = self._ended.copy()  # ended earlier, autoreset off: frozen until somebody resets them
        state[waiting] = self._state[waiting]
        speed = np.abs(state[:, self._physics.qvel]).max(axis=1)
        failed = ~(np.isfinite(state).all(axis=1) & (speed <= MAX_SPEED))
        valid = ~(failed | waiting)
        self._state = state
        if failed.any():
            which = np.flatnonzero(failed)
            self._place(which, self._task_id[which], self._episode[which])  # nobody ever sees a broken state
            self.counters["non_finite"] += len(which)
        self._elapsed += ~waiting

        scene = self._scene(slice(None))
        judged = self.task.judge(scene)
        self._held = np.where(judged.success & valid, self._held + 1, 0)
        success = self._held >= self.task.success.hold_steps
        if self.config.reward == "sparse":
            reward = (success & ~self._succeeded).astype(np.float32)
        else:
            reward = (judged.reward - self._effort).astype(np.float32)
        reward[~valid] = 0.0
        self._succeeded |= success
        terminated = failed.copy()
        if self.config.terminate_on_success:
            terminated = terminated | success
        truncated = (self._elapsed >= self.horizon) & ~terminated & ~waiting

        obs = self._observe(scene)
        for key in (STATE, ENVIRONMENT_STATE):
            obs[key][failed] = 0.0
        final_obs = obs
        ended = terminated | truncated
        if ended.any():
            if self.autoreset:
                final_obs = {k: v.copy() for k, v in obs.items()}
                which = np.flatnonzero(ended)
                self._start_training(which)
                for key, value in self._observe(rows=which).items():
                    obs[key][which] = value
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
            info={
                "success": torch.from_numpy(success),
                "distance": torch.from_numpy(np.where(valid, judged.distance, 0.0).astype(np.float32)),
            },
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to continue bit-identically."""
        import torch

        state = {name: torch.from_numpy(getattr(self, f"_{name}").copy()) for name in _SAVED}
        return state | {f"counters.{name}": torch.tensor(count) for name, count in self.counters.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> Obs:
        """Continue from `state_dict` of an environment with the same configuration."""
        for name in _SAVED:
            mine, theirs = getattr(self, f"_{name}"), state[name].numpy()
            if mine.shape != theirs.shape:
                raise ContractError(
                    f"Tabletop state `{name}` has shape {theirs.shape}, this environment needs {mine.shape}: "
                    "continue with the configuration that it was saved under."
                )
            setattr(self, f"_{name}", theirs.copy())
        self.counters = {name: int(state[f"counters.{name}"]) for name in self.counters}
        self._row_models = [self._models[t] for t in self._task_id]
        self._obs = self._observe()
        return self._tensors(self._obs)

    def close(self) -> None:
        self._physics.close()

    # --- starting episodes -------------------------------------------------------------------------------------

    def _start_training(self, rows: np.ndarray) -> None:
        episode = self._next_episode[0] + np.arange(len(rows))
        self._next_episode[0] += len(rows)
        self._place(rows, episode % len(self._models), episode)

    def _place(self, rows: np.ndarray, task_id: np.ndarray, episode: np.ndarray) -> None:
        """Write the initial state of `(task_id, episode)` into `rows`: at rest, an analytic function of both."""
        u = uniforms(task_id, episode, UNIFORMS)
        start = self.task.start(u)
        poses = [start.object, start.base] if self.task.has_base else [start.object]
        poses += _scattered(uniforms(task_id, episode, 2 * 16 * self.config.distractors, stream=1), poses, start.goal)
        state = np.zeros((len(rows), self._physics.nstate))
        qpos = state[:, self._physics.qpos]
        qpos[:, :6] = start.q
        for i, pose in enumerate(poses):
            qpos[:, 6 + 7 * i : 8 + 7 * i] = pose[:, :2]
            qpos[:, 8 + 7 * i] = so101.HALF_SIZE
            qpos[:, 9 + 7 * i] = np.cos(pose[:, 2] / 2)
            qpos[:, 12 + 7 * i] = np.sin(pose[:, 2] / 2)
        self._state[rows] = state
        self._ctrl[rows] = start.q
        self._move[rows] = 0.0
        self._goal[rows] = start.goal
        self._task_id[rows], self._episode[rows] = task_id, episode
        self._elapsed[rows] = self._held[rows] = 0
        self._succeeded[rows] = self._ended[rows] = False
        if len(self._models) > 1:
            for row, task in zip(rows.tolist(), task_id.tolist(), strict=True):
                self._row_models[row] = self._models[task]

    # --- acting ------------------------------------------------------------------------------------------------

    def _checked(self, action: Tensor) -> np.ndarray:
        array = np.asarray(action, dtype=np.float64)
        expected = (self.config.num_envs, len(self.spec.action.low))  # type: ignore[union-attr]
        if array.shape != expected:
            raise ContractError(f"Action must have shape {expected}, got {array.shape}.")
        if not np.isfinite(array).all():
            row = int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])
            raise ContractError(f"Action of row {row} is not finite: {array[row].tolist()}.")
        return array

    def _command(self, action: np.ndarray) -> None:
        """Turn actions (N, A) into motor targets, within the joints' ranges and near the measured angles."""
        q = self._state[:, self._physics.qpos][:, :6]
        previous = self._ctrl
        if self.config.control == "joint_delta":
            target = previous + MAX_DELTA * np.clip(action, -1.0, 1.0)
        elif self.config.control == "joint_position":
            target = action
        else:
            move = np.clip(action, -EE_STEP, EE_STEP)
            target = previous.copy()
            target[:, 4:] += move[:, 3:]
            tcp, _ = self._chain.forward(previous[:, :5])
            target[:, :5] = solve_down(self._chain, target[:, :5], tcp + move[:, :3])
        target = np.clip(target, self._low, self._high)
        # The gripper's lead is its grip force; only the arm is kept near.
        target[:, :5] = np.clip(target[:, :5], q[:, :5] - MAX_LEAD, q[:, :5] + MAX_LEAD)
        move = np.clip((target - previous) / MAX_DELTA, -1.0, 1.0)
        change = move - self._move
        self._effort = EFFORT_COST * ((move * move).mean(axis=1) + (change * change).mean(axis=1))
        self._ctrl, self._move = target, move

    # --- observing ---------------------------------------------------------------------------------------------

    def _scene(self, rows: slice | np.ndarray) -> Scene:
        qpos = self._state[rows, self._physics.qpos]
        qvel = self._state[rows, self._physics.qvel]
        tcp, rotation = self._chain.forward(qpos[:, :5])
        self._tcp_axes = np.concatenate([rotation[:, :, 0], rotation[:, :, 2]], axis=1)
        w, x, y, z = qpos[:, 9:13].T
        base = 13 if self.task.has_base else 6
        return Scene(
            gripper=qpos[:, 5],
            tcp=tcp,
            tcp_up=rotation[:, 2, 2],
            object_pos=qpos[:, 6:9],
            object_x=np.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)], axis=1),
            object_z=np.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)], axis=1),
            object_vel=qvel[:, 6:9],
            base_pos=qpos[:, base : base + 3],
            goal=self._goal[rows],
        )

    def _observe(self, scene: Scene | None = None, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
        if scene is None:
            scene = self._scene(rows)
        qpos = self._state[rows, self._physics.qpos]
        qvel = self._state[rows, self._physics.qvel]
        ctrl = self._ctrl[rows]
        own = [qpos[:, :6], qvel[:, :6], ctrl - qpos[:, :6], scene.tcp, self._tcp_axes, self._move[rows]]
        return {
            STATE: np.concatenate(own, axis=1, dtype=np.float32),
            ENVIRONMENT_STATE: np.concatenate(list(self.task.privileged(scene).values()), axis=1, dtype=np.float32),
            TASK_ID: self._task_id[rows].copy(),
        }

    def _tensors(self, obs: dict[str, np.ndarray]) -> Obs:
        import torch

        return {key: torch.from_numpy(value) for key, value in obs.items()}

    def _make_spec(self, scenes: list[tuple[str, ...]]) -> EnvSpec:
        names = [f"{part}.{joint}" for part in ("position", "velocity", "lead") for joint in so101.JOINTS]
        names += [f"{part}.{axis}" for part in ("tcp", "tcp_x_axis", "tcp_z_axis") for axis in "xyz"]
        names += [f"last_move.{joint}" for joint in so101.JOINTS]
        privileged = self.task.privileged(self._scene(slice(0, 1)))
        known = [f"{part}.{axis}" for part in privileged for axis in "xyz"]
        if self.config.control == "joint_delta":
            action = Continuous((-1.0,) * 6, (1.0,) * 6, so101.JOINTS, tuple(f"{d} rad" for d in MAX_DELTA))
        elif self.config.control == "joint_position":
            action = Continuous(tuple(self._low.tolist()), tuple(self._high.tolist()), so101.JOINTS, ("rad",) * 6)
        else:
            parts = ("x", "y", "z", "wrist_roll", "gripper")
            step = tuple(EE_STEP.tolist())
            action = Continuous(tuple(-x for x in step), step, parts, ("m", "m", "m", "rad", "rad"))
        return EnvSpec(
            name=f"tabletop/{self.config.task}",
            num_envs=self.config.num_envs,
            obs={
                STATE: ArraySpec((len(names),), names=tuple(names)),
                ENVIRONMENT_STATE: ArraySpec((len(known),), names=tuple(known)),
                TASK_ID: ArraySpec((), "int64"),
            },
            action=action,
            control_hz=CONTROL_HZ,
            max_episode_steps=self.horizon,
            tasks=tuple(self.task.instruction.format(object=b[0], base=b[-1 if len(b) < 2 else 1]) for b in scenes),
            success=self.task.success,
            convention={"action": self.config.control, "gripper": "positive opens", "image": "upright"},
            simulator=f"mujoco {mujoco.__version__}",
        )


_SAVED = (
    "state ctrl move goal task_id episode elapsed held succeeded ended next_episode".split()  # noqa: SIM905
)


def _bodies(config: TabletopConfig, target: str) -> tuple[str, ...]:
    """The scene's objects: the one to handle, the one to stack on, then distractors; all different."""
    others = [name for name in so101.CATALOGUE if name != target]
    bodies = [target]
    if TASKS[config.task].has_base:
        bodies.append(next(n for n in others if n.endswith("cube") and n.split()[0] not in target and "red" not in n))
    others = [name for name in others if name not in bodies]
    if config.distractors > len(others):
        raise ConfigError(f"env.distractors is {config.distractors}; there are {len(others)} other objects.")
    # A stride through the catalogue, so that distractors differ in colour and shape.
    return (*bodies, *(others[(7 * i) % len(others)] for i in range(config.distractors)))


def _scattered(u: np.ndarray, taken: list[np.ndarray], goal: np.ndarray) -> list[np.ndarray]:
    """(x, y, yaw) of the distractors: 6 cm or more from everything, the first such place of 16 each."""
    places = [pose[:, None, :2] for pose in taken] + [goal[:, None, :2]]
    out = []
    for draws in np.split(u.reshape(len(u), -1, 2), u.shape[1] // 32, axis=1) if u.shape[1] else []:
        xy = np.stack([0.13 + 0.22 * draws[..., 0], -0.18 + 0.36 * draws[..., 1]], axis=-1)
        clear = np.min([np.linalg.norm(xy - place, axis=-1) for place in places], axis=0)
        best = np.where((clear > 0.06).any(1), (clear > 0.06).argmax(1), clear.argmax(1))
        rows = np.arange(len(u))
        pose = np.column_stack([xy[rows, best], np.pi * draws[:, 0, 0]])
        places.append(pose[:, None, :2])
        out.append(pose)
    return out
