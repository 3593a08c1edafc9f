# SPDX-License-Identifier: Apache-2.0
"""The real ManiSkill, state mode, no Vulkan driver needed."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from robo_rl.errors import ConfigError
from robo_rl.types import STATE
from sims.maniskill import ManiSkillConfig, make

pytest.importorskip("mani_skill")
pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def env():
    env = make(ManiSkillConfig(task="PickCube-v1", num_envs=2, num_workers=2, backend="cpu"))
    yield env
    env.close()


def reference(task: str, init: torch.Tensor, actions: np.ndarray) -> list[list[np.ndarray]]:
    """Obs and rewards of plain `gym.make` over (T, N, A) actions, one environment for each of N initial states.

    Run before anything in this process has touched ManiSkill's accessors; only the materials are stubbed.
    """
    import gymnasium
    import mani_skill.envs  # noqa: F401

    from sims.maniskill_worker import _has_renderer, _stub_materials, seed_of

    if not _has_renderer():
        _stub_materials()
    rows = []
    for row, (task_id, episode) in enumerate(init.tolist()):
        plain = gymnasium.make(
            task,
            obs_mode="state",
            control_mode="pd_joint_delta_pos",
            reward_mode="dense",
            num_envs=1,
            sim_backend="physx_cpu",
            render_backend="none",
        )
        plain.reset(seed=0)  # as ours: the physics engine keeps caches, so even the number of resets must agree
        obs, _ = plain.reset(seed=seed_of(task_id, episode))
        out = [obs[0].numpy()]
        for action in actions[:, row]:
            obs, reward, terminated, truncated, info = plain.step(action)
            flags = [bool(terminated), bool(truncated), bool(info["success"])]
            out.append(np.concatenate([obs[0].numpy(), [float(reward)], flags]))
        plain.close()
        rows.append(out)
    return rows


def test_equals_plain_maniskill(env) -> None:
    assert env.spec.obs[STATE].shape == (42,) and env.spec.action.dim == 8
    assert env.spec.max_episode_steps == 50 and env.spec.control_hz == 20 and env.spec.tasks == ("pick cube",)
    init = torch.tensor([[0, 3], [0, 2**33 + 5]])
    actions = np.random.default_rng(0).uniform(-1, 1, (50, 2, 8)).astype(np.float32)
    expected = reference("PickCube-v1", init, actions)
    obs = env.reset(init=init)[STATE].clone()
    for row in range(2):
        np.testing.assert_array_equal(obs[row].numpy(), expected[row][0])
    for t in range(50):
        step = env.step(torch.from_numpy(actions[t]))
        for row in range(2):
            flags = [x[row].item() for x in (step.terminated, step.truncated, step.info["success"])]
            got = np.concatenate([step.final_obs[STATE][row].numpy(), [step.reward[row].item()], flags])
            np.testing.assert_array_equal(got, expected[row][t + 1], err_msg=f"row {row}, step {t}")
    assert step.truncated.all() and step.valid.all()
    assert torch.equal(env.reset(init=init)[STATE], obs), "the initial state depends on (task_id, episode) alone"


def test_initial_states_vary_and_training_never_meets_evaluation(env) -> None:
    from sims.maniskill_worker import seed_of

    a = env.reset(init=torch.tensor([[0, 0], [0, 1]]))[STATE].clone()
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(env.reset()[STATE][0], a[0])
    assert {seed_of(0, e) % 2 for e in range(50)} == {0} and {seed_of(0, 2**32 + e) % 2 for e in range(50)} == {1}
    assert max(seed_of(0, e) for e in range(500)) < 2**32


def test_keeps_the_contract(env) -> None:
    check = pytest.importorskip("sims.check")
    check.check_vec_env(env)


def test_killed_mid_episode_is_replaced_and_counted(env) -> None:
    env.autoreset = True
    env.reset()
    env.step(torch.zeros(2, 8))
    respawned = env.counters["respawned"]
    os.kill(env._workers[1].process.pid, signal.SIGKILL)
    step = env.step(torch.zeros(2, 8))
    assert step.valid.tolist() == [True, False] and env.counters["respawned"] == respawned + 1
    assert env.step(torch.zeros(2, 8)).valid.all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_batch_keeps_the_contract() -> None:
    check = pytest.importorskip("sims.check")
    env = make(ManiSkillConfig(num_envs=16, backend="gpu"))
    check.check_vec_env(env)
    env.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "PushCub-v1"}, "Did you mean `PushCube-v1`"),
        ({"task": "PickSingleYCB-v1"}, "needs files that ManiSkill does not ship"),
        ({"task": "Empty-v1", "reward_mode": "sparse"}, "has no time limit|refuses"),
        ({"control_mode": "no_such_mode"}, "no_such_mode"),
    ],
)
def test_bad_input_is_refused(options: dict, message: str) -> None:
    from sims.maniskill_worker import build

    with pytest.raises(ConfigError, match=message):
        build(ManiSkillConfig(**options), num_envs=1, gpu=False)
