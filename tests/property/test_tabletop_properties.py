# SPDX-License-Identifier: Apache-2.0
"""The tabletop under any seed, order of rows and split of an episode."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robo_rl.types import ENVIRONMENT_STATE, STATE
from sims.mujoco.tabletop import TabletopConfig, TabletopEnv
from sims.mujoco.tabletop_tasks import TASKS

ROWS = 6


@pytest.fixture(scope="module")
def envs():
    fields = {"num_envs": ROWS, "objects": ("red cube", "blue cylinder"), "distractors": 1}
    made = {task: [TabletopEnv(TabletopConfig(task=task, **fields)) for _ in range(2)] for task in TASKS}
    yield made
    for pair in made.values():
        for env in pair:
            env.close()


def run(env, init, actions):
    """Everything that three steps return, (3, N, ...) each."""
    env.autoreset = False
    env.reset(init=init)
    out = []
    for action in actions:
        step = env.step(action)
        parts = (step.obs[STATE], step.obs[ENVIRONMENT_STATE], step.reward[:, None], step.info["distance"][:, None])
        out.append(torch.cat(parts, dim=1))
    return torch.stack(out)


@settings(max_examples=25, deadline=None)
@given(
    task=st.sampled_from(list(TASKS)),
    order=st.permutations(range(ROWS)),
    episode=st.integers(0, 2**40),
    seed=st.integers(0, 2**30),
)
def test_permuting_rows_commutes(envs, task, order, episode, seed):
    init = torch.stack([torch.arange(ROWS) % 2, episode + torch.arange(ROWS)], dim=1)
    actions = 2 * torch.rand(3, ROWS, 6, generator=torch.Generator().manual_seed(seed)) - 1
    a, b = envs[task]
    assert torch.equal(run(a, init, actions)[:, order], run(b, init[order], actions[:, order]))


@settings(max_examples=25, deadline=None)
@given(task=st.sampled_from(list(TASKS)), cut=st.integers(0, 8), seed=st.integers(0, 2**30))
def test_saving_anywhere_changes_nothing(envs, task, cut, seed):
    a, b = envs[task]
    a.autoreset = b.autoreset = True
    actions = 2 * torch.rand(9, ROWS, 6, generator=torch.Generator().manual_seed(seed)) - 1
    a.reset(seed=seed % 1000)
    for action in actions[:cut]:
        a.step(action)
    saved = a.state_dict()
    for action in actions[cut:]:
        a.step(action)
    b.load_state_dict(saved)
    for action in actions[cut:]:
        b.step(action)
    x, y = a.state_dict(), b.state_dict()
    assert all(torch.equal(x[key], y[key]) for key in x)
    assert x.keys() == y.keys()


@settings(max_examples=50, deadline=None)
@given(task=st.sampled_from(list(TASKS)), episode=st.integers(0, 2**62))
def test_every_start_is_sound(envs, task, episode):
    env = envs[task][0]
    env.reset(init=torch.stack([torch.arange(ROWS) % 2, episode + torch.arange(ROWS)], dim=1))
    step = env.step(torch.zeros(ROWS, 6))
    assert step.valid.all()
    assert not step.info["success"].any()
    speed = abs(env._state[:, env._physics.qvel][:, 6:]).max()
    assert speed < 1e-3  # objects rest: nothing starts inside anything else
