# SPDX-License-Identifier: Apache-2.0
"""A scripted expert for every tabletop task: an Actor that reads exact positions and has no memory.

At each step it reads off where in the task it is (above the object, around it, holding it, ...), moves the commanded
tool centre a little towards the next place, and turns that into the environment's own actions. Without memory it can
take over at any state, which is what DAgger-like labelling and distillation need.

Axes: N num_envs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mujoco
import numpy as np

from robo_rl.errors import ContractError
from robo_rl.types import ENVIRONMENT_STATE, STATE, ActionSample, Continuous, EnvSpec
from sims.mujoco import so101
from sims.mujoco.kinematics import Chain, solve_down
from sims.mujoco.tabletop_control import EE_STEP, MAX_DELTA
from sims.mujoco.tabletop_tasks import OPEN

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from robo_rl.types import Obs

GAIN = 0.4  # of the way to go, per step
MAX_STEP = 0.02  # m per step
HOVER = 0.06  # m above the object before descending on it
PUSHER = 0.0215  # m from the tool centre to the middle of the closed fingers, against the gripper's x axis
GRASP_Z = -0.002  # m, tool centre below the object's centre


class TabletopExpert:
    """Solves reach, push, lift, pick_place and stack under every control mode. An `Actor`; always deterministic."""

    def __init__(self, spec: EnvSpec):
        """Raises ContractError where `spec` is not a tabletop's."""
        scene, _, task = spec.name.partition("/")
        if scene != "tabletop" or not isinstance(spec.action, Continuous):
            raise ContractError(f"TabletopExpert acts in `tabletop/...`, not in `{spec.name}`.")
        self._spec = spec
        self._action = spec.action
        self._plan = {"reach": self._reach, "push": self._push}.get(task, self._handle)
        self._carry = task != "lift"
        self._control = spec.convention["action"]
        self._chain = Chain(mujoco.MjModel.from_xml_string(so101.build_xml()), "tcp")

    def reset(self, rows: Tensor | None = None) -> None:
        """Nothing to forget."""

    def act(self, obs: Obs, *, deterministic: bool = False, generator: Generator | None = None) -> ActionSample:
        """Actions (N, A) within the action's bounds; no log-prob, no value."""
        import torch

        own = _Parts(self._spec, STATE, obs)
        known = _Parts(self._spec, ENVIRONMENT_STATE, obs)
        ctrl = own["position"] + own["lead"]
        place, gripper, yaw = self._plan(own, known)
        step = np.clip(GAIN * (place - own["tcp"]), -MAX_STEP, MAX_STEP)
        roll = np.clip(GAIN * yaw, -EE_STEP[3], EE_STEP[3])
        grip = np.clip(gripper - ctrl[:, 5], -EE_STEP[4], EE_STEP[4])
        if self._control == "ee_delta":
            action = np.column_stack([step, roll, grip])
        else:
            target = ctrl.copy()
            target[:, 4] += roll
            tcp, _ = self._chain.forward(ctrl[:, :5])
            target[:, :5] = solve_down(self._chain, target[:, :5], tcp + step)
            target[:, 5] += grip
            move = (target - ctrl) / MAX_DELTA
            # All joints slow down together, so that the tool centre keeps its direction.
            move /= np.maximum(np.abs(move).max(axis=1, keepdims=True), 1.0)
            action = move if self._control == "joint_delta" else ctrl + move * MAX_DELTA
        action = np.clip(action, self._action.low, self._action.high)
        return ActionSample(torch.from_numpy(action.astype(np.float32)))

    # Plans return where the tool centre should go (N, 3), the gripper's angle (N,), and the yaw to turn by (N,).

    def _reach(self, own: _Parts, known: _Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        still = np.zeros(len(own["tcp"]))
        return known["goal"], still, still

    def _push(self, own: _Parts, known: _Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        offset = -PUSHER * own["tcp_x_axis"]
        pusher, thing = own["tcp"] + offset, known["object"]
        to_goal = known["goal_from_object"][:, :2]
        distance = np.linalg.norm(to_goal, axis=1, keepdims=True)
        ahead = to_goal / np.maximum(distance, 1e-6)
        rel = (pusher - thing)[:, :2]
        along = (rel * ahead).sum(axis=1)
        aside = np.linalg.norm(rel - along[:, None] * ahead, axis=1)
        start = thing[:, :2] - 0.05 * ahead
        low = pusher[:, 2] < 0.035
        pushing = low & (along < -0.015) & (aside < 0.012)
        clear = (along < -0.036) & (aside < 0.025)
        # Push from behind at low height; else come down behind; else rise, and travel there above the object.
        forward = pusher[:, :2] + np.minimum(distance + 0.005, 0.035) * ahead - (rel - along[:, None] * ahead)
        rising = ~(pushing | clear) & (pusher[:, 2] < 0.055)
        xy = np.where(pushing[:, None], forward, np.where(rising[:, None], pusher[:, :2], start))
        place = np.column_stack([xy, np.where(pushing | clear, 0.02, 0.075)])
        done = distance[:, 0] < 0.016
        place = np.where(done[:, None], pusher, place) - offset
        still = np.zeros(len(xy))
        return place, still, still

    def _handle(self, own: _Parts, known: _Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tcp, thing, rel = own["tcp"], known["object"], known["object_from_tcp"]
        to_goal = known["goal_from_object"]
        goal = thing + to_goal
        grip, lead = own["position"][:, 5], own["lead"][:, 5]
        aside = np.linalg.norm(to_goal[:, :2], axis=1)
        apart = np.linalg.norm(rel[:, :2], axis=1)
        yaw = _turn(own["tcp_x_axis"], known["object_x_axis"])

        close = (apart < 0.015) & (np.abs(rel[:, 2] - GRASP_Z) < 0.012)
        stalled = (grip < 0.3) & (lead < -0.1) & (own["velocity"][:, 5] > -0.5)
        held = stalled & (np.linalg.norm(rel, axis=1) < 0.03)
        aligned = (apart < 0.01) & (np.abs(yaw) < 0.1)

        # Approach: hover, descend, close.
        place = thing + np.array([0.0, 0.0, GRASP_Z])
        place[:, 2] += np.where(aligned | close, 0.0, HOVER)
        gripper = np.where(close, -0.1, OPEN)
        if not self._carry:
            lifted = np.where(held[:, None], goal - rel, place)
            return lifted, gripper, np.where(close | held, 0.0, yaw)

        # Carry: up, across, down. The object should end over the goal, so the tool centre allows for the grip's offset.
        travel = goal[:, 2] + 0.03
        high = thing[:, 2] > travel - 0.012
        over = aside < 0.008
        xy = np.where((high | (aside < 0.03))[:, None], goal[:, :2], thing[:, :2])
        z = np.where(over | ((aside < 0.015) & ~high), goal[:, 2] - 0.003, travel)
        place = np.where(held[:, None], np.column_stack([xy, z]) - rel, place)
        # Release and retreat.
        placed = (aside < 0.014) & (np.abs(to_goal[:, 2]) < 0.004)
        gripper = np.where(placed, OPEN, np.where(held, -0.1, gripper))
        away = tcp + np.array([0.0, 0.0, 0.02]) * (grip > 0.6)[:, None] * (tcp[:, 2] < goal[:, 2] + 0.08)[:, None]
        place = np.where(placed[:, None], away, place)
        return place, gripper, np.where(close | held | placed, 0.0, yaw)


class _Parts:
    """Named parts of one observation entry, float64: `parts["tcp"]` is every column called `tcp.*`."""

    def __init__(self, spec: EnvSpec, key: str, obs: Obs):
        self._names = spec.obs[key].names
        self._values = obs[key].numpy().astype(np.float64)

    def __getitem__(self, part: str) -> np.ndarray:
        return self._values[:, [i for i, name in enumerate(self._names) if name.partition(".")[0] == part]]


def _turn(from_axis: np.ndarray, to_axis: np.ndarray) -> np.ndarray:
    """(N,) the wrist roll [rad] between two horizontal axes whose sign does not matter."""
    angle = np.arctan2(to_axis[:, 1], to_axis[:, 0]) - np.arctan2(from_axis[:, 1], from_axis[:, 0])
    return (angle + np.pi / 2) % np.pi - np.pi / 2
