# SPDX-License-Identifier: Apache-2.0
"""The SO-101 tabletop as a VecEnv: N scenes stepped natively, everything else vectorised numpy.

Every task has the same actions (see `tabletop_control`). Where nothing needs grasping (reach, push) the gripper's range
is nearly shut. Dense rewards lose a little for commanded motion and for changes of motion.

Axes: N num_envs, M some of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import mujoco
import numpy as np

from robo_rl.errors import ConfigError, ContractError, unknown_name
from robo_rl.seeding import first_training_episode, uniforms
from robo_rl.types import ENVIRONMENT_STATE, IMAGES, STATE, TASK_ID, ArraySpec, EnvSpec, Step
from sims.mujoco import so101
from sims.mujoco.cameras import Renderer, RenderPool
from sims.mujoco.kinematics import Chain
from sims.mujoco.physics import BatchPhysics
from sims.mujoco.tabletop_control import MAX_DELTA, Control, action_spec, motor_targets
from sims.mujoco.tabletop_tasks import DRAWS, TASKS, UNIFORMS, Scene, scattered, scene_objects

if TYPE_CHECKING:
    from torch import Tensor

    from robo_rl.types import Obs

CONTROL_HZ = 20.0
SINK = 0.00012  # m that an object's weight presses into the soft contact: starts are at rest
MAX_SPEED = 100.0  # rad/s or m/s; beyond it the physics has failed
EFFORT_COST = 0.02


@dataclass(frozen=True)
class TabletopConfig:
    kind: Literal["tabletop"] = "tabletop"
    task: Literal["reach", "push", "lift", "pick_place", "stack"] = "lift"
    num_envs: int = 256
    reward: Literal["dense", "sparse", "success"] = "dense"
    """dense: shaped at every step. sparse: 1 at the episode's first successful step, else 0. success: 1 at every
    successful step, else 0; what to train on where success counts at the episode's end."""
    control: Control = "joint_delta"
    """What actions mean; see `sims.mujoco.tabletop_control`."""
    objects: tuple[str, ...] = ("red cube",)
    """Objects to handle, one task each; names from `sims.mujoco.so101.CATALOGUE`."""
    distractors: int = 0
    """Further objects on the table that have no part in the task."""
    cameras: tuple[str, ...] = ()
    """Pictures in the observation: any of front, wrist."""
    image_size: int = 84
    """Height and width of the pictures [pixels]."""
    render_processes: int = 0
    """Processes that draw; 0 draws in this one. Use one per core; they start by `spawn`."""
    horizon: int | None = None
    """Steps per episode; None takes the task's own."""
    terminate_on_success: bool = False
    """End an episode as soon as it succeeds. Dense rewards then favour not quite succeeding."""
    stagger: bool = True
    """Start the rows of a full reset at different elapsed steps, so that episodes end evenly; never with `init`."""
    num_threads: int | None = None
    """Physics threads; None takes every core that gets 8 environments or more. Results do not depend on it."""


class TabletopEnv:
    """A VecEnv. Observations besides pictures: `observation.state` (what the robot itself knows),
    `observation.environment_state` (object and goal, exact) and `task_id`, the index of the object in `objects`.

    `cameras_on`: False keeps the last pictures instead of drawing (steps inside a chunk that nobody looks at); set it
    before the step or reset.
    """

    def __init__(self, config: TabletopConfig, seed: int = 0):
        """Raises ConfigError for unknown names and impossible sizes."""
        if config.task not in TASKS:
            raise unknown_name("task", config.task, TASKS)
        if not config.objects or config.num_envs < 1 or (config.horizon is not None and config.horizon < 1):
            raise ConfigError("The tabletop needs at least one object, num_envs >= 1 and horizon >= 1.")
        self.config = config
        self.task = TASKS[config.task]
        self.horizon = config.horizon or self.task.horizon
        self.autoreset = True
        self.counters = {"non_finite": 0}
        scenes = [scene_objects(self.task, target, config.distractors) for target in config.objects]
        xmls = [so101.build_xml(bodies, self.task.marker) for bodies in scenes]
        self._models = [mujoco.MjModel.from_xml_string(xml) for xml in xmls]
        model = self._models[0]
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
        self.cameras_on = True
        self._cameras = _renderer(config, xmls, self._models)
        self._studio: Renderer | None = None  # for `render`, made when first asked
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
        self._obs = {key: value.copy() for key, value in self._obs.items()}
        self._refresh(self._obs, which)
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
        if self.config.reward == "success":
            reward = success.astype(np.float32)
        elif self.config.reward == "sparse":
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
        for key in obs.keys() - {TASK_ID}:
            obs[key][failed] = 0
        final_obs = obs
        ended = terminated | truncated
        if ended.any():
            if self.autoreset:
                final_obs = {k: v.copy() for k, v in obs.items()}
                which = np.flatnonzero(ended)
                self._start_training(which)
                self._refresh(obs, which)
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

    def render(self, rows: Tensor | None = None) -> np.ndarray:
        """The front camera's view of the rows, (M, 240, 320, 3) uint8."""
        which = np.arange(self.config.num_envs) if rows is None else np.asarray(rows, dtype=np.int64)
        if self._studio is None:
            self._studio = Renderer(self._models, ("front",), 240, 320)
        return self._studio.render(self._state[which], self._goal[which], self._task_id[which])[:, 0].copy()

    def close(self) -> None:
        self._physics.close()
        for renderer in (self._cameras, self._studio):
            if renderer is not None:
                renderer.close()

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
        if self.config.distractors:
            draws = uniforms(task_id, episode, 2 * DRAWS * self.config.distractors, stream=1)
            poses += scattered(draws, poses, start.goal)
        state = np.zeros((len(rows), self._physics.nstate))
        qpos = state[:, self._physics.qpos]
        qpos[:, :6] = start.q
        for i, pose in enumerate(poses):
            qpos[:, 6 + 7 * i : 8 + 7 * i] = pose[:, :2]
            qpos[:, 8 + 7 * i] = so101.HALF_SIZE - SINK
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
        target, asked = motor_targets(self.config.control, action, previous, q, self._low, self._high, self._chain)
        move = np.clip((target - previous) / MAX_DELTA, -1.0, 1.0)
        change = move - self._move
        # By what was asked for: pressing on against a limit is to cost something, or a policy never stops.
        self._effort = EFFORT_COST * ((asked * asked).mean(axis=1) + (change * change).mean(axis=1))
        waiting = self._ended[:, None]
        self._ctrl = np.where(waiting, previous, target)
        self._move = np.where(waiting, self._move, move)

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
            grip=self._ctrl[rows, 5],
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
        obs = {
            STATE: np.concatenate(own, axis=1, dtype=np.float32),
            ENVIRONMENT_STATE: np.concatenate(list(self.task.privileged(scene).values()), axis=1, dtype=np.float32),
            TASK_ID: self._task_id[rows].copy(),
        }
        if self._cameras is not None:
            drawn = None
            if self.cameras_on:
                drawn = self._cameras.render(self._state[rows], self._goal[rows], self._task_id[rows])
            for i, name in enumerate(IMAGES + camera for camera in self.config.cameras):
                obs[name] = drawn[:, i].copy() if drawn is not None else self._obs[name][rows].copy()
        return obs

    def _refresh(self, obs: dict[str, np.ndarray], rows: np.ndarray) -> None:
        for key, value in self._observe(rows=rows).items():
            obs[key][rows] = value

    def _tensors(self, obs: dict[str, np.ndarray]) -> Obs:
        import torch

        return {key: torch.from_numpy(value) for key, value in obs.items()}

    def _make_spec(self, scenes: list[tuple[str, ...]]) -> EnvSpec:
        names = [f"{part}.{joint}" for part in ("position", "velocity", "lead") for joint in so101.JOINTS]
        names += [f"{part}.{axis}" for part in ("tcp", "tcp_x_axis", "tcp_z_axis") for axis in "xyz"]
        names += [f"last_move.{joint}" for joint in so101.JOINTS]
        privileged = self.task.privileged(self._scene(slice(0, 1)))
        known = [f"{part}.{axis}" for part in privileged for axis in "xyz"]
        pictures = ArraySpec((self.config.image_size, self.config.image_size, 3), "uint8")
        return EnvSpec(
            name=f"tabletop/{self.config.task}",
            num_envs=self.config.num_envs,
            obs={
                STATE: ArraySpec((len(names),), names=tuple(names)),
                ENVIRONMENT_STATE: ArraySpec((len(known),), names=tuple(known)),
                TASK_ID: ArraySpec((), "int64"),
                **{IMAGES + name: pictures for name in self.config.cameras},
            },
            action=action_spec(self.config.control, self._low, self._high),
            control_hz=CONTROL_HZ,
            max_episode_steps=self.horizon,
            # The second body is the base where the instruction names one.
            tasks=tuple(self.task.instruction.format(object=b[0], base=b[min(1, len(b) - 1)]) for b in scenes),
            success=self.task.success,
            convention={"action": self.config.control, "gripper": "positive opens", "image": "upright"},
            simulator=f"mujoco {mujoco.__version__}",
        )


_SAVED = (
    "state ctrl move goal task_id episode elapsed held succeeded ended next_episode".split()  # noqa: SIM905
)


def _renderer(config: TabletopConfig, xmls: list[str], models: list[mujoco.MjModel]) -> Renderer | RenderPool | None:
    for name in config.cameras:
        if name not in so101.CAMERAS:
            raise unknown_name("camera", name, so101.CAMERAS)
    if not config.cameras:
        return None
    size = config.image_size
    if config.render_processes:
        return RenderPool(xmls, config.cameras, size, size, config.num_envs, config.render_processes)
    return Renderer(models, config.cameras, size, size)
