# SPDX-License-Identifier: Apache-2.0
"""Stable-Baselines3 both ways: it trains on our environments, and its trained policies act as it says."""

from typing import Any

import numpy as np
import pytest
import torch

stable_baselines3 = pytest.importorskip("stable_baselines3")

import gymnasium
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

import sims
from policies.sb3 import load_sb3
from robo_rl.app.evaluate import EvaluateConfig, EvaluationConfig, evaluate
from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import ENVIRONMENT_STATE, STATE, ArraySpec, Continuous, Discrete, EnvSpec
from sims.mujoco.gym_tasks import MujocoConfig
from sims.mujoco.tabletop import TabletopConfig
from sims.sb3 import SB3VecEnv

torch.set_num_threads(1)
KEYS = (STATE, ENVIRONMENT_STATE)
PENDULUM = EnvSpec("Pendulum-v1", 1, {STATE: ArraySpec((3,))}, Continuous((-2.0,), (2.0,)), 20, 200)
CARTPOLE = EnvSpec("CartPole-v1", 1, {STATE: ArraySpec((4,))}, Discrete(2), 50, 500)


def tabletop(**settings) -> Any:
    return sims.make(TabletopConfig(**({"task": "reach", "num_envs": 4, "num_threads": 1} | settings)))


# --- ours for it -----------------------------------------------------------------------------------------------


def test_ppo_of_sb3_trains_on_our_batch():
    env = VecMonitor(SB3VecEnv(tabletop(num_envs=32), KEYS))
    model = stable_baselines3.PPO(
        "MlpPolicy", env, n_steps=32, batch_size=512, n_epochs=5, gamma=0.97, seed=0, device="cpu"
    )
    model.learn(32 * 64)
    first = np.mean([e["r"] for e in model.ep_info_buffer])
    model.learn(24 * 32 * 32, reset_num_timesteps=False)
    last = np.mean([e["r"] for e in model.ep_info_buffer])
    assert last > first + 2, (first, last)
    env.close()


def test_a_dict_of_everything_and_one_image():
    model = stable_baselines3.PPO("MultiInputPolicy", SB3VecEnv(tabletop()), n_steps=8, batch_size=16, device="cpu")
    model.learn(32)
    env = SB3VecEnv(tabletop(cameras=("front",), image_size=36), ("observation.images.front",))
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (36, 36, 3), np.uint8)
    assert env.reset().dtype == np.uint8
    env.close()


def test_ends_are_told_as_sb3_expects():
    env = SB3VecEnv(tabletop(horizon=5, stagger=False), KEYS)
    env.seed(7)
    first = env.reset()
    env.seed(7)
    assert np.array_equal(env.reset(), first)
    for _ in range(5):
        obs, reward, done, infos = env.step(np.zeros((4, 6), np.float32))
    assert done.all() and reward.dtype == np.float32
    for row, info in enumerate(infos):
        assert info["TimeLimit.truncated"] and info["valid"] and not info["is_success"]
        assert not np.allclose(info["terminal_observation"], obs[row]), "obs is the new episode's already"
    env.close()


def test_a_broken_row_ends_without_reward_or_bootstrap():
    inner = tabletop(stagger=False)
    env = SB3VecEnv(inner, KEYS)
    env.reset()
    advance = inner._physics.advance

    def breaks(*args):
        after, sensors = advance(*args)
        after[1] = np.nan
        return after, sensors

    inner._physics.advance = breaks
    obs, reward, done, infos = env.step(np.zeros((4, 6), np.float32))
    assert done.tolist() == [False, True, False, False] and reward[1] == 0 and np.isfinite(np.asarray(obs)).all()
    assert not infos[1]["valid"] and not infos[1]["TimeLimit.truncated"]
    env.close()


def test_keys_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"observation\.stat"):
        SB3VecEnv(tabletop(), ("observation.stat",))
    with pytest.raises(ConfigError, match="Only vectors"):
        SB3VecEnv(tabletop(cameras=("front",)), (STATE, "observation.images.front"))


# --- its for us ------------------------------------------------------------------------------------------------


def trained(name, tmp_path, env_id="Pendulum-v1", steps=70, **settings):
    cls = getattr(stable_baselines3, name)
    settings = {"PPO": {"n_steps": 64}, "A2C": {}}.get(name, {"learning_starts": 50}) | settings
    model = cls("MlpPolicy", env_id, seed=0, device="cpu", **settings)
    model.learn(steps)
    path = tmp_path / f"{name}.zip"
    model.save(path)
    return model, path


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("PPO", {}),
        ("PPO", {"policy_kwargs": {"net_arch": [32, 16, 8], "activation_fn": torch.nn.ReLU}}),
        ("PPO", {"policy_kwargs": {"net_arch": {"pi": [24], "vf": [8]}}}),
        ("A2C", {}),
        ("SAC", {}),
        ("SAC", {"policy_kwargs": {"net_arch": [16], "activation_fn": torch.nn.ELU}}),
        ("TD3", {}),
        ("DDPG", {}),
    ],
    ids=str,
)
def test_deterministic_actions_equal_its_own(name, settings, tmp_path):
    model, path = trained(name, tmp_path, **settings)
    actor = load_sb3(path, PENDULUM)
    obs = np.random.default_rng(0).uniform(-4, 4, (64, 3)).astype(np.float32)
    expected, _ = model.predict(obs, deterministic=True)
    got = actor.act({STATE: torch.from_numpy(obs)}, deterministic=True).action
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_stochastic_actions_have_its_distribution(name, tmp_path):
    model, path = trained(name, tmp_path)
    actor = load_sb3(path, PENDULUM)
    obs = np.tile(np.array([[0.3, -0.5, 1.0]], np.float32), (4000, 1))
    theirs, _ = model.predict(obs, deterministic=False)
    ours = actor.act({STATE: torch.from_numpy(obs)}, generator=torch.Generator().manual_seed(0)).action.numpy()
    assert ours.mean() == pytest.approx(theirs.mean(), abs=0.08) and ours.std() == pytest.approx(theirs.std(), abs=0.08)


def test_discrete_actions(tmp_path):
    model, path = trained("PPO", tmp_path, "CartPole-v1")
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    got = load_sb3(path, CARTPOLE).act({STATE: torch.from_numpy(obs)}, deterministic=True).action
    np.testing.assert_array_equal(got.numpy(), model.predict(obs, deterministic=True)[0])
    with pytest.raises(ContractError, match="discrete"):
        load_sb3(path, EnvSpec("c", 1, {STATE: ArraySpec((4,))}, Continuous((-1.0,) * 2, (1.0,) * 2), 50, 500))


def test_normalised_observations(tmp_path):
    env = VecNormalize(DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")]), clip_obs=2.0)
    model = stable_baselines3.PPO("MlpPolicy", env, n_steps=64, seed=0, device="cpu").learn(128)
    model.save(tmp_path / "m.zip")
    env.save(tmp_path / "vecnormalize.pkl")
    actor = load_sb3(tmp_path / "m.zip", PENDULUM, vecnormalize=tmp_path / "vecnormalize.pkl")
    obs = np.random.default_rng(0).uniform(-8, 8, (64, 3)).astype(np.float32)
    expected, _ = model.predict(env.normalize_obs(obs), deterministic=True)
    got = actor.act({STATE: torch.from_numpy(obs)}, deterministic=True).action
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_zip_is_evaluated_like_any_actor(tmp_path):
    model, path = trained("PPO", tmp_path, "HalfCheetah-v5")
    result = evaluate(EvaluateConfig(MujocoConfig(num_envs=4), EvaluationConfig(episodes=8), str(path)))
    assert result["episodes"] == 8 and result["env_steps"] == 8000
    expected, spread = evaluate_policy(model, gymnasium.make("HalfCheetah-v5"), n_eval_episodes=8)
    assert result["metrics"]["eval/mean_reward"] == pytest.approx(float(expected), abs=4 * float(spread) + 30)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EnvSpec("p", 1, {STATE: ArraySpec((4,))}, PENDULUM.action, 20, 200), r"\(3,\).*gives \(4,\)"),
        (EnvSpec("p", 1, {ENVIRONMENT_STATE: ArraySpec((3,))}, PENDULUM.action, 20, 200), "gives"),
        (EnvSpec("p", 1, PENDULUM.obs, Continuous((-2.0,) * 2, (2.0,) * 2), 20, 200), "1 continuous action"),
        (EnvSpec("p", 1, PENDULUM.obs, Continuous((-1.0,), (1.0,)), 20, 200), r"bounds low = \[-2"),
    ],
)
def test_a_model_of_another_environment_is_refused(spec, message, tmp_path):
    _, path = trained("SAC", tmp_path)
    with pytest.raises(ContractError, match=message):
        load_sb3(path, spec)


def test_what_is_not_read_is_refused_by_name(tmp_path):
    _, path = trained("PPO", tmp_path, use_sde=True)
    with pytest.raises(ConfigError, match="state-dependent exploration"):
        load_sb3(path, PENDULUM)
