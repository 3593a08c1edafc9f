# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Isaac Gym (Preview 4) as a `VecEnv`: its tensor API, one actor per environment, all rows on one device.

Isaac Gym is installed by hand from NVIDIA's download, and its bindings are compiled for Python 3.6 to 3.8 only: this
module needs a build for the Python that runs it, and says so where there is none. It was never run on the simulator
itself. What is checked: its types against `isaacgym-stubs`, its logic on a stand-in that follows those stubs and
enforces the API's known traps.

The traps, and where they are met:
    import   isaacgym must be imported before torch, or it refuses; import `sims.isaac_gym` first of all.
    stale    state tensors hold what the last refresh saw: every read follows a refresh (`_refresh`).
    setters  of several indexed state setters between two simulation steps only the last counts: all rows that start
             are set by one call (`_start`).
    device   on the CPU pipeline results are fetched before they are refreshed.
    index    the indexed setters want int32 actor numbers of the whole simulation, not of the environment.

Axes: N num_envs, M some of the rows, D degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from robo_rl.errors import ConfigError, ContractError, unknown_name
from robo_rl.seeding import first_training_episode, uniforms
from robo_rl.types import STATE, TASK_ID, ArraySpec, Continuous, EnvSpec, Obs, Step, SuccessSpec

if TYPE_CHECKING:
    import numpy as np
    from isaacgym import gymapi
    from torch import Tensor


@dataclass(frozen=True)
class IsaacGymConfig:
    kind: Literal["isaac_gym"] = "isaac_gym"
    task: str = "cartpole"
    """One of `TASKS`."""
    num_envs: int = 512
    device: str = "cuda:0"
    """Where physics and tensors live; `cpu` runs PhysX and its pipeline there."""
    asset_root: str = ""
    """The folder of Isaac Gym's `assets`; empty: the one beside the installed package."""
    spacing: float = 4.0
    """Distance between neighbouring environments [m]."""


@dataclass(frozen=True)
class Task:
    """What a task adds to the simulator. The functions take `pos` and `vel` (N, D) in rad or m, and per second.

    Attributes:
        asset: file below `asset_root`.
        height: of the actor's root above the ground [m].
        effort: force or torque of a full action on each degree of freedom [N or Nm]; 0 where it is not driven.
        start: from uniforms (M, 2 D) in [0, 1) to positions and velocities (M, D).
        reward: (N,) float from positions and velocities after the step.
        failed: (N,) bool, where the episode ends without a value beyond.
        succeeded: (N,) bool, whether the success condition holds.
    """

    asset: str
    height: float
    effort: tuple[float, ...]
    dt: float
    substeps: int
    horizon: int
    start: Callable[[Tensor], tuple[Tensor, Tensor]]
    reward: Callable[[Tensor, Tensor], Tensor]
    failed: Callable[[Tensor, Tensor], Tensor]
    succeeded: Callable[[Tensor, Tensor], Tensor]
    success: SuccessSpec


def _cartpole_start(u: Tensor) -> tuple[Tensor, Tensor]:
    return 0.2 * (u[:, :2] - 0.5), 0.5 * (u[:, 2:] - 0.5)


def _cartpole_failed(pos: Tensor, vel: Tensor) -> Tensor:
    return (pos[:, 0].abs() > 3.0) | (pos[:, 1].abs() > math.pi / 2)


def _cartpole_reward(pos: Tensor, vel: Tensor) -> Tensor:
    reward = 1.0 - pos[:, 1] ** 2 - 0.01 * vel[:, 0].abs() - 0.005 * vel[:, 1].abs()
    return reward.where(~_cartpole_failed(pos, vel), -2.0 * reward.new_ones(()))


TASKS: dict[str, Task] = {
    # The numbers of NVIDIA's own Cartpole example (IsaacGymEnvs, arXiv:2108.10470); success is our addition.
    "cartpole": Task(
        asset="urdf/cartpole.urdf",
        height=2.0,
        effort=(400.0, 0.0),
        dt=1 / 60,
        substeps=2,
        horizon=500,
        start=_cartpole_start,
        reward=_cartpole_reward,
        failed=_cartpole_failed,
        succeeded=lambda pos, vel: (pos[:, 1].abs() < 0.1) & (pos[:, 0].abs() < 1.0),
        success=SuccessSpec("angle of the pole, the cart within 1 m", 0.1, "rad", 60, "end"),
    ),
}


def _require_isaac_gym() -> None:
    """Import Isaac Gym, or say which of the known obstacles it is."""
    import sys

    torch_first = "torch" in sys.modules and "isaacgym" not in sys.modules
    try:
        from isaacgym import gymapi  # noqa: F401
        from isaacgym.gymtorch import wrap_tensor  # noqa: F401
    except ImportError as error:
        if torch_first and "torch" in str(error).lower():
            raise ConfigError(
                "Isaac Gym has to be imported before torch. Put `import isaacgym` first in your script, or start with "
                "`python -c 'import isaacgym, runpy; runpy.run_path(...)'`."
            ) from error
        raise ConfigError(
            f"Isaac Gym cannot be imported by Python {sys.version_info[0]}.{sys.version_info[1]} ({error}). It is "
            "NVIDIA's download, installed by hand (`pip install -e isaacgym/python`), with bindings for Python 3.6 to "
            "3.8; this project needs 3.11 or 3.12, so its bindings have to be rebuilt for one of them."
        ) from error


class IsaacGymEnv:
    """A `VecEnv` on `spec.device`. `counters`: episodes `dropped` because physics became `non_finite`."""

    def __init__(self, config: IsaacGymConfig, seed: int = 0):
        """Raises ConfigError where Isaac Gym, the task or its asset is not there."""
        if config.task not in TASKS:
            raise unknown_name("Isaac Gym task", config.task, TASKS)
        _require_isaac_gym()
        import torch
        from isaacgym import gymapi
        from isaacgym.gymtorch import wrap_tensor

        self.task, self.autoreset = TASKS[config.task], True
        self.counters = {"dropped": 0, "non_finite": 0}
        self._gym = gymapi.acquire_gym()
        self._cpu = config.device == "cpu"
        self._sim: gymapi.Sim | None = self._make_sim(config)
        self._actors = torch.tensor(self._make_envs(config, self._sim), dtype=torch.int32, device=config.device)
        self._gym.prepare_sim(self._sim)
        n, dofs = config.num_envs, len(self.task.effort)
        self._raw_state = self._gym.acquire_dof_state_tensor(self._sim)
        self._state = wrap_tensor(self._raw_state).view(n, dofs, 2)
        self._effort = torch.tensor(self.task.effort, device=config.device)
        self._driven = self._effort.nonzero().squeeze(-1)
        self._rows = torch.arange(n, device=config.device)
        self._elapsed = torch.zeros(n, dtype=torch.int64, device=config.device)
        self._held = torch.zeros(n, dtype=torch.int64, device=config.device)
        self._ended = torch.zeros(n, dtype=torch.bool, device=config.device)
        self._next_episode = first_training_episode(seed)
        driven = len(self._driven)
        self.spec = EnvSpec(
            name=f"isaac_gym/{config.task}",
            num_envs=n,
            obs={STATE: ArraySpec((2 * dofs,)), TASK_ID: ArraySpec((), "int64")},
            action=Continuous((-1.0,) * driven, (1.0,) * driven),
            control_hz=1 / self.task.dt,
            max_episode_steps=self.task.horizon,
            tasks=(config.task,),
            success=self.task.success,
            convention={"action": "effort"},
            simulator="isaac gym preview 4",
            device=config.device,
        )
        self.reset()

    def reset(self, seed: int | None = None, rows: Tensor | None = None, init: Tensor | None = None) -> Obs:
        """See `VecEnv.reset`."""
        if seed is not None:
            if rows is not None:
                raise ContractError("`seed` restarts the whole sequence of episodes: give it without `rows`.")
            self._next_episode = first_training_episode(seed)
        index = self._rows if rows is None else rows.to(self._rows.device)
        if init is None:
            init = self._draw(len(index))
        if tuple(init.shape) != (len(index), 2) or bool((init[:, 0] != 0).any()) or bool((init[:, 1] < 0).any()):
            raise ContractError(
                f"`init` must be ({len(index)}, 2) of (task_id 0, episode >= 0); got shape {tuple(init.shape)} with "
                f"{init.tolist()[:3]}..."
            )
        self._start(index, init.cpu().numpy())
        return self._obs()

    def step(self, action: Tensor) -> Step:
        """See `VecEnv.step`."""
        import torch
        from isaacgym.gymtorch import unwrap_tensor

        assert self._sim is not None, "closed"
        expected = (self.spec.num_envs, len(self._driven))
        if tuple(action.shape) != expected:
            raise ContractError(f"Action must have shape {expected}, got {tuple(action.shape)}.")
        waiting = self._ended.clone()  # ended earlier, autoreset off: their steps are meaningless
        forces = torch.zeros_like(self._state[..., 0])
        forces[:, self._driven] = action.to(forces.device).clamp(-1.0, 1.0) * self._effort[self._driven]
        self._gym.set_dof_actuation_force_tensor(self._sim, unwrap_tensor(forces.flatten()))
        self._gym.simulate(self._sim)
        self._refresh()
        pos, vel = self._state.clone().unbind(-1)
        finite = (torch.isfinite(pos) & torch.isfinite(vel)).all(dim=1)
        broken = ~finite & ~waiting
        self.counters["non_finite"] += int(broken.sum())
        self.counters["dropped"] += int(broken.sum())
        valid = ~(broken | waiting)
        self._elapsed += ~waiting
        self._held = torch.where(self.task.succeeded(pos, vel) & valid, self._held + 1, 0)
        success = self._held >= self.task.success.hold_steps
        terminated = broken | (self.task.failed(pos, vel) & valid)
        truncated = (self._elapsed >= self.task.horizon) & ~terminated & ~waiting
        reward = torch.where(valid, self.task.reward(pos, vel), torch.zeros_like(pos[:, 0]))
        final_obs = obs = self._obs(finite)
        self._ended |= terminated | truncated
        if self.autoreset and bool(self._ended.any()):
            rows = self._ended.nonzero().squeeze(-1)
            self._start(rows, self._draw(len(rows)).numpy())
            obs = self._obs()
        return Step(obs, final_obs, reward, terminated, truncated, valid, {"success": success})

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

    # --- the simulator -----------------------------------------------------------------------------------------

    def _make_sim(self, config: IsaacGymConfig) -> gymapi.Sim:
        from isaacgym import gymapi

        index = 0 if self._cpu else int(config.device.partition(":")[2] or 0)
        params = gymapi.SimParams()
        params.dt, params.substeps = self.task.dt, self.task.substeps
        params.up_axis, params.gravity = gymapi.UP_AXIS_Z, gymapi.Vec3(0.0, 0.0, -9.81)
        params.use_gpu_pipeline = params.physx.use_gpu = not self._cpu
        params.physx.solver_type = 1
        params.physx.num_position_iterations, params.physx.num_velocity_iterations = 4, 0
        sim = self._gym.create_sim(index, -1, gymapi.SIM_PHYSX, params)
        if sim is None:
            raise ConfigError(f"Isaac Gym made no simulation on `{config.device}`. Is there such a device?")
        plane = gymapi.PlaneParams()
        plane.normal = gymapi.Vec3(0.0, 0.0, 1.0)
        self._gym.add_ground(sim, plane)
        return sim

    def _make_envs(self, config: IsaacGymConfig, sim: gymapi.Sim) -> list[int]:
        """One actor in each environment; their numbers in the whole simulation."""
        from isaacgym import gymapi

        gym = self._gym
        options = gymapi.AssetOptions()
        options.fix_base_link = True
        asset = gym.load_asset(sim, config.asset_root or _own_assets(), self.task.asset, options)
        if asset is None:
            raise ConfigError(f"There is no `{self.task.asset}` below `{config.asset_root}`. Set env.asset_root.")
        dofs = gym.get_asset_dof_count(asset)
        if dofs != len(self.task.effort):
            raise ConfigError(f"`{self.task.asset}` has {dofs} degrees of freedom; the task drives {self.task.effort}.")
        pose = gymapi.Transform()
        pose.p = gymapi.Vec3(0.0, 0.0, self.task.height)
        half = config.spacing / 2
        low, high = gymapi.Vec3(-half, -half, 0.0), gymapi.Vec3(half, half, config.spacing)
        actors = []
        for i in range(config.num_envs):
            env = gym.create_env(sim, low, high, math.isqrt(config.num_envs))
            actor = gym.create_actor(env, asset, pose, config.task, i, 1, 0)
            properties = gym.get_actor_dof_properties(env, actor)
            drives = [gymapi.DOF_MODE_EFFORT if effort else gymapi.DOF_MODE_NONE for effort in self.task.effort]
            properties["driveMode"] = [int(drive) for drive in drives]
            properties["stiffness"], properties["damping"] = 0.0, 0.0
            gym.set_actor_dof_properties(env, actor, properties)
            actors.append(gym.get_actor_index(env, actor, gymapi.DOMAIN_SIM))
        return actors

    def _refresh(self) -> None:
        assert self._sim is not None, "closed"
        if self._cpu:
            self._gym.fetch_results(self._sim, True)
        self._gym.refresh_dof_state_tensor(self._sim)

    def _draw(self, count: int) -> Tensor:
        """(count, 2) int64 of the next training episodes."""
        import torch

        episodes = torch.arange(self._next_episode, self._next_episode + count)
        self._next_episode += count
        return torch.stack([torch.zeros_like(episodes), episodes], dim=1)

    def _start(self, rows: Tensor, init: np.ndarray) -> None:
        """Put `rows` (M,) into the initial states of `init` (M, 2), by one call for all."""
        import torch
        from isaacgym.gymtorch import unwrap_tensor

        assert self._sim is not None, "closed"
        dofs = len(self.task.effort)
        u = torch.from_numpy(uniforms(init[:, 0], init[:, 1], 2 * dofs)).float().to(self._state.device)
        pos, vel = self.task.start(u)
        self._state[rows] = torch.stack([pos, vel], dim=-1)
        actors = self._actors[rows].contiguous()
        self._gym.set_dof_state_tensor_indexed(self._sim, self._raw_state, unwrap_tensor(actors), len(actors))
        self._elapsed[rows] = 0
        self._held[rows] = 0
        self._ended[rows] = False

    def _obs(self, usable: Tensor | None = None) -> Obs:
        """Positions and velocities, interleaved as NVIDIA's example has them; zeros where not `usable`."""
        import torch

        state = self._state.flatten(1).clone()
        if usable is not None:
            state = torch.where(usable[:, None], state, torch.zeros_like(state))
        return {STATE: state, TASK_ID: torch.zeros_like(self._elapsed)}


def _own_assets() -> str:
    """The assets that lie beside an installed Isaac Gym: isaacgym/assets, with the package in isaacgym/python."""
    from pathlib import Path

    import isaacgym

    return str(Path(isaacgym.__file__).resolve().parents[2] / "assets")
