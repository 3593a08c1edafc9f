# SPDX-License-Identifier: Apache-2.0
"""The tabletop's VecEnv: purity, exact continuation, the guard, ends, rewards, control modes."""

import numpy as np
import pytest
import torch

from robo_rl.errors import ConfigError, ContractError
from robo_rl.seeding import first_training_episode
from robo_rl.types import ENVIRONMENT_STATE, STATE
from sims.experts.tabletop import TabletopExpert
from sims.mujoco.tabletop import TabletopConfig, TabletopEnv
from sims.mujoco.tabletop_stress import stress
from sims.mujoco.tabletop_tasks import TASKS

ALL = tuple(TASKS)


@pytest.fixture
def make():
    made = []

    def build(seed=0, **fields):
        fields = {"num_envs": 8, "task": "lift"} | fields
        made.append(TabletopEnv(TabletopConfig(**fields), seed))
        return made[-1]

    yield build
    for env in made:
        env.close()


def actions(env, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    shape = (steps, env.spec.num_envs, len(low))
    return low + (high - low) * torch.rand(shape, generator=generator)


def pairs(episodes, task_id=0):
    return torch.tensor([[task_id, e] for e in episodes])


def same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def step_once(env, action):
    """A step with its tensors copied."""
    step = env.step(action)
    return {k: v.clone() for k, v in step.obs.items()} | {
        "reward": step.reward.clone(),
        "ends": torch.stack([step.terminated, step.truncated, step.valid, step.info["success"]]),
    }


@pytest.mark.parametrize("task", ALL)
def test_initial_state_is_a_pure_function_of_its_name(make, task):
    a, b = make(task=task), make(task=task, seed=5, num_envs=3)
    first = a.reset(init=pairs(range(8)))
    for action in actions(a, 5):
        a.step(action)
    again = a.reset(init=pairs(range(8)))
    same(first, again)
    other = b.reset(init=pairs([7, 2, 2]))
    for key in first:
        assert torch.equal(other[key], first[key][[7, 2, 2]])
    assert not torch.equal(first[ENVIRONMENT_STATE][0], first[ENVIRONMENT_STATE][1])


@pytest.mark.parametrize("task", ALL)
def test_spec_describes_what_comes(make, task):
    env = make(task=task)
    obs = env.reset()
    assert obs.keys() == env.spec.obs.keys()
    for key, spec in env.spec.obs.items():
        assert tuple(obs[key].shape[1:]) == spec.shape
        assert str(obs[key].dtype).split(".")[1] == spec.dtype
        assert len(spec.names) in (0, spec.shape[0] if spec.shape else 0)
    assert "red cube" in env.spec.tasks[0] or task == "reach"


def test_training_episodes_are_numbered_from_the_seed(make):
    env = make(seed=3, num_envs=4)
    env.reset()
    first = first_training_episode(3)
    assert env._episode.tolist() == [first, first + 1, first + 2, first + 3]
    env.reset(rows=torch.tensor([2]))
    assert env._episode.tolist() == [first, first + 1, first + 4, first + 3]
    env.reset(seed=3)
    assert env._episode[0] == first


def test_resetting_rows_leaves_the_others_alone(make):
    env = make()
    obs = env.reset(init=pairs(range(8)))
    for action in actions(env, 3):
        obs = env.step(action).obs
    before = {k: v.clone() for k, v in obs.items()}
    after = env.reset(rows=torch.tensor([1, 6]), init=pairs([40, 41]))
    others = [0, 2, 3, 4, 5, 7]
    for key in after:
        assert torch.equal(after[key][others], before[key][others])
    assert not torch.equal(after[STATE][1], before[STATE][1])


@pytest.mark.parametrize("task", ["lift", "stack"])
def test_continuing_equals_never_having_stopped(make, task):
    fields = {"task": task, "horizon": 7, "objects": ("red cube", "blue cylinder")}
    a, b = make(**fields), make(seed=9, **fields)
    a.reset()
    for action in actions(a, 5):
        a.step(action)
    b.load_state_dict({k: v.clone() for k, v in a.state_dict().items()})
    for action in actions(a, 12, seed=1):
        same(step_once(a, action), step_once(b, action))
    same(a.state_dict(), b.state_dict())


def test_a_state_of_another_size_is_refused(make):
    with pytest.raises(ContractError, match="shape"):
        make(num_envs=4).load_state_dict(make(num_envs=8).state_dict())


def test_threads_do_not_change_results(make):
    one, two = make(num_envs=70, num_threads=1), make(num_envs=70, num_threads=3)
    same(one.reset(), two.reset())
    for action in actions(one, 10):
        same(step_once(one, action), step_once(two, action))


@pytest.mark.parametrize("autoreset", [True, False])
@pytest.mark.parametrize("broken", [float("nan"), 1e6])
def test_guard_ends_a_broken_row_and_only_it(make, broken, autoreset):
    env, twin = make(), make()
    env.autoreset = twin.autoreset = autoreset
    env.reset(init=pairs(range(8)))
    twin.reset(init=pairs(range(8)))
    env._state[3, env._physics.qvel.start + 6] = broken
    action = actions(env, 1)[0]
    step, clean = env.step(action), twin.step(action)
    assert step.valid.tolist() == [i != 3 for i in range(8)]
    assert step.terminated.tolist() == [i == 3 for i in range(8)]
    assert not step.truncated.any()
    assert step.reward[3] == 0
    assert (step.final_obs[STATE][3] == 0).all()
    assert env.counters == {"non_finite": 1}
    for key in step.obs:
        keep = [i for i in range(8) if i != 3]
        assert torch.equal(step.obs[key][keep], clean.obs[key][keep])
        assert step.obs[key].isfinite().all()
    after = env.step(action)
    assert after.obs[STATE].isfinite().all()
    assert after.valid[3] == autoreset
    assert np.isfinite(env._state).all()


def test_autoreset_gives_the_true_last_observation(make):
    fields = {"horizon": 4, "stagger": False}
    env, held = make(**fields), make(**fields)
    held.autoreset = False
    env.reset(seed=0)
    held.reset(seed=0)
    moves = actions(env, 6)
    for i in range(4):
        a, b = env.step(moves[i]), held.step(moves[i])
        same(a.final_obs, b.final_obs)
    assert a.truncated.all()
    assert not a.terminated.any()
    assert not torch.equal(a.obs[STATE], a.final_obs[STATE])
    same(a.obs, make(**fields).reset(init=torch.stack([torch.zeros(8).long(), torch.from_numpy(env._episode)], dim=1)))
    waiting = held.step(moves[4])
    assert not waiting.valid.any()
    assert not waiting.truncated.any()
    assert (waiting.reward == 0).all()
    same(waiting.obs, b.final_obs)
    held.reset(rows=torch.arange(8))
    assert held.step(moves[5]).valid.all()


def test_staggered_rows_end_evenly_and_named_ones_together(make):
    env = make(horizon=8)
    env.reset()
    ends = torch.stack([env.step(a).truncated.clone() for a in actions(env, 8)])
    assert ends.sum(1).tolist() == [1] * 8
    env.reset(init=pairs(range(8)))
    ends = torch.stack([env.step(a).truncated.clone() for a in actions(env, 8)])
    assert ends.sum(1).tolist() == [0] * 7 + [8]


def run_expert(env, steps):
    """The expert from evaluation episodes 0, 1, ...: rewards and success (steps, N), and the last step."""
    expert = TabletopExpert(env.spec)
    env.autoreset = False
    obs = env.reset(init=pairs(range(env.spec.num_envs)))
    rewards, success, step = [], [], None
    for _ in range(steps):
        step = env.step(expert.act(obs).action)
        obs = step.obs
        rewards.append(step.reward.clone())
        success.append(step.info["success"].clone())
    return torch.stack(rewards), torch.stack(success), step


def test_success_needs_its_condition_held(make):
    env = make(task="reach")
    hold = env.task.success.hold_steps
    _, success, _ = run_expert(env, 30)
    distance = make(task="reach")
    distance.autoreset = False
    expert, obs = TabletopExpert(env.spec), distance.reset(init=pairs(range(8)))
    near = []
    for _ in range(30):
        step = distance.step(expert.act(obs).action)
        obs = step.obs
        near.append(step.info["distance"] < 0.02)
    near = torch.stack(near)
    for t in range(30):
        expected = near[t - hold + 1 : t + 1].all(0) if t >= hold - 1 else torch.zeros(8, dtype=torch.bool)
        assert torch.equal(success[t], expected)
    assert success[-1].all()


def test_sparse_reward_is_one_once(make):
    rewards, success, _ = run_expert(make(reward="sparse"), 60)
    assert success[-1].all()
    assert rewards.sum(0).tolist() == [1.0] * 8
    first = success.int().argmax(0)
    assert torch.equal(rewards.argmax(0), first)


def test_success_can_end_the_episode(make):
    env = make(terminate_on_success=True, reward="sparse")
    rewards, success, step = run_expert(env, 60)
    assert success.sum(0).tolist() == [1] * 8  # ended rows wait
    assert rewards.sum(0).tolist() == [1.0] * 8
    assert not step.valid.any()


def test_dense_reward_grows_through_the_stages(make):
    for task in ("pick_place", "stack"):
        rewards, success, _ = run_expert(make(task=task), 100)
        ended = rewards[-1][success[-1]]
        assert (ended > rewards[:15].max()).all()
        assert (ended >= rewards.max() - 0.2).all()  # nothing on the way pays more than being done


@pytest.mark.parametrize("control", ["joint_delta", "joint_position", "ee_delta"])
def test_control_modes_move_as_they_say(make, control):
    env = make(control=control, task="pick_place")
    obs = env.reset(init=pairs(range(8)))
    names = env.spec.obs[STATE].names
    tcp = [names.index(f"tcp.{axis}") for axis in "xyz"]
    start = obs[STATE].clone()
    if control == "joint_delta":
        action = torch.tensor([[0.5, 0, 0, 0, 0, 0]]).repeat(8, 1)
        expected = start[:, 0] + 0.04 * 3
    elif control == "joint_position":
        action = start[:, :6].clone()
        action[:, 0] += 0.12
        expected = action[:, 0]
    else:
        action = torch.tensor([[0.0, 0.0, -0.005, 0.0, 0.0]]).repeat(8, 1)
        expected = None
    for i in range(20):
        if i == 3 and control != "joint_position":
            action = torch.zeros_like(action)
        obs = env.step(action).obs
    if expected is not None:
        torch.testing.assert_close(obs[STATE][:, 0], expected, atol=0.01, rtol=0)
    else:
        sagged = make(control=control, task="pick_place")
        rest = sagged.reset(init=pairs(range(8)))
        for _ in range(20):
            rest = sagged.step(torch.zeros(8, 5)).obs
        moved = obs[STATE][:, tcp] - rest[STATE][:, tcp]
        torch.testing.assert_close(moved[:, 2], torch.full((8,), -0.015), atol=0.004, rtol=0)
        assert moved[:, :2].abs().max() < 0.006


def test_targets_do_not_run_away_from_the_arm(make):
    env = make(control="joint_position")
    env.reset()
    env.step(torch.tensor(env.spec.action.high).repeat(8, 1))
    assert np.abs(env._move).max() <= 1
    q = env._state[:, env._physics.qpos][:, :5]
    assert np.abs(env._ctrl[:, :5] - q).max() <= 0.3 + 1e-9


def test_instructions_name_objects(make):
    env = make(task="stack", objects=("red cube", "blue block"), distractors=3, num_envs=4)
    assert env.spec.tasks == ("stack the red cube on the blue cube", "stack the blue block on the green cube")
    assert sorted(env.reset()["task_id"].tolist()) == [0, 0, 1, 1]
    assert env.reset(init=pairs([0, 1, 2, 3], task_id=1))["task_id"].tolist() == [1] * 4


@pytest.mark.parametrize("task", ["push", "pick_place", "stack"])
def test_objects_start_apart_and_goals_where_promised(make, task):
    env = make(task=task, num_envs=500, distractors=3)
    env.reset(init=pairs(range(500)))
    qpos = env._state[:, env._physics.qpos][:, 6:].reshape(500, -1, 7)
    for i in range(qpos.shape[1]):
        for j in range(i):
            assert np.linalg.norm(qpos[:, i, :2] - qpos[:, j, :2], axis=1).min() > 0.05
    away = np.linalg.norm(env._goal[:, :2] - qpos[:, 0, :2], axis=1)
    low, high = {"push": (0.04, 0.1), "pick_place": (0.1, 0.3), "stack": (0.08, 0.3)}[task]
    assert away.min() >= low - 1e-9
    assert away.max() <= high + 1e-9


def test_bad_input_is_refused(make):
    with pytest.raises(ConfigError, match="lift"):
        make(task="lft")
    with pytest.raises(ConfigError, match="red cube"):
        make(objects=("red cub",))
    with pytest.raises(ConfigError, match="wrist"):
        make(cameras=("wrst",))
    with pytest.raises(ConfigError, match="distractors"):
        make(distractors=99)
    with pytest.raises(ConfigError, match="horizon"):
        make(horizon=0)
    env = make()
    with pytest.raises(ContractError, match=r"\(8, 6\)"):
        env.step(torch.zeros(8, 5))
    with pytest.raises(ContractError, match="row 2"):
        env.step(torch.zeros(8, 6).index_fill(0, torch.tensor([2]), float("nan")))
    with pytest.raises(ContractError, match="init"):
        env.reset(init=pairs([0, 1]))
    with pytest.raises(ContractError, match="init"):
        env.reset(init=pairs(range(8), task_id=1))
    with pytest.raises(ContractError, match="seed"):
        env.reset(seed=1, rows=torch.tensor([0]))


@pytest.mark.parametrize("task", ["lift", "stack"])
def test_random_actions_stay_finite(task):
    result = stress(TabletopConfig(task=task, num_envs=64, distractors=1), env_steps=10_000)
    assert result["env_steps"] >= 10_000
    assert result["non_finite"] == 0
