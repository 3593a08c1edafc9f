# SPDX-License-Identifier: Apache-2.0
"""The Isaac Gym adapter on a stand-in for NVIDIA's simulator, which cannot be installed here.

The stand-in has the signatures of `isaacgym-stubs` (a test compares them), moves a real cart-pole, and punishes what
the real API is known to punish: stale reads, a second indexed setter in one step, wrong index types.
"""

import ast
import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sims
from robo_rl.errors import ConfigError, ContractError
from sims.check import check_vec_env
from sims.isaac_gym import TASKS, IsaacGymConfig

DOFS = 2


class Struct:
    """Vec3, Transform, SimParams and the like: attributes only."""

    def __init__(self, *args: float):
        self.args = args

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Struct()
        object.__setattr__(self, name, value)
        return value


class Sim:
    """Cart-poles: `true` (N, 2, 2) is the physics, `buffer` (2 N, 2) what the tensor API shows."""

    def __init__(self, params):
        self.params, self.envs, self.fetched = params, [], True
        self.true = self.buffer = torch.zeros(0)
        self.force = torch.zeros(0)
        self.pending: Any = None

    def prepare(self):
        n = len(self.envs)
        self.true, self.buffer = torch.zeros(n, DOFS, 2), torch.full((n * DOFS, 2), torch.nan)
        self.force = torch.zeros(n, DOFS)

    def move(self):
        if self.pending is not None:
            rows, values = self.pending
            self.true[rows] = values
            self.pending = None
        h = self.params.dt / self.params.substeps
        for _ in range(self.params.substeps):
            flat: Any = self.true.transpose(1, 2).flatten(1)
            x, a, dx, da = flat.unbind(1)
            # A cart of 10 kg with a pole of 1 kg and 1 m, from its free end up.
            total, half = 11.0, 0.5
            push = (self.force[:, 0] + half * da**2 * a.sin()) / total
            dda = (9.81 * a.sin() - a.cos() * push) / (half * (4 / 3 - a.cos() ** 2 / total))
            ddx = push - half * dda * a.cos() / total
            velocity = torch.stack([dx + h * ddx, da + h * dda], 1)
            self.true = torch.stack([torch.stack([x, a], 1) + h * velocity, velocity], 2)


class Gym:
    """The part of gymapi.Gym that the adapter uses; argument names are the stubs'."""

    def create_sim(self, compute_device=0, graphics_device=0, type=None, params=None):
        return Sim(params)

    def add_ground(self, sim, params): ...

    def load_asset(self, sim, rootpath, filename, options=None):
        return filename if rootpath != "nowhere" else None

    def get_asset_dof_count(self, arg0):
        return DOFS

    def create_env(self, arg0, arg1, arg2, arg3):
        arg0.envs.append(len(arg0.envs))
        return arg0, len(arg0.envs) - 1

    def create_actor(self, env, asset, pose, name=None, group=-1, filter=-1, segmentationId=0):
        return 0

    def get_actor_dof_properties(self, arg0, arg1):
        return np.zeros(DOFS, dtype=[("driveMode", "i4"), ("stiffness", "f4"), ("damping", "f4")])

    def set_actor_dof_properties(self, arg0, arg1, arg2):
        assert arg2["driveMode"].tolist() == [3, 0], "the cart is driven by effort, the pole is free"
        return True

    def get_actor_index(self, env, actor, domain):
        assert domain == "sim"
        return env[1]

    def prepare_sim(self, arg0):
        arg0.prepare()
        return True

    def acquire_dof_state_tensor(self, arg0):
        return arg0.buffer

    def set_dof_actuation_force_tensor(self, arg0, arg1):
        assert arg1.dtype == torch.float32 and arg1.shape == (len(arg0.envs) * DOFS,)
        arg0.force = arg1.view(-1, DOFS).clone()
        return True

    def set_dof_state_tensor_indexed(self, arg0, arg1, arg2, arg3):
        assert arg1 is arg0.buffer and arg2.dtype == torch.int32 and arg3 == len(arg2)
        rows = arg2.long()
        arg0.pending = rows, arg1.view(-1, DOFS, 2)[rows].clone()  # the one before is forgotten
        return True

    def simulate(self, arg0):
        arg0.move()
        arg0.fetched = False

    def fetch_results(self, arg0, arg1):
        arg0.fetched = True

    def refresh_dof_state_tensor(self, arg0):
        assert arg0.fetched, "the CPU pipeline wants fetch_results first"
        pending = arg0.pending
        arg0.buffer.copy_(arg0.true.view(-1, 2))
        assert pending is None, "a refresh between setting and simulating shows the old state"
        return True

    def destroy_sim(self, arg0): ...


@pytest.fixture
def isaac(monkeypatch):
    api = types.ModuleType("isaacgym.gymapi")
    for name in ("SimParams", "Vec3", "Transform", "PlaneParams", "AssetOptions"):
        setattr(api, name, Struct)
    api.__dict__.update(
        acquire_gym=Gym, DOF_MODE_EFFORT=3, DOF_MODE_NONE=0, DOMAIN_SIM="sim", SIM_PHYSX="physx", UP_AXIS_Z="z"
    )
    bridge = types.ModuleType("isaacgym.gymtorch")
    bridge.__dict__.update(wrap_tensor=lambda tensor: tensor, unwrap_tensor=lambda tensor: tensor)
    package = types.ModuleType("isaacgym")
    package.__dict__.update(gymapi=api, gymtorch=bridge, __file__="/opt/isaacgym/python/isaacgym/__init__.py")
    for name, module in (("isaacgym", package), ("isaacgym.gymapi", api), ("isaacgym.gymtorch", bridge)):
        monkeypatch.setitem(sys.modules, name, module)


def make(num_envs=4, seed=0) -> Any:
    return sims.make(IsaacGymConfig(num_envs=num_envs, device="cpu"), seed)


def test_the_contract(isaac):
    check_vec_env(make)


def test_the_stand_in_has_the_stubs_signatures():
    spec = importlib.util.find_spec("isaacgym-stubs")
    if spec is None or spec.origin is None:
        pytest.skip("isaacgym-stubs is not installed")
    text = (Path(spec.origin).parent / "gymapi.pyi").read_text()
    # The file as a whole is not valid Python (a method is named `lambda`); its class Gym is.
    text = "class Gym:" + text.partition("\nclass Gym:")[2].partition("\nclass ")[0]
    gym = ast.parse(text).body[0]
    assert isinstance(gym, ast.ClassDef)
    theirs = {node.name: node for node in gym.body if isinstance(node, ast.FunctionDef)}
    for name, ours in inspect.getmembers(Gym, inspect.isfunction):
        arguments = theirs[name].args
        if arguments.vararg is None:  # some stubs say only (*args, **kwargs)
            assert len(inspect.signature(ours).parameters) == len(arguments.args), name
            assert [a.arg for a in arguments.args[1:] if not a.arg.startswith("arg")] == [
                n for n in list(inspect.signature(ours).parameters)[1:] if not n.startswith("arg")
            ] or name == "get_actor_index", name


def test_starts_are_those_of_the_published_task_and_a_function_of_the_episode(isaac):
    env = make(num_envs=64)
    obs = env.reset(seed=3)["observation.state"]
    position, velocity = obs[:, ::2], obs[:, 1::2]
    assert position.abs().max() <= 0.1 and velocity.abs().max() <= 0.25 and position.std() > 0.04
    init = torch.tensor([[0, 9]] * 64)
    again = env.reset(rows=torch.arange(64), init=init)["observation.state"]
    assert (again == again[0]).all()


def test_reward_ends_and_autoreset(isaac):
    env = make(num_envs=3)
    env.reset()
    env._sim.true[0, 0, 0] = 3.5  # this cart is off its rail
    env._sim.pending = None
    step = env.step(torch.zeros(3, 1))
    assert step.terminated.tolist() == [True, False, False] and step.valid.all()
    assert float(step.reward[0]) == -2.0
    state = step.final_obs["observation.state"]
    _, dx, a, da = state[1]
    assert float(step.reward[1]) == pytest.approx(float(1 - a**2 - 0.01 * dx.abs() - 0.005 * da.abs()), rel=1e-5)
    assert abs(float(state[0, 0])) > 3 and abs(float(step.obs["observation.state"][0, 0])) <= 0.1
    # All rows that start are set by one call: after the next step none is where it was before.
    env._elapsed[:] = TASKS["cartpole"].horizon - 1
    step = env.step(torch.zeros(3, 1))
    assert step.truncated.all()
    following = env.step(torch.zeros(3, 1)).final_obs["observation.state"]
    assert (following - step.obs["observation.state"]).abs().max() < 0.1


def test_a_push_moves_the_cart_and_actions_are_clipped(isaac):
    env = make(num_envs=2)
    env.reset(rows=torch.arange(2), init=torch.zeros(2, 2, dtype=torch.int64))
    state = env.step(torch.tensor([[1.0], [50.0]])).final_obs["observation.state"]
    assert state[0, 1] > 0.3, "400 N on 11 kg for 1/60 s"
    torch.testing.assert_close(state[0], state[1])


def test_broken_physics_is_dropped_and_counted(isaac):
    env = make(num_envs=2)
    env.reset()
    env.step(torch.zeros(2, 1))
    env._sim.true[1] = torch.nan
    step = env.step(torch.zeros(2, 1))
    assert step.valid.tolist() == [True, False] and step.terminated.tolist() == [False, True]
    assert not step.final_obs["observation.state"][1].any() and not step.reward[1]
    assert env.counters == {"dropped": 1, "non_finite": 1}
    assert torch.isfinite(env.step(torch.zeros(2, 1)).final_obs["observation.state"]).all()


def test_a_balanced_pole_is_a_success(isaac):
    env = make(num_envs=1)
    env.reset()
    env._sim.pending = None
    for step in range(70):
        env._sim.true.zero_()
        success = env.step(torch.zeros(1, 1)).info["success"]
        assert bool(success) == (step >= 59)


def test_wrong_input_is_refused(isaac):
    env = make()
    with pytest.raises(ContractError, match=r"\(4, 1\), got \(4, 2\)"):
        env.step(torch.zeros(4, 2))
    with pytest.raises(ContractError, match="task_id 0"):
        env.reset(rows=torch.arange(1), init=torch.tensor([[1, 0]]))
    with pytest.raises(ConfigError, match="asset_root"):
        sims.make(IsaacGymConfig(num_envs=1, device="cpu", asset_root="nowhere"))
    with pytest.raises(ConfigError, match="`cartpole`"):
        sims.make(IsaacGymConfig(task="cartpol"))


def test_without_isaac_gym_the_error_names_the_obstacle():
    with pytest.raises(ConfigError, match=r"bindings for Python 3\.6 to 3\.8"):
        make()
