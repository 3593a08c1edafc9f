# SPDX-License-Identifier: Apache-2.0
"""Chunks of actions: the same physics as single steps, nothing learnt from what was not executed."""

from typing import Any

import pytest
import torch

from robo_rl.errors import ConfigError, ContractError
from sims.chunked import ChunkedEnv
from sims.mujoco.gym_tasks import MujocoConfig, MujocoEnv
from sims.mujoco.tabletop import TabletopConfig, TabletopEnv

INIT = torch.tensor([[0, 5], [0, 6], [0, 7]])


def tabletop(horizon=10, **settings) -> Any:
    return TabletopEnv(TabletopConfig(task="lift", num_envs=3, horizon=horizon, num_threads=1, **settings))


def actions(steps, seed=0):
    return torch.rand(steps, 3, 6, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def singly(steps):
    env = tabletop()
    env.autoreset = False
    env.reset(rows=torch.arange(3), init=INIT)
    out = []
    for action in actions(steps):
        step = env.step(action)
        out.append((step.reward.clone(), {k: v.clone() for k, v in step.final_obs.items()}))
    env.close()
    return out


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_splitting_an_episode_into_chunks_changes_nothing(chunk):
    steps = 10
    expected = singly(steps)
    env = ChunkedEnv(tabletop(), chunk)
    env.autoreset = False
    env.reset(rows=torch.arange(3), init=INIT)
    rewards, flat = [], actions(20)
    for start in range(0, steps, chunk):
        step = env.step(flat[start : start + chunk].transpose(0, 1))
        rewards.append(step.reward[step.valid].view(3, -1))
    torch.testing.assert_close(torch.cat(rewards, dim=1), torch.stack([r for r, _ in expected], dim=1), rtol=0, atol=0)
    assert step.truncated.all() and not step.terminated.any()
    for key, value in expected[-1][1].items():
        torch.testing.assert_close(step.final_obs[key], value, rtol=0, atol=0)
    # Beyond the end nothing counts: 10 steps are 3 chunks of 4 and 2 actions over.
    assert int(step.valid.sum()) == 3 * (steps - chunk * ((steps - 1) // chunk))
    env.close()


def test_an_ended_row_is_reset_before_the_next_chunk_and_the_others_go_on():
    inner = tabletop()
    env = ChunkedEnv(inner, 4)
    env.autoreset = True
    env.reset(rows=torch.arange(3), init=INIT)
    inner._elapsed[1] = 7  # ends after 3 of the 4 actions
    step = env.step(torch.zeros(3, 4, 6))
    assert step.truncated.tolist() == [False, True, False]
    assert step.valid.sum(1).tolist() == [4, 3, 4]
    assert not step.reward[1, 3]
    assert not torch.equal(step.obs["observation.state"][1], step.final_obs["observation.state"][1])
    assert inner._elapsed.tolist() == [4, 0, 4]
    env.close()


def test_a_row_whose_physics_breaks_inside_a_chunk_is_dropped_whole():
    inner = tabletop()
    env = ChunkedEnv(inner, 3)
    env.reset(rows=torch.arange(3), init=INIT)
    advance, calls = inner._physics.advance, []

    def breaks(state, *args):
        after, sensors = advance(state, *args)
        calls.append(1)
        if len(calls) == 2:
            after[2] = float("nan")
        return after, sensors

    inner._physics.advance = breaks
    step = env.step(torch.zeros(3, 3, 6))
    assert step.valid.tolist() == [[True] * 3, [True] * 3, [False] * 3]
    assert step.terminated.tolist() == [False, False, True] and not step.reward[2].any()
    assert env.counters["non_finite"] == 1
    env.close()


def test_cameras_draw_once_per_chunk(monkeypatch):
    inner = tabletop(cameras=("front",), image_size=32)
    env = ChunkedEnv(inner, 4)
    env.reset(rows=torch.arange(3), init=INIT)
    drawn = []
    render = inner._cameras.render
    monkeypatch.setattr(inner._cameras, "render", lambda *a: drawn.append(1) or render(*a))
    step = env.step(torch.zeros(3, 4, 6))
    assert len(drawn) == 1
    torch.testing.assert_close(step.obs["observation.images.front"], step.final_obs["observation.images.front"])
    env.close()


def test_what_does_not_fit_is_refused():
    env = ChunkedEnv(tabletop(), 4)
    with pytest.raises(ContractError, match=r"\(3, 4, 6\).*got \(3, 5, 6\)"):
        env.step(torch.zeros(3, 5, 6))
    with pytest.raises(ConfigError, match="at least one"):
        ChunkedEnv(env.env, 0)
    env.close()


def test_any_simulator_can_be_stepped_in_chunks():
    env = ChunkedEnv(MujocoEnv(MujocoConfig(task="Hopper-v5", num_envs=4)), 5)
    env.reset(seed=0)
    ended = 0
    for _ in range(40):
        step = env.step(torch.rand(4, 5, 3) * 2 - 1)
        ended += int(step.terminated.sum())
        # A fallen hopper's remaining actions are not executed: valid is a run of True, then False.
        assert (step.valid[:, 1:] <= step.valid[:, :-1]).all()
        assert (step.valid.all(1) | step.terminated | step.truncated).all()
    assert ended > 0
    env.close()
