# SPDX-License-Identifier: Apache-2.0
"""A stand-in for NVIDIA's Isaac Gym, which cannot be installed here; `test_isaac_gym.py` loads it by path.

It has the signatures of `isaacgym-stubs`, moves two simple bodies on a CPU, and punishes what the real API is known to
punish: reads before a refresh, a second call of an indexed setter in one step, wrong or non-contiguous tensors, tensors
that are gone when the step wants them, results that were not fetched.
"""

import types
import weakref
from typing import Any

import numpy as np
import torch

# asset: degrees of freedom, bodies
ASSETS = {"urdf/cartpole.urdf": (2, 3), "urdf/arm.urdf": (3, 2)}
INT32, FLOAT32 = torch.int32, torch.float32


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


class Handle:
    """gymapi.Tensor: an address. What was unwrapped belongs to the caller and may be gone when it is read."""

    def __init__(self, tensor, owned):
        self._owned, self._reference = tensor if owned else None, weakref.ref(tensor)

    def read(self, dtype, length=None):
        tensor = self._reference()
        assert tensor is not None, "the tensor was freed before the simulator read it"
        if tensor.dtype != dtype:
            raise TypeError(f"expected {dtype}, got {tensor.dtype}")
        assert length is None or tensor.numel() == length
        return tensor


def wrap_tensor(gym_tensor, offsets=None, counts=None):
    return gym_tensor._owned


def unwrap_tensor(torch_tensor):
    if not torch_tensor.is_contiguous():
        raise Exception("a contiguous tensor is needed")
    return Handle(torch_tensor, owned=False)


class Sim:
    """`dofs` (N, D, 2), `root` (N, 13) and `bodies` (N, L, 13) are the physics; `shown` is what the tensors hold."""

    def __init__(self, params):
        self.params, self.envs, self.actors, self.prepared, self.fetched = params, 0, [], False, True
        self.asset, self.options, self.pose, self.drives, self.gains = "", Struct(), (), [], (0.0, 0.0)
        self.setters: dict[str, Any] = {}

    def prepare(self):
        n, (d, bodies) = self.envs, ASSETS[self.asset]
        self.dofs, self.root, self.bodies = torch.zeros(n, d, 2), torch.zeros(n, 13), torch.zeros(n, bodies, 13)
        self.root[:, :3] = torch.tensor(self.pose)
        self.root[:, 6] = 1.0
        # Acquired tensors are not filled before the first refresh.
        shown = {"dof": (n * d, 2), "root": (n, 13), "body": (n * bodies, 13)}
        self.shown = {name: Handle(torch.full(shape, torch.nan), owned=True) for name, shape in shown.items()}
        self.prepared = True

    def command(self, name, handle):
        self.setters[name] = handle  # read when the step is simulated

    def move(self):
        n, d, _ = self.dofs.shape
        for name, truth in (("root", self.root), ("dof", self.dofs)):
            if name in self.setters:
                values, actors, count = self.setters.pop(name)
                assert values is self.shown[name], "the buffer of all actors"
                rows = [self.actors.index(i) for i in actors.read(INT32, count).tolist()]
                truth[rows] = values.read(FLOAT32).view(truth.shape)[rows]
        force = self.setters.pop("force").read(FLOAT32, n * d).view(n, d) if "force" in self.setters else None
        target = self.setters.pop("target").read(FLOAT32, n * d).view(n, d) if "target" in self.setters else None
        step = self.params.dt / self.params.substeps
        for _ in range(self.params.substeps):
            pos, vel = self.dofs.unbind(-1)
            acceleration = self.cartpole(pos, vel, force) if d == 2 else self.arm(pos, vel, target)
            vel = vel + step * acceleration
            self.dofs = torch.stack([pos + step * vel, vel], dim=-1)
            if not self.options.fix_base_link:  # falls
                self.root[:, 9] -= 9.81 * step
                self.root[:, :3] += step * self.root[:, 7:10]
        self.bodies[:, -1, 0] = self.dofs[:, :, 0].sum(1)  # a tip that moves with the joints
        self.fetched = False

    def cartpole(self, pos, vel, force):
        """A cart of 10 kg with a pole of 1 kg and 1 m, upright at 0."""
        assert self.drives == [3, 0], "the cart is driven by effort, the pole is free"
        angle, total, half = pos[:, 1], 11.0, 0.5
        push = (force[:, 0] + half * vel[:, 1] ** 2 * angle.sin()) / total
        pole = (9.81 * angle.sin() - angle.cos() * push) / (half * (4 / 3 - angle.cos() ** 2 / total))
        return torch.stack([push - half * pole * angle.cos() / total, pole], dim=1)

    def arm(self, pos, vel, target):
        """Unit inertia on each joint, a PD drive, no gravity."""
        assert self.drives == [1, 1, 1], "all joints are driven by position"
        stiffness, damping = self.gains
        return stiffness * (target - pos) - damping * vel


class Gym:
    """The part of gymapi.Gym that the adapter uses; argument names are the stubs'."""

    def create_sim(self, compute_device=0, graphics_device=0, type=None, params=None):
        return Sim(params)

    def add_ground(self, sim, params): ...

    def load_asset(self, sim, rootpath, filename, options=None):
        if rootpath == "nowhere":
            return None
        sim.asset, sim.options = filename, options
        return filename

    def get_asset_dof_count(self, arg0):
        return ASSETS[arg0][0]

    def create_env(self, arg0, arg1, arg2, arg3):
        assert not arg0.prepared
        arg0.envs += 1
        return arg0, arg0.envs - 1

    def create_actor(self, env, asset, pose, name=None, group=-1, filter=-1, segmentationId=0):
        env[0].pose = pose.p.args
        env[0].actors.append(100 - env[1])  # numbers of the simulation are not those of the environment
        return 0

    def get_actor_dof_properties(self, arg0, arg1):
        names = ["driveMode", "stiffness", "damping"]
        return np.zeros(ASSETS[arg0[0].asset][0], dtype=list(zip(names, ["i4", "f4", "f4"], strict=True)))

    def set_actor_dof_properties(self, arg0, arg1, arg2):
        arg0[0].drives = arg2["driveMode"].tolist()
        arg0[0].gains = float(arg2["stiffness"][0]), float(arg2["damping"][0])
        return True

    def get_actor_index(self, arg0, arg1, arg2):
        assert arg2 == "sim"
        return arg0[0].actors[arg0[1]]

    def prepare_sim(self, arg0):
        arg0.prepare()
        return True

    def acquire_dof_state_tensor(self, arg0):
        return arg0.shown["dof"]

    def acquire_actor_root_state_tensor(self, arg0):
        return arg0.shown["root"]

    def acquire_rigid_body_state_tensor(self, arg0):
        return arg0.shown["body"]

    def set_dof_actuation_force_tensor(self, arg0, arg1):
        arg0.command("force", arg1)
        return True

    def set_dof_position_target_tensor(self, arg0, arg1):
        arg0.command("target", arg1)
        return True

    def set_dof_state_tensor_indexed(self, arg0, arg1, arg2, arg3):
        arg0.command("dof", (arg1, arg2, arg3))  # the one before is forgotten
        return True

    def set_actor_root_state_tensor_indexed(self, arg0, arg1, arg2, arg3):
        arg0.command("root", (arg1, arg2, arg3))
        return True

    def simulate(self, arg0):
        arg0.move()

    def fetch_results(self, arg0, arg1):
        arg0.fetched = True

    def refresh_dof_state_tensor(self, arg0):
        return self._refresh(arg0, "dof", arg0.dofs)

    def refresh_actor_root_state_tensor(self, arg0):
        return self._refresh(arg0, "root", arg0.root)

    def refresh_rigid_body_state_tensor(self, arg0):
        return self._refresh(arg0, "body", arg0.bodies)

    def _refresh(self, sim, name, truth):
        assert sim.fetched, "the CPU pipeline wants fetch_results first"
        assert name not in sim.setters, "a refresh between setting and simulating shows the old state"
        shown = sim.shown[name]._owned
        shown.copy_(truth.reshape(shown.shape))
        return True

    def destroy_sim(self, arg0):
        arg0.prepared = False


def modules() -> dict[str, types.ModuleType]:
    """What to put into sys.modules."""
    api = types.ModuleType("isaacgym.gymapi")
    for name in ("SimParams", "Vec3", "Transform", "PlaneParams", "AssetOptions"):
        setattr(api, name, Struct)
    api.__dict__.update(
        acquire_gym=Gym,
        DOF_MODE_NONE=0,
        DOF_MODE_POS=1,
        DOF_MODE_EFFORT=3,
        DOMAIN_SIM="sim",
        SIM_PHYSX="physx",
        UP_AXIS_Z="z",
    )
    bridge = types.ModuleType("isaacgym.gymtorch")
    bridge.__dict__.update(wrap_tensor=wrap_tensor, unwrap_tensor=unwrap_tensor)
    package = types.ModuleType("isaacgym")
    package.__dict__.update(gymapi=api, gymtorch=bridge, __file__="/opt/isaacgym/python/isaacgym/__init__.py")
    return {"isaacgym": package, "isaacgym.gymapi": api, "isaacgym.gymtorch": bridge}
