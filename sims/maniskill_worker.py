# SPDX-License-Identifier: Apache-2.0
"""One ManiSkill 3 environment on the CPU, as the `Simulator` of a worker process.

Everything here changes ManiSkill for the whole process, so it is imported in workers only:
    - without a rendering device, materials and textures become empty shells (they are all that state mode needs one
      for: ManiSkill itself skips visual shapes where it cannot render);
    - three accessors that build a tensor out of one body take the short way (`_shorten_accessors`); physics, rewards
      and observations stay ManiSkill's own code, and a test holds them equal to `gym.make`'s bit for bit;
    - questions on stdin (asset downloads) become errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from robo_rl.errors import ConfigError, ContractError, missing_extra, unknown_name
from robo_rl.seeding import TRAIN_EPISODES, uniforms
from robo_rl.types import IMAGES, STATE, ArraySpec, Continuous, EnvSpec, SuccessSpec

if TYPE_CHECKING:
    from sims.maniskill import ManiSkillConfig


class ManiSkillSimulator:
    """See `sims.worker_process.Simulator`. Observation, reward and success are ManiSkill's own."""

    info_names: tuple[str, ...] = ()

    def __init__(self, config: ManiSkillConfig):
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        _shorten_accessors()
        self.env, self.spec = build(config, num_envs=1, gpu=False)
        self._images = config.obs_mode != "state"
        self._success_ends = config.success_ends
        self._elapsed_steps = 0

    def reset(self, task_id: int, episode: int) -> Mapping[str, np.ndarray]:
        self._elapsed_steps = 0
        obs, _ = self.env.reset(seed=seed_of(task_id, episode))
        return {k: v[0].numpy() for k, v in flat_obs(obs, self._images).items()}

    def step(self, action: np.ndarray) -> tuple[Mapping[str, np.ndarray], float, bool, bool, Mapping[str, float]]:
        obs, reward, _, _, info = self.env.step(torch.from_numpy(action)[None])
        self._elapsed_steps += 1
        success = bool(info["success"]) if "success" in info else False
        terminated = (success and self._success_ends == "terminated") or ("fail" in info and bool(info["fail"]))
        truncated = (
            success and self._success_ends == "truncated"
        ) or self._elapsed_steps >= self.spec.max_episode_steps
        arrays = {k: v[0].numpy() for k, v in flat_obs(obs, self._images).items()}
        return arrays, float(reward), terminated, truncated and not terminated, {"success": success}

    def render(self) -> np.ndarray:
        if self.env.render_mode is None:
            raise ContractError("Pictures need `render: true` (and a Vulkan driver) in the ManiSkill configuration.")
        return self.env.render()[0].numpy()

    def close(self) -> None:
        self.env.close()


def make_simulator(config: ManiSkillConfig) -> ManiSkillSimulator:
    """The factory for `WorkerVecEnv`."""
    return ManiSkillSimulator(config)


def seed_of(task_id: int, episode: int) -> int:
    """ManiSkill's 32-bit seed of an episode: even for evaluation, odd for training, so that the two never meet."""
    half = int(uniforms(np.array([task_id]), np.array([episode]), 1)[0, 0] * 2**31)
    return 2 * half + (episode >= TRAIN_EPISODES)


def flat_obs(obs: Any, images: bool) -> dict[str, torch.Tensor]:
    """ManiSkill's observation under our names, batch axis kept."""
    if not images:
        return {STATE: obs}
    from mani_skill.utils import common

    state: Any = common.flatten_state_dict({"agent": obs["agent"], "extra": obs["extra"]}, use_torch=True)
    return {STATE: state} | {f"{IMAGES}{name}": data["rgb"] for name, data in obs["sensor_data"].items()}


def build(config: ManiSkillConfig, num_envs: int, gpu: bool) -> tuple[Any, EnvSpec]:
    """ManiSkill's environment without its wrappers, and what it is.

    Raises:
        ConfigError: unknown task, control or reward mode; a task that wants a download; pictures without a driver.
    """
    try:
        import sapien

        has_renderer = _has_renderer()
        if not has_renderer:
            _stub_materials()
        import mani_skill.envs
        from mani_skill.utils import download_asset
        from mani_skill.utils.registration import REGISTERED_ENVS
    except ImportError:
        raise missing_extra("mani_skill", "maniskill") from None
    if config.task not in REGISTERED_ENVS:
        raise unknown_name("ManiSkill task", config.task, REGISTERED_ENVS)
    pictures = config.render or config.obs_mode != "state"
    if pictures and not has_renderer:
        raise ConfigError(
            f"{config.task}: obs_mode `{config.obs_mode}` with render `{config.render}` needs a Vulkan driver with "
            "descriptorBindingPartiallyBound, and none was found. On a CPU: Mesa's lavapipe 25 or newer "
            "(VK_ICD_FILENAMES names its lvp_icd.json). State observations need none."
        )

    def refuse(message: str = "") -> bool:
        raise ConfigError(f"{config.task} needs files that ManiSkill does not ship: {message} {_DOWNLOAD}{config.task}")

    download_asset.prompt_yes_no = refuse
    registered = REGISTERED_ENVS[config.task]
    max_episode_steps = config.max_episode_steps or registered.max_episode_steps
    if max_episode_steps is None:
        raise ConfigError(f"{config.task} has no time limit of its own: set `max_episode_steps`.")
    options: dict[str, Any] = {"sensor_configs": {"width": config.image_size, "height": config.image_size}}
    try:
        env = registered.make(
            num_envs=num_envs,
            obs_mode=config.obs_mode,
            control_mode=config.control_mode,
            reward_mode=config.reward_mode,
            sim_backend="physx_cuda" if gpu else "physx_cpu",
            render_backend=("gpu" if gpu else "cpu") if pictures else "none",
            render_mode="rgb_array" if config.render else None,
            **(options if pictures else {}),
        )
    except (EOFError, FileNotFoundError) as error:
        refuse(str(error))
        raise
    except (NotImplementedError, KeyError, AssertionError) as error:
        raise ConfigError(f"ManiSkill refuses {config}: {type(error).__name__} {error}") from error
    space: Any = env.single_action_space
    if not hasattr(space, "low"):
        raise ConfigError(f"{config.task} has several robots with an action each, which is not supported.")
    obs = flat_obs(env.reset(seed=0)[0], config.obs_mode != "state")
    spec = EnvSpec(
        name=config.task,
        num_envs=num_envs,
        obs={k: ArraySpec(tuple(v.shape[1:]), str(v.dtype).removeprefix("torch.")) for k, v in obs.items()},
        action=Continuous(tuple(map(float, space.low)), tuple(map(float, space.high))),
        control_hz=float(env.control_freq),
        max_episode_steps=max_episode_steps,
        tasks=(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", config.task.split("-v")[0]).lower(),),
        success=SuccessSpec(f"success of ManiSkill's {config.task}", 1.0, "", hold_steps=1, at="once"),
        convention={"action": config.control_mode},
        simulator=f"mani_skill {mani_skill.__version__}, sapien {sapien.__version__}",
        device=str(env.device),
    )
    return env, spec


_DOWNLOAD = "Run: python -m mani_skill.utils.download_asset "


# --- what is changed in ManiSkill ------------------------------------------------------------------------------------


def _has_renderer() -> bool:
    import sapien

    try:
        sapien.render.RenderMaterial()
    except RuntimeError:
        return False
    return True


class _Shell:
    """Stands where a material or texture would be; keeps what it is given and does nothing."""

    def __init__(self, *args: Any, **values: Any):
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_"):
            return lambda *args: None
        raise AttributeError(name)


def _stub_materials() -> None:
    import sapien

    for module in (sapien.render, sapien.pysapien.render):
        for name in ("RenderMaterial", "RenderTexture2D"):
            setattr(module, name, _Shell)


def _shorten_accessors() -> None:
    """The same values with fewer steps in between; measured 1.35 times the steps per CPU-second of
    PushCube and PickCube (best of 14 windows, one process: 553 -> 738 and 321 -> 450)."""
    from mani_skill.agents.base_agent import BaseAgent
    from mani_skill.agents.controllers.base_controller import BaseController
    from mani_skill.utils.structs import Actor, Articulation, Link, Pose

    def getter(attribute: str) -> Any:
        def pose(self: Any) -> Pose:
            (body,) = self._objs
            pose = getattr(body, attribute)
            return Pose(raw_pose=torch.from_numpy(np.concatenate((pose.p, pose.q))[None]))

        return pose

    def set_joint_drive_targets(self: Any, targets: Any, joints: Any = None, joint_indices: Any = None) -> None:
        for joint, target in zip(joints, targets[0].tolist(), strict=True):
            joint._objs[0].set_drive_target(target)

    def set_action(self: Any, action: torch.Tensor) -> None:
        if not np.isfinite(action.numpy()).all():
            raise ContractError(f"ManiSkill was given the action {action.tolist()}.")
        self.controller.set_action(action)

    def clip_and_scale_action(self: Any, action: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "_middle"):  # ManiSkill computes both anew in every step
            low, high = self.action_space_low, self.action_space_high
            self._middle, self._half = 0.5 * (high + low), 0.5 * (high - low)
        return self._middle + self._half * action.clip(-1, 1)

    changes: dict[Any, dict[str, Any]] = {
        Actor: {"pose": property(getter("pose"), _setter(Actor, "pose"))},
        Link: {"pose": property(getter("entity_pose"), _setter(Link, "pose"))},
        Articulation: {"set_joint_drive_targets": set_joint_drive_targets},
        BaseAgent: {"set_action": set_action},
        BaseController: {"_clip_and_scale_action": clip_and_scale_action},
    }
    for owner, attributes in changes.items():
        for name, value in attributes.items():
            setattr(owner, name, value)


def _setter(owner: type, name: str) -> Any:
    return owner.__dict__[name].fset
