# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Isaac Gym (Preview 4) as a `VecEnv`: its tensor API, one actor per environment, all rows on one device.

Never run on NVIDIA's simulator by us. Checked: the calls, against `isaacgym-stubs` and `typings/isaacgym`; the logic,
on a stand-in that has the stubs' signatures, moves simple bodies on a CPU and punishes the traps below. Not checked:
what PhysX does with these calls, asset files, the GPU pipeline, speed.

Isaac Gym is installed by hand from NVIDIA's download. Its bindings (`gym_3x.so`) exist for Python 3.6 to 3.8 and their
source is not part of it; this project needs 3.11 or 3.12. Without a build for that Python this module can only raise
the error that says so. `gymtorch` is compiled at its first import: a C++ compiler that knows your torch is needed too.

The traps, and where they are met:
    import    isaacgym must be imported before torch, or it refuses (`_require_isaac_gym`).
    stale     state tensors hold what the last refresh saw: every read follows one (`_refresh`). Poses of bodies follow
              a reset only after the next simulation step, so observations are made of joints and root alone (`Task`).
    setters   of several calls of one indexed setter between two simulation steps only the last counts: rows that start
              are collected and set by one call just before the step (`_hand_over`).
    lifetime  an unwrapped tensor is a bare address: what it points to is kept until the step is done (`_kept`).
    fetch     on the CPU pipeline results are fetched before they are refreshed (`_refresh`).
    index     the indexed setters want int32 actor numbers of the whole simulation, not of the environment.

Axes: N num_envs, M some of the rows, D degrees of freedom, L bodies (links).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from robo_rl.errors import ConfigError, ContractError, unknown_name
from robo_rl.seeding import first_training_episode, uniforms
from robo_rl.types import STATE, TASK_ID, ArraySpec, Continuous, EnvSpec, Obs, Step
from sims.isaac_gym_tasks import TASKS, State

if TYPE_CHECKING:
    import numpy as np
    from isaacgym import gymapi
    from torch import Tensor


@dataclass(frozen=True)
class IsaacGymConfig:
    """A task of `TASKS` in Isaac Gym, and where it runs."""

    kind: Literal["isaac_gym"] = "isaac_gym"
    task: str = "cartpole"
    """One of `TASKS`."""
    num_envs: int = 512
    """Environments stepped together."""
    device: str = "cuda:0"
    """Where physics and tensors live; `cpu` runs PhysX and its pipeline there."""
    asset_root: str = ""
    """The folder of Isaac Gym's `assets`; empty: the one beside the installed package."""
    spacing: float = 4.0
    """Distance between neighbouring environments [m]."""


class IsaacGymEnv:
    """A `VecEnv` on `spec.device`. `counters`: episodes `dropped` because physics became `non_finite`."""

    def __init__(self, config: IsaacGymConfig, seed: int = 0):
        """Raises ConfigError where Isaac Gym, the task, its asset or the device is not there."""
        if config.task not in TASKS:
            raise unknown_name("Isaac Gym task", config.task, TASKS)
        if not re.fullmatch(r"cpu|cuda(:\d+)?", config.device):
            raise ConfigError(f"env.device is `cpu`, `cuda` or `cuda:K`, got `{config.device}`.")
        _require_isaac_gym()
        import torch
        from isaacgym import gymapi
        from isaacgym.gymtorch import wrap_tensor

        self.task, self.autoreset = TASKS[config.task], True
        self.counters = {"dropped": 0, "non_finite": 0}
        self._gym, self._cpu = gymapi.acquire_gym(), config.device == "cpu"
        self._sim: gymapi.Sim | None = self._make_sim(config)
        n, dofs, device = config.num_envs, len(self.task.scale), config.device
        self._actors = torch.tensor(self._make_envs(config, self._sim), dtype=torch.int32, device=device)
        self._gym.prepare_sim(self._sim)
        self._raw_dofs = self._gym.acquire_dof_state_tensor(self._sim)
        self._raw_root = self._gym.acquire_actor_root_state_tensor(self._sim)
        self._dofs = wrap_tensor(self._raw_dofs).view(n, dofs, 2)
        self._root = wrap_tensor(self._raw_root).view(n, 13)
        self._bodies = wrap_tensor(self._gym.acquire_rigid_body_state_tensor(self._sim)).view(n, -1, 13)
        self._refresh()
        self._first_root = self._root.clone()
        self._scale = torch.tensor(self.task.scale, device=device)
        self._home = torch.tensor(self.task.home or (0.0,) * dofs, device=device)
        self._driven = self._scale.nonzero().squeeze(-1)
        self._rows = torch.arange(n, device=device)
        self._draw = torch.zeros(n, self.task.draws, device=device)
        self._elapsed, self._held = torch.zeros(2, n, dtype=torch.int64, device=device)
        self._ended, self._fresh = torch.zeros(2, n, dtype=torch.bool, device=device)
        self._kept: list[Tensor] = []
        self._next_episode = first_training_episode(seed)
        width = len(self._driven)
        self.spec = EnvSpec(
            name=f"isaac_gym/{config.task}",
            num_envs=n,
            obs={STATE: ArraySpec((self.reset()[STATE].shape[1],)), TASK_ID: ArraySpec((), "int64")},
            action=Continuous((-1.0,) * width, (1.0,) * width),
            control_hz=1 / self.task.dt,
            max_episode_steps=self.task.horizon,
            tasks=(config.task,),
            success=self.task.success,
            convention={"action": "effort" if self.task.control == "effort" else "joint_position"},
            simulator="isaac gym preview 4",
            device=device,
        )
        self.reset(seed=seed)

    def reset(self, seed: int | None = None, rows: Tensor | None = None, init: Tensor | None = None) -> Obs:
        """See `VecEnv.reset`."""
        if seed is not None:
            if rows is not None:
                raise ContractError("`seed` restarts the whole sequence of episodes: give it without `rows`.")
            self._next_episode = first_training_episode(seed)
        index = self._rows if rows is None else rows.to(self._rows.device)
        if init is None:
            init = self._next(len(index))
        if tuple(init.shape) != (len(index), 2) or bool((init[:, 0] != 0).any()) or bool((init[:, 1] < 0).any()):
            raise ContractError(
                f"`init` must be ({len(index)}, 2) of (task_id 0, episode >= 0); got shape {tuple(init.shape)} with "
                f"{init.tolist()[:3]}..."
            )
        self._start(index, init.cpu().numpy())
        return self._obs(self._state())

    def step(self, action: Tensor) -> Step:
        """See `VecEnv.step`."""
        import torch

        self._hand_over(self._command(action))
        self._gym.simulate(self._open())
        self._refresh()
        task, waiting = self.task, self._ended.clone()  # ended earlier, autoreset off: their steps are meaningless
        state, bodies = self._state(), self._bodies.clone()
        reward = task.reward(state, bodies).float()
        everything = torch.cat([state.pos, state.vel, state.root, task.observe(state), reward[:, None]], dim=1)
        broken = ~everything.isfinite().all(dim=1) & ~waiting
        self.counters["non_finite"] += int(broken.sum())
        self.counters["dropped"] = self.counters["non_finite"]
        valid = ~(broken | waiting)
        self._elapsed += ~waiting
        success = torch.zeros_like(valid)
        if task.succeeded is not None and task.success is not None:
            self._held = torch.where(task.succeeded(state, bodies) & valid, self._held + 1, 0)
            success = self._held >= task.success.hold_steps
        terminated = broken | (task.failed(state, bodies) & valid)
        truncated = (self._elapsed >= task.horizon) & ~terminated & ~waiting
        final_obs = obs = self._obs(state)
        self._ended |= terminated | truncated
        if self.autoreset and bool(self._ended.any()):
            rows = self._ended.nonzero().squeeze(-1)
            self._start(rows, self._next(len(rows)).numpy())
            obs = self._obs(self._state())
        return Step(obs, final_obs, reward.where(valid, 0.0), terminated, truncated, valid, {"success": success})

    def render(self, rows: Tensor | None = None) -> np.ndarray:
        """See `VecEnv.render`."""
        raise ConfigError("Isaac Gym is stepped without pictures here (its cameras need a graphics device).")

    def state_dict(self) -> dict[str, Tensor] | None:
        """None: PhysX keeps hidden caches, and does not continue bit-identically."""
        return None

    def load_state_dict(self, state: dict[str, Tensor]) -> Obs:
        raise ContractError(f"{self.spec.name} cannot continue from a saved state; start new episodes with reset().")

    def close(self) -> None:
        if self._sim is not None:
            self._gym.destroy_sim(self._sim)
            self._sim = None

    # --- rows ------------------------------------------------------------------------------------------------

    def _next(self, count: int) -> Tensor:
        """(count, 2) int64 of the next training episodes."""
        import torch

        episodes = torch.arange(self._next_episode, self._next_episode + count)
        self._next_episode += count
        return torch.stack([torch.zeros_like(episodes), episodes], dim=1)

    def _start(self, rows: Tensor, init: np.ndarray) -> None:
        """Write the initial states of `init` (M, 2) into our side of the tensors; `_hand_over` passes them on."""
        import torch

        draw = torch.from_numpy(uniforms(init[:, 0], init[:, 1], self.task.draws)).float().to(self._draw.device)
        self._draw[rows] = draw
        self._dofs[rows] = torch.stack(self.task.start(draw), dim=-1)
        self._root[rows] = self._first_root[rows]
        self._elapsed[rows] = 0
        self._held[rows] = 0
        self._ended[rows] = False
        self._fresh[rows] = True

    def _state(self) -> State:
        pos, vel = self._dofs.clone().unbind(-1)
        return State(pos, vel, self._root.clone(), self._draw.clone())

    def _obs(self, state: State) -> Obs:
        """The observation; zeros in rows where it is not finite."""
        import torch

        obs = self.task.observe(state).float()
        return {STATE: obs.where(obs.isfinite().all(dim=1, keepdim=True), 0.0), TASK_ID: torch.zeros_like(self._rows)}

    # --- the simulator ---------------------------------------------------------------------------------------

    def _open(self) -> gymapi.Sim:
        if self._sim is None:
            raise ContractError(f"{self.spec.name} is closed.")
        return self._sim

    def _command(self, action: Tensor) -> Tensor:
        """(N * D,) forces or position targets of all degrees of freedom."""
        import torch

        expected = (self.spec.num_envs, len(self._driven))
        if tuple(action.shape) != expected:
            raise ContractError(f"Action must have shape {expected}, got {tuple(action.shape)}.")
        if not bool(action.isfinite().all()):
            row = int((~action.isfinite()).any(dim=1).nonzero()[0])
            raise ContractError(f"Action of row {row} is not finite: {action[row].tolist()}.")
        full = torch.zeros_like(self._dofs[..., 0])
        full[:, self._driven] = action.to(full).clamp(-1.0, 1.0)
        return (self._home + full * self._scale).flatten()

    def _hand_over(self, command: Tensor) -> None:
        """Give the simulator the command and all rows that have started since its last step, each setter once."""
        from isaacgym.gymtorch import unwrap_tensor

        gym, sim, actors = self._gym, self._open(), self._actors[self._fresh]
        self._kept = [command, actors]
        if len(actors):
            who = unwrap_tensor(actors), len(actors)
            if not self.task.fixed_base:
                self._accept(gym.set_actor_root_state_tensor_indexed(sim, self._raw_root, *who), "root states")
            self._accept(gym.set_dof_state_tensor_indexed(sim, self._raw_dofs, *who), "joint states")
            self._fresh.zero_()
        if self.task.control == "effort":
            self._accept(gym.set_dof_actuation_force_tensor(sim, unwrap_tensor(command)), "forces")
        else:
            self._accept(gym.set_dof_position_target_tensor(sim, unwrap_tensor(command)), "position targets")

    def _accept(self, ok: bool, what: str) -> None:
        if not ok:
            raise ContractError(f"{self.spec.name}: Isaac Gym refused the {what}; its log above says why.")

    def _refresh(self) -> None:
        sim = self._open()
        if self._cpu:
            self._gym.fetch_results(sim, True)
        self._gym.refresh_dof_state_tensor(sim)
        self._gym.refresh_actor_root_state_tensor(sim)
        self._gym.refresh_rigid_body_state_tensor(sim)

    def _make_sim(self, config: IsaacGymConfig) -> gymapi.Sim:
        from isaacgym import gymapi

        params = gymapi.SimParams()
        params.dt, params.substeps = self.task.dt, self.task.substeps
        params.up_axis, params.gravity = gymapi.UP_AXIS_Z, gymapi.Vec3(0.0, 0.0, -9.81)
        params.use_gpu_pipeline = params.physx.use_gpu = not self._cpu
        params.physx.solver_type = 1
        params.physx.num_position_iterations, params.physx.num_velocity_iterations = 4, 0
        params.physx.contact_offset, params.physx.rest_offset = 0.02, 0.001
        params.physx.bounce_threshold_velocity, params.physx.max_depenetration_velocity = 0.2, 100.0
        sim = self._gym.create_sim(int(config.device.partition(":")[2] or 0), -1, gymapi.SIM_PHYSX, params)
        if sim is None:
            raise ConfigError(f"Isaac Gym made no simulation on `{config.device}`. Is there such a device?")
        plane = gymapi.PlaneParams()
        plane.normal = gymapi.Vec3(0.0, 0.0, 1.0)
        self._gym.add_ground(sim, plane)
        return sim

    def _make_envs(self, config: IsaacGymConfig, sim: gymapi.Sim) -> list[int]:
        """One actor in each environment; their numbers in the whole simulation."""
        from isaacgym import gymapi

        gym, task = self._gym, self.task
        options = gymapi.AssetOptions()
        options.fix_base_link = task.fixed_base
        root = config.asset_root or _own_assets()
        asset = gym.load_asset(sim, root, task.asset, options)
        if asset is None:
            raise ConfigError(f"Isaac Gym loaded no `{task.asset}` from `{root}`. Set env.asset_root to its `assets`.")
        dofs = gym.get_asset_dof_count(asset)
        if dofs != len(task.scale):
            raise ConfigError(f"`{task.asset}` has {dofs} degrees of freedom; task `{config.task}` has {task.scale}.")
        pose = gymapi.Transform()
        pose.p = gymapi.Vec3(0.0, 0.0, task.height)
        half = config.spacing / 2
        low, high = gymapi.Vec3(-half, -half, 0.0), gymapi.Vec3(half, half, config.spacing)
        if task.control == "position":
            drives = [gymapi.DOF_MODE_POS] * dofs
        else:
            drives = [gymapi.DOF_MODE_EFFORT if scale else gymapi.DOF_MODE_NONE for scale in task.scale]
        actors = []
        for i in range(config.num_envs):
            env = gym.create_env(sim, low, high, math.isqrt(config.num_envs))
            actor = gym.create_actor(env, asset, pose, config.task, i, 1, 0)
            properties = gym.get_actor_dof_properties(env, actor)
            properties["driveMode"] = [int(drive) for drive in drives]
            properties["stiffness"], properties["damping"] = task.stiffness, task.damping
            gym.set_actor_dof_properties(env, actor, properties)
            actors.append(gym.get_actor_index(env, actor, gymapi.DOMAIN_SIM))
        return actors


def _require_isaac_gym() -> None:
    """Import Isaac Gym, or say which of the known obstacles it is."""
    import sys

    try:
        from isaacgym import gymapi  # noqa: F401
        from isaacgym.gymtorch import wrap_tensor  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:  # a missing binding or compiler is no ImportError
        if "PyTorch was imported before" in str(error):
            raise ConfigError(
                "Isaac Gym has to be imported before torch. In a script put `import isaacgym` first; from a shell: "
                'python -c "import isaacgym, sys; from robo_rl.app.cli import main; sys.exit(main())" train CONFIG.yaml'
            ) from error
        raise ConfigError(
            f"Isaac Gym cannot be imported by Python {sys.version_info[0]}.{sys.version_info[1]} ({error}). It is "
            "NVIDIA's download, installed by hand (`pip install -e isaacgym/python`), with bindings for Python 3.6 to "
            "3.8; this project needs 3.11 or 3.12, so it takes a build of gym_3x.so for one of them. ManiSkill "
            "(`kind: maniskill`) also simulates on a GPU, and needs none."
        ) from error


def _own_assets() -> str:
    """The assets that lie beside an installed Isaac Gym: isaacgym/assets, with the package in isaacgym/python."""
    from pathlib import Path

    import isaacgym

    return str(Path(isaacgym.__file__).resolve().parents[2] / "assets")
