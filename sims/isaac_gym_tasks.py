# SPDX-License-Identifier: Apache-2.0
"""Tasks for Isaac Gym (`sims/isaac_gym.py`). Add yours to `TASKS` before the environment is made.

Axes: N num_envs, M some of the rows, D degrees of freedom, L bodies (links), K numbers in an observation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from robo_rl.types import SuccessSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class State:
    """What a task sees of all rows.

    Attributes:
        pos, vel: (N, D) in rad or m, and per second.
        root: (N, 13), the actor's root: position [m], quaternion x y z w, linear and angular velocity.
        draw: (N, draws) in [0, 1), a pure function of the episode and constant in it; make goals of them.
    """

    pos: Tensor
    vel: Tensor
    root: Tensor
    draw: Tensor


def joints(state: State) -> Tensor:
    """(N, 2 D) positions and velocities, interleaved."""
    import torch

    return torch.stack([state.pos, state.vel], dim=-1).flatten(1)


@dataclass(frozen=True)
class Task:
    """What a task adds to the simulator.

    Its functions are batched over rows. Those that judge also get the bodies, (N, L, 13) in the layout of
    `State.root`; an observation cannot, because the simulator knows them only after the episode's first step.

    Attributes:
        asset: URDF or MJCF file below `asset_root`.
        height: of the actor's root above the ground [m].
        scale: what a full action adds on each degree of freedom; 0 where the policy does not drive it.
        draws: uniform random numbers of an episode.
        start: from the draws (M, draws) to positions and velocities (M, D).
        reward: (N,) after the step.
        failed: (N,) bool, the episode ends without a value beyond.
        observe: (N, K) from joints and root.
        succeeded: (N,) bool, whether the condition of `success` holds now.
        control: `effort`: a force or torque [N or Nm], undriven joints are free. `position`: a target around `home`
            [rad or m] for a PD drive of `stiffness` and `damping`, undriven joints are held there.
        fixed_base: whether the root is bolted to the world; a free one is put back where it stood at first.
    """

    asset: str
    height: float
    scale: tuple[float, ...]
    dt: float
    substeps: int
    horizon: int
    draws: int
    start: Callable[[Tensor], tuple[Tensor, Tensor]]
    reward: Callable[[State, Tensor], Tensor]
    failed: Callable[[State, Tensor], Tensor]
    observe: Callable[[State], Tensor] = joints
    succeeded: Callable[[State, Tensor], Tensor] | None = None
    success: SuccessSpec | None = None
    control: Literal["effort", "position"] = "effort"
    home: tuple[float, ...] = ()
    stiffness: float = 0.0
    damping: float = 0.0
    fixed_base: bool = True


def _cartpole_start(draw: Tensor) -> tuple[Tensor, Tensor]:
    return 0.2 * (draw[:, :2] - 0.5), 0.5 * (draw[:, 2:] - 0.5)


def _cartpole_failed(state: State, bodies: Tensor) -> Tensor:
    return (state.pos[:, 0].abs() > 3.0) | (state.pos[:, 1].abs() > math.pi / 2)


def _cartpole_reward(state: State, bodies: Tensor) -> Tensor:
    reward = 1.0 - state.pos[:, 1] ** 2 - 0.01 * state.vel[:, 0].abs() - 0.005 * state.vel[:, 1].abs()
    return reward.where(~_cartpole_failed(state, bodies), -2.0 * reward.new_ones(()))


TASKS: dict[str, Task] = {
    # Starts, reward, failure and physics are those of Cartpole in NVIDIA's IsaacGymEnvs (arXiv:2108.10470). Ours: the
    # time limit truncates after 500 steps (there it ends the episode after 499), ended rows restart within the step,
    # observations are not clipped to 5, and there is a success.
    "cartpole": Task(
        asset="urdf/cartpole.urdf",
        height=2.0,
        scale=(400.0, 0.0),
        dt=0.0166,
        substeps=2,
        horizon=500,
        draws=4,
        start=_cartpole_start,
        reward=_cartpole_reward,
        failed=_cartpole_failed,
        succeeded=lambda state, bodies: (state.pos[:, 1].abs() < 0.1) & (state.pos[:, 0].abs() < 1.0),
        success=SuccessSpec("angle of the pole, the cart within 1 m", 0.1, "rad", 60, "end"),
    ),
}
