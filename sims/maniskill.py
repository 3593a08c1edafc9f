# SPDX-License-Identifier: Apache-2.0
"""ManiSkill 3 tasks (https://maniskill.readthedocs.io) as a `VecEnv`.

On a CPU ManiSkill steps one environment per scene: they run in worker processes, several to a process where there are
more environments than cores, and need no Vulkan driver in state mode. On a GPU ManiSkill steps its own batch and all
tensors stay on the device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from robo_rl.errors import ConfigError
from robo_rl.types import VecEnv
from sims.workers import WorkerLimits, WorkerVecEnv


@dataclass(frozen=True)
class ManiSkillConfig:
    """A ManiSkill task and how to run it."""

    kind: Literal["maniskill"] = "maniskill"
    task: str = "PushCube-v1"
    """ManiSkill's id of the task, with its version."""
    num_envs: int = 16
    """Environments stepped together."""
    num_workers: int | None = None
    """Processes on a CPU (500 MB each); one per core, at most one per environment, where empty."""
    control_mode: str = "pd_joint_delta_pos"
    """ManiSkill's name of the controller, which also fixes what an action means."""
    reward_mode: Literal["dense", "normalized_dense", "sparse"] = "dense"
    """`normalized_dense` is `dense` divided by its largest value."""
    obs_mode: Literal["state", "rgb"] = "state"
    """`state` includes the objects' poses; `rgb` gives cameras and what a robot can measure, and needs Vulkan."""
    image_size: int = 128
    """Pixels, height and width of each camera."""
    success_ends: Literal["terminated", "truncated", "never"] = "terminated"
    """What reaching the goal does to the episode. `terminated` is ManiSkill's own step; `truncated` bootstraps beyond
    it, which its dense rewards are made for (they pay per step, so ending early would cost return)."""
    max_episode_steps: int | None = None
    """Time limit; the task's own where empty."""
    backend: Literal["auto", "cpu", "gpu"] = "auto"
    """`auto` takes the GPU where PyTorch sees one."""
    render: bool = False
    """Make `render()` possible; needs Vulkan."""


def make(config: ManiSkillConfig, seed: int = 0, limits: WorkerLimits | None = None) -> VecEnv:
    """The environment on the backend that `config` names.

    Raises:
        ConfigError: unknown task, a task that wants a download, missing extra, no GPU where one was asked for.
    """
    import torch

    gpu = torch.cuda.is_available()
    if config.backend == "gpu" and not gpu:
        raise ConfigError("backend `gpu` needs a CUDA device, and PyTorch sees none. Use `cpu` or `auto`.")
    if gpu and config.backend != "cpu":
        from sims.maniskill_gpu import ManiSkillGpuEnv

        return ManiSkillGpuEnv(config, seed)
    from sims.maniskill_worker import make_simulator

    num_workers = config.num_workers or min(config.num_envs, os.cpu_count() or 1)
    return WorkerVecEnv(make_simulator, config, config.num_envs, num_workers, seed, limits or WorkerLimits())
