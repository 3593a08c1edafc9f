# SPDX-License-Identifier: Apache-2.0
"""The Isaac Gym adapter on the stand-in `fake_isaacgym.py`; NVIDIA's simulator cannot be installed here."""

import ast
import dataclasses
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sims
from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import STATE
from sims.check import check_vec_env
from sims.isaac_gym import IsaacGymConfig
from sims.isaac_gym_tasks import TASKS, Task, joints

ROOT = Path(__file__).parents[2]


def load_fake() -> Any:
    spec = importlib.util.spec_from_file_location("fake_isaacgym", Path(__file__).with_name("fake_isaacgym.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake = load_fake()
REACH = 0.4  # of the user's arm below: the sum of its joints is to reach a goal


def arm_observe(state):
    return torch.cat([joints(state), state.root[:, :3], state.draw[:, :1]], dim=1)


# A task of a user: position control, a free base, a goal of the episode, a reward from the bodies.
ARM = Task(
    asset="urdf/arm.urdf",
    height=1.5,
    scale=(0.5, 0.5, 0.0),
    dt=0.02,
    substeps=4,
    horizon=20,
    draws=4,
    start=lambda draw: (0.1 * draw[:, 1:], torch.zeros_like(draw[:, 1:])),
    reward=lambda state, bodies: -(bodies[:, -1, 0] - REACH * state.draw[:, 0]).abs(),
    failed=lambda state, bodies: state.root[:, 2] < 0.0,
    observe=arm_observe,
    control="position",
    home=(0.0, 0.1, 0.2),
    stiffness=400.0,
    damping=40.0,
    fixed_base=False,
)


@pytest.fixture
def isaac(monkeypatch):
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(TASKS, "arm", ARM)


def make(num_envs=4, seed=0, task="cartpole") -> Any:
    return sims.make(IsaacGymConfig(task=task, num_envs=num_envs, device="cpu"), seed)


def start(episodes) -> dict[str, torch.Tensor]:
    return {"rows": torch.arange(len(episodes)), "init": torch.tensor([[0, episode] for episode in episodes])}


# --- the stand-in is what it claims to be --------------------------------------------------------------------


def parameters(function: ast.FunctionDef) -> list[str]:
    if function.args.vararg is None:
        return [argument.arg for argument in function.args.args]
    # Some stubs say only (*args, **kwargs); the signature is the first line of their text.
    text = (ast.get_docstring(function) or "").partition("(")[2].partition(")")[0]
    return [argument.partition(":")[0].strip() for argument in text.split(",")]


def test_the_stand_in_has_the_stubs_signatures():
    spec = importlib.util.find_spec("isaacgym-stubs")
    if spec is None or spec.origin is None:
        pytest.skip("isaacgym-stubs is not installed")
    text = (Path(spec.origin).parent / "gymapi.pyi").read_text()
    # The file as a whole is not valid Python (a method is named `lambda`); its class Gym is.
    gym = ast.parse("class Gym:" + text.partition("\nclass Gym:")[2].partition("\nclass ")[0]).body[0]
    assert isinstance(gym, ast.ClassDef)
    theirs = {node.name: parameters(node) for node in gym.body if isinstance(node, ast.FunctionDef)}
    ours = {name: f for name, f in inspect.getmembers(fake.Gym, inspect.isfunction) if not name.startswith("_")}
    assert len(ours) > 20
    assert {name: list(inspect.signature(f).parameters) for name, f in ours.items()} == {n: theirs[n] for n in ours}


def test_the_stand_in_has_the_signatures_of_gymtorch():
    body = ast.parse((ROOT / "typings/isaacgym/gymtorch.pyi").read_text()).body
    theirs = {node.name: parameters(node) for node in body if isinstance(node, ast.FunctionDef)}
    assert {n: list(inspect.signature(getattr(fake, n)).parameters) for n in theirs} == theirs


# --- the contract --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["cartpole", "arm"])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_the_contract(isaac, task, num_envs):
    check_vec_env(lambda: make(num_envs, task=task))


@pytest.mark.parametrize("task", ["cartpole", "arm"])
def test_every_row_that_was_reset_starts_there_however_many_calls_it_took(isaac, task):
    """Isaac Gym forgets all but the last indexed setter of a step; the root needs its own."""
    together, apart = make(3, task=task), make(3, task=task)
    action = torch.zeros(3, len(together.spec.action.low))
    for env in (together, apart):
        for _ in range(5):
            env.step(action + 0.5)
    together.reset(**start([7, 8, 9]))
    for row in (2, 0, 1):
        obs = apart.reset(rows=torch.tensor([row]), init=torch.tensor([[0, 7 + row]]))
    assert torch.equal(obs[STATE], together.reset(**start([7, 8, 9]))[STATE])
    for _ in range(3):
        expected, got = together.step(action), apart.step(action)
        assert torch.equal(got.obs[STATE], expected.obs[STATE])
    # A row that ended and restarted by itself is not forgotten when another one is reset before the next step.
    for env in (together, apart):
        env._elapsed[0] = env.task.horizon - 1
        assert env.step(action).truncated[0]
    apart.reset(rows=torch.tensor([1]))
    assert torch.equal(together.step(action).obs[STATE][0], apart.step(action).obs[STATE][0])


# --- cartpole ------------------------------------------------------------------------------------------------


def test_starts_are_those_of_the_published_task(isaac):
    obs = make(num_envs=64).reset(seed=3)[STATE]
    position, velocity = obs[:, ::2], obs[:, 1::2]
    assert 0.095 < position.abs().max() <= 0.1 and 0.24 < velocity.abs().max() <= 0.25


def test_reward_and_ends_are_those_of_the_published_task(isaac):
    env = make(num_envs=3)
    env.step(torch.zeros(3, 1))
    env._sim.dofs[0, 0, 0] = 3.5  # this cart is off its rail
    env._sim.dofs[2, 1, 0] = -1.7  # this pole hangs
    step = env.step(torch.zeros(3, 1))
    assert step.terminated.tolist() == [True, False, True] and step.valid.all() and not step.truncated.any()
    assert step.reward[[0, 2]].tolist() == [-2.0, -2.0]
    final = step.final_obs[STATE]
    _, dx, a, da = final[1]
    assert float(step.reward[1]) == pytest.approx(float(1 - a**2 - 0.01 * dx.abs() - 0.005 * da.abs()), rel=1e-5)
    assert abs(float(final[0, 0])) > 3 and abs(float(step.obs[STATE][0, 0])) <= 0.1
    env._elapsed[:] = 498
    assert not env.step(torch.zeros(3, 1)).truncated.any()
    assert env.step(torch.zeros(3, 1)).truncated.all()


def test_a_push_moves_the_cart_and_actions_are_clipped(isaac):
    env = make(num_envs=2)
    env.reset(**start([0, 0]))
    state = env.step(torch.tensor([[1.0], [50.0]])).final_obs[STATE]
    assert state[0, 1] > 0.3, "400 N on 11 kg for 1/60 s"
    assert torch.equal(state[0], state[1])


def test_a_balanced_pole_is_a_success(isaac):
    env = make(num_envs=1)
    env.step(torch.zeros(1, 1))
    for step in range(70):
        env._sim.dofs.zero_()
        success = env.step(torch.zeros(1, 1)).info["success"]
        assert bool(success) == (step >= 58)
    env._elapsed[:] = 499
    assert env.step(torch.zeros(1, 1)).truncated
    assert not env.step(torch.zeros(1, 1)).info["success"], "the next episode counts from nothing"


def test_broken_physics_is_dropped_and_counted_once(isaac):
    for autoreset in (True, False):
        env = make(num_envs=2)
        env.autoreset = autoreset
        env.step(torch.zeros(2, 1))
        env._sim.dofs[1] = torch.nan
        step = env.step(torch.zeros(2, 1))
        assert step.valid.tolist() == [True, False] and step.terminated.tolist() == [False, True]
        assert not step.final_obs[STATE][1].any() and not step.reward[1]
        step = env.step(torch.zeros(2, 1))
        assert env.counters == {"dropped": 1, "non_finite": 1}
        assert step.valid.tolist() == [True, autoreset]
        assert all(x.isfinite().all() for x in (step.obs[STATE], step.final_obs[STATE], step.reward))
        assert env.reset(rows=torch.tensor([1]))[STATE].isfinite().all()
        assert env.step(torch.zeros(2, 1)).valid.all()


# --- a user's task -------------------------------------------------------------------------------------------


def test_position_control_reaches_its_targets_and_holds_undriven_joints(isaac):
    env = make(num_envs=2, task="arm")
    env.reset(**start([0, 1]))
    for _ in range(19):
        step = env.step(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    expected = torch.tensor([[0.5, -0.4, 0.2], [0.0, 0.1, 0.2]])
    torch.testing.assert_close(step.obs[STATE][:, :6:2], expected, atol=0.02, rtol=0)
    assert env.spec.convention == {"action": "joint_position"} and env.spec.action.dim == 2


def test_a_free_base_starts_again_where_it_stood_and_the_goal_lasts_the_episode(isaac):
    env = make(num_envs=2, task="arm")
    first = env.reset(**start([5, 6]))[STATE]
    assert first[:, 8].tolist() == [1.5, 1.5] and first[0, 9] != first[1, 9]
    for _ in range(10):
        step = env.step(torch.zeros(2, 2))
        assert torch.equal(step.obs[STATE][:, 9], first[:, 9])
    assert (step.obs[STATE][:, 8] < 1.4).all(), "it falls"
    tip = step.obs[STATE][:, :6:2].sum(1)
    torch.testing.assert_close(step.reward, -(tip - REACH * first[:, 9]).abs())
    assert torch.equal(env.reset(**start([5, 6]))[STATE], first)
    begun = env.step(torch.zeros(2, 2)).obs[STATE][:, 8]
    assert (begun > 1.49).all(), "the simulator has it there too, and at rest"
    assert env.spec.success is None and not step.info["success"].any()


def test_what_a_task_returns_may_be_a_view(isaac, monkeypatch):
    monkeypatch.setitem(TASKS, "arm", dataclasses.replace(ARM, reward=lambda state, bodies: state.pos[:, 0]))
    env = make(num_envs=2, task="arm")
    env._elapsed[:] = env.task.horizon - 1
    step = env.step(torch.ones(2, 2))
    assert step.truncated.all() and torch.equal(step.reward, step.final_obs[STATE][:, 0])


# --- errors --------------------------------------------------------------------------------------------------


def test_wrong_input_is_refused(isaac):
    env = make()
    with pytest.raises(ContractError, match=r"\(4, 1\), got \(4, 2\)"):
        env.step(torch.zeros(4, 2))
    with pytest.raises(ContractError, match="row 2 is not finite"):
        env.step(torch.tensor([[0.0], [0.0], [torch.nan], [0.0]]))
    with pytest.raises(ContractError, match="task_id 0"):
        env.reset(rows=torch.arange(1), init=torch.tensor([[1, 0]]))
    with pytest.raises(ConfigError, match=r"env\.asset_root"):
        sims.make(IsaacGymConfig(num_envs=1, device="cpu", asset_root="nowhere"))
    with pytest.raises(ConfigError, match="`cartpole`"):
        sims.make(IsaacGymConfig(task="cartpol"))
    with pytest.raises(ConfigError, match="`cuda:K`, got `gpu`"):
        sims.make(IsaacGymConfig(device="gpu"))
    env.close()
    env.close()
    with pytest.raises(ContractError, match="closed"):
        env.step(torch.zeros(4, 1))


def test_a_refused_setter_is_an_error(isaac, monkeypatch):
    env = make()
    monkeypatch.setattr(fake.Gym, "set_dof_state_tensor_indexed", lambda self, *arguments: False)
    with pytest.raises(ContractError, match="refused the joint states"):
        env.step(torch.zeros(4, 1))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("import sys\nif 'torch' in sys.modules: raise ImportError('PyTorch was imported before isaacgym modules.')",
         "put `import isaacgym` first"),
        ("raise RuntimeError('No gym module found for the active version of Python (3.12)')", "a build of gym_3x.so"),
        (None, "installed by hand"),
    ],
)  # fmt: skip
def test_what_keeps_isaac_gym_from_being_imported_is_named(tmp_path, monkeypatch, text, advice):
    """The errors of Isaac Gym itself, raised by a package on the path."""
    if text is not None:
        (tmp_path / "isaacgym").mkdir()
        (tmp_path / "isaacgym/__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=advice):
        make()
