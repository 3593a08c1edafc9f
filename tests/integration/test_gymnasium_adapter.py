# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's environments behind our contract: real ones, in every autoreset mode."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import ACHIEVED_GOAL, GOAL, IMAGES, STATE, Discrete
from sims.check import check_vec_env
from sims.gymnasium import GymnasiumConfig, GymnasiumVecEnv, _seeds, make


@pytest.mark.parametrize(
    "config",
    [
        GymnasiumConfig(num_envs=3, max_episode_steps=60),
        GymnasiumConfig(num_envs=3, max_episode_steps=60, vector="async"),
        GymnasiumConfig(id="FrozenLake-v1", num_envs=3, kwargs={"is_slippery": False}),
        GymnasiumConfig(id="Hopper-v5", num_envs=2),
        GymnasiumConfig(id="sims.gymnasium_export:robo_rl/Lift-v0", num_envs=2),
        GymnasiumConfig(
            id="sims.gymnasium_export:robo_rl/Lift-v0", num_envs=2, vector="own", kwargs={"autoreset_mode": "Disabled"}
        ),
    ],
    ids=lambda c: f"{c.id}-{c.vector}",
)
def test_keeps_the_contract(config):
    check_vec_env(lambda: make(config))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_gymnasiums_vector_environment_keeps_the_contract_in_each_mode(mode):
    def env():
        return gymnasium.make_vec("CartPole-v1", 3, "sync", {"autoreset_mode": mode}, max_episode_steps=60)

    check_vec_env(lambda: GymnasiumVecEnv(env()))


def test_episodes_equal_gymnasiums():
    ours = make(GymnasiumConfig(id="Hopper-v5", num_envs=2))
    theirs = gymnasium.make("Hopper-v5")
    ours.autoreset = False
    episodes = np.array([5, 2**33])
    first = ours.reset(init=torch.tensor([[0, e] for e in episodes]))[STATE][1].numpy()
    obs, _ = theirs.reset(seed=int(_seeds(episodes)[1]))
    np.testing.assert_array_equal(first, obs.astype(np.float32))
    assert ours.spec.max_episode_steps == 1000 and ours.spec.control_hz == 125
    rng = np.random.default_rng(0)
    for _ in range(100):
        action = rng.uniform(-2, 2, (2, 3)).astype(np.float32)  # beyond the bounds: clipped
        step = ours.step(torch.from_numpy(action))
        obs, reward, terminated, _, _ = theirs.step(action[1].clip(-1, 1))
        np.testing.assert_array_equal(step.obs[STATE][1].numpy(), obs.astype(np.float32))
        assert step.reward[1] == np.float32(reward) and bool(step.terminated[1]) == terminated
        if terminated:
            break
    assert terminated
    ours.close()


def test_next_step_mode_the_reset_only_step_is_invalid():
    """CartPole's own vector version resets itself one step later; the action of that step does nothing."""
    env = make(GymnasiumConfig(num_envs=4, vector="own"))
    assert isinstance(env.spec.action, Discrete) and not env.nameable
    env.reset(seed=0)
    right, ends = torch.ones(4, dtype=torch.int64), 0
    before = torch.zeros(4, dtype=torch.bool)
    for _ in range(60):
        step = env.step(right)
        assert torch.equal(step.valid, ~before)
        assert (step.reward[before] == 0).all() and not step.terminated[before].any()
        ended = step.terminated | step.truncated
        assert (step.final_obs[STATE][ended, 2].abs() > 0.2).all(), "the last observation has a fallen pole"
        assert (step.obs[STATE][before, 2].abs() <= 0.05).all(), "the reset-only step shows the new episode"
        before, ends = ended, ends + int(ended.sum())
    assert ends > 8
    with pytest.raises(ContractError, match="cannot be told an initial state"):
        env.reset(rows=torch.tensor([0]))
    env.autoreset = False
    with pytest.raises(ContractError, match="`autoreset` cannot be off"):
        env.step(right)
    env.close()


def test_same_step_mode_final_obs_comes_from_info():
    env = make(GymnasiumConfig(id="sims.gymnasium_export:robo_rl/Reach-v0", num_envs=3, vector="own"))
    reference = make(GymnasiumConfig(id="sims.gymnasium_export:robo_rl/Reach-v0", num_envs=3, vector="own"))
    assert not env.nameable
    start = env.reset(seed=1)[STATE].clone()
    assert torch.equal(reference.reset(seed=1)[STATE], start)
    for _ in range(50):
        step = env.step(torch.zeros(3, 6))
        raw, *_ = reference._env.step(np.zeros((3, 6), np.float32))
    assert step.truncated.all() and step.valid.all() and step.info["success"].shape == (3,)
    np.testing.assert_array_equal(step.obs[STATE].numpy(), raw[STATE])
    # Nothing moved: the last observation is the first but for the joints' tiny motion, the next episode's is not.
    assert (step.final_obs[STATE][:, :6] - start[:, :6]).abs().max() < 0.05
    assert not torch.equal(step.final_obs[STATE], step.obs[STATE])
    env.close()
    reference.close()


class Goals(gymnasium.Env):
    """Every kind of observation that we translate; NaN at `position` 3."""

    observation_space = spaces.Dict(
        {
            "observation": spaces.Dict({"x": spaces.Box(-9, 9, (2,)), "mode": spaces.Discrete(3, start=1)}),
            "achieved_goal": spaces.Box(-9, 9, (1,)),
            "desired_goal": spaces.Box(-9, 9, (1,)),
            "wrist": spaces.Box(0, 255, (4, 5, 3), np.uint8),
        }
    )
    action_space = spaces.Discrete(2, start=5)

    def __init__(self, broken: bool = True):
        self.broken = broken

    def _obs(self):
        x = np.array([np.nan if self.broken and self.position == 3 else self.position, self.start], np.float32)
        return {
            "observation": {"x": x, "mode": 1 + self.position % 3},
            "achieved_goal": np.float32([self.position]),
            "desired_goal": np.float32([4]),
            "wrist": np.full((4, 5, 3), self.position, np.uint8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.start = 0, self.np_random.random()
        return self._obs(), {}

    def step(self, action):
        assert action in (5, 6)
        self.position += int(action) - 5
        done = self.position == 4
        return self._obs(), float(done), done, done, {"is_success": done}


def goals(broken: bool, mode: AutoresetMode = AutoresetMode.DISABLED) -> GymnasiumVecEnv:
    return GymnasiumVecEnv(SyncVectorEnv([lambda: Goals(broken)] * 2, autoreset_mode=mode), max_episode_steps=50)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_dicts_are_translated_and_success_read(mode):
    env = goals(broken=False, mode=mode)
    assert set(env.spec.obs) == {STATE, GOAL, ACHIEVED_GOAL, IMAGES + "wrist"}
    names = env.spec.obs[STATE].names
    assert sorted(names) == [f"observation.{n}" for n in ("mode.0", "mode.1", "mode.2", "x.0", "x.1")]
    env.reset(seed=0)
    for t in range(1, 5):
        step = env.step(torch.tensor([1, 0]))
        state = dict(zip(names, step.final_obs[STATE][0].tolist(), strict=True))
        assert state["observation.x.0"] == t and state[f"observation.mode.{t % 3}"] == 1
        assert step.final_obs[GOAL][0] == 4 and step.final_obs[ACHIEVED_GOAL][0] == t
        assert (step.final_obs[IMAGES + "wrist"][0] == t).all()
    assert step.info["success"].tolist() == [True, False] and step.reward.tolist() == [1, 0]
    assert step.terminated.tolist() == [True, False] and not step.truncated.any(), "terminated wins"
    assert step.obs[ACHIEVED_GOAL].tolist() == [[0], [0]]
    env.close()


def test_a_broken_observation_is_dropped_counted_and_never_seen():
    env = goals(broken=True)
    env.reset(seed=0)
    for _ in range(3):
        step = env.step(torch.tensor([1, 0]))
    assert step.valid.tolist() == [False, True] and env.counters == {"non_finite": 1}
    assert step.truncated.tolist() == [True, False], "the episode ends there"
    assert all(v.double().isfinite().all() for v in (*step.obs.values(), *step.final_obs.values()))
    assert step.obs[ACHIEVED_GOAL][0] == 0 and env.step(torch.tensor([0, 0])).valid.all()
    env.close()


def test_a_foreign_environment_keeps_the_contract_with_dicts():
    check_vec_env(goals(broken=False), steps=20)


def test_pictures_where_asked_for():
    env = make(GymnasiumConfig(id="sims.gymnasium_export:robo_rl/Reach-v0", num_envs=2, render=True))
    pictures = env.render(torch.tensor([1]))
    assert pictures.shape == (1, 240, 320, 3) and pictures.std() > 0
    env.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GymnasiumConfig(id="CartPol-v1"), "Did you mean `CartPole-v1`"),
        (GymnasiumConfig(id="CartPole-v77"), "CartPole-v1"),
        (GymnasiumConfig(id="Blackjack-v1"), "has no time limit"),
        (GymnasiumConfig(id="Blackjack-v1", max_episode_steps=9), "must be Box, Discrete, MultiBinary or Dict"),
        (GymnasiumConfig(kwargs={"sutton": 3}), "Gymnasium cannot make CartPole-v1 with"),
        (GymnasiumConfig(id="MountainCar-v0", vector="own"), "Gymnasium cannot make MountainCar-v0"),
        (GymnasiumConfig(id="no_such_module:X-v0"), "no_such_module"),
    ],
)
def test_bad_input_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make(config)


def test_wrong_actions_are_refused():
    env = make(GymnasiumConfig(id="Pendulum-v1", num_envs=2))
    with pytest.raises(ContractError, match=r"action must have shape \(2, 1\), got \(2,\)"):
        env.step(torch.zeros(2))
    with pytest.raises(ContractError, match="NaN"):
        env.step(torch.full((2, 1), float("nan")))
    env.close()
