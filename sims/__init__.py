# SPDX-License-Identifier: Apache-2.0
"""Simulators behind one contract, `robo_rl.types.VecEnv`. `make` builds one from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from sims.gymnasium import GymnasiumConfig
from sims.isaac_gym import IsaacGymConfig
from sims.maniskill import ManiSkillConfig
from sims.mujoco.gym_tasks import MujocoConfig
from sims.mujoco.tabletop import TabletopConfig

if TYPE_CHECKING:
    from robo_rl.types import VecEnv

SimConfig: TypeAlias = TabletopConfig | MujocoConfig | GymnasiumConfig | ManiSkillConfig | IsaacGymConfig


def make(config: SimConfig, seed: int = 0) -> VecEnv:
    """The simulator that `config` describes; `seed` chooses its sequence of training episodes."""
    match config:
        case TabletopConfig():
            from sims.mujoco.tabletop import TabletopEnv

            return TabletopEnv(config, seed)
        case MujocoConfig():
            from sims.mujoco.gym_tasks import MujocoEnv

            return MujocoEnv(config, seed)
        case GymnasiumConfig():
            from sims import gymnasium

            return gymnasium.make(config, seed)
        case ManiSkillConfig():
            from sims import maniskill

            return maniskill.make(config, seed)
        case IsaacGymConfig():
            from sims.isaac_gym import IsaacGymEnv

            return IsaacGymEnv(config, seed)
