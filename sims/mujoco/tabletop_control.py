# SPDX-License-Identifier: Apache-2.0
"""From actions to motor targets, for the tabletop's three control modes. numpy, N rows at a time.

joint_delta     six numbers in [-1, 1]: each moves its motor's target by up to 0.08 rad (gripper 0.2 rad)
joint_position  six targets [rad]
ee_delta        five numbers: the commanded tool centre moves by up to 2 cm along the world's x, y and z with the
                fingers kept down, the wrist's roll by up to 0.16 rad, the gripper by up to 0.2 rad

In all of them an arm target stays within 0.3 rad of the measured angle, and the gripper's closes on an object by at
most 0.15 rad (full force takes 0.06): no wind-up against an obstacle.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from robo_rl.types import Continuous
from sims.mujoco.kinematics import Chain, solve_down
from sims.mujoco.so101 import JOINTS

Control = Literal["joint_delta", "joint_position", "ee_delta"]

MAX_DELTA = np.array([0.08, 0.08, 0.08, 0.08, 0.08, 0.2])  # rad per step
EE_STEP = np.array([0.02, 0.02, 0.02, 0.16, 0.2])  # m, m, m, rad, rad per step
MAX_LEAD = 0.3  # rad between target and measured angle
GRIP_LEAD = 0.15  # rad by which the gripper's target may lie inside what it holds; its force limit takes 0.06


def action_spec(control: Control, low: np.ndarray, high: np.ndarray) -> Continuous:
    """The action of a control mode, for motors with targets between `low` and `high` (6,) [rad]."""
    if control == "joint_delta":
        return Continuous((-1.0,) * 6, (1.0,) * 6, JOINTS, tuple(f"{delta} rad" for delta in MAX_DELTA))
    if control == "joint_position":
        return Continuous(tuple(low.tolist()), tuple(high.tolist()), JOINTS, ("rad",) * 6)
    step = tuple(EE_STEP.tolist())
    names = ("x", "y", "z", "wrist_roll", "gripper")
    return Continuous(tuple(-x for x in step), step, names, ("m", "m", "m", "rad", "rad"))


def motor_targets(
    control: Control,
    action: np.ndarray,
    previous: np.ndarray,
    q: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    chain: Chain,
) -> tuple[np.ndarray, np.ndarray]:
    """Targets (N, 6) [rad] after `action` (N, A), given the `previous` ones and the measured angles `q` (N, 6), and
    what was asked for before the limits, as a fraction of MAX_DELTA in [-1, 1] (N, 6)."""
    if control == "joint_delta":
        target = previous + MAX_DELTA * np.clip(action, -1.0, 1.0)
    elif control == "joint_position":
        target = action.copy()
    else:
        move = np.clip(action, -EE_STEP, EE_STEP)
        target = previous.copy()
        target[:, 4:] += move[:, 3:]
        tcp, _ = chain.forward(previous[:, :5])
        target[:, :5] = solve_down(chain, target[:, :5], tcp + move[:, :3])
    asked = np.clip((target - previous) / MAX_DELTA, -1.0, 1.0)
    target = np.clip(target, low, high)
    target[:, :5] = np.clip(target[:, :5], q[:, :5] - MAX_LEAD, q[:, :5] + MAX_LEAD)
    # Without this limit a grasp winds the target up far beyond the object, and letting go takes many steps.
    target[:, 5] = np.maximum(target[:, 5], q[:, 5] - GRIP_LEAD)
    return target, asked
