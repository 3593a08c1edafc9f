# SPDX-License-Identifier: Apache-2.0
"""The tabletop's five tasks: where an episode starts, what is privileged, the dense reward, and what success is.

A task is a `Task` of plain functions over a `Scene`, M rows at a time in numpy. All lengths are metres.

Success must have held for 0.25 s (5 steps) at the episode's last step:
    reach       the tool centre is within 2 cm of the goal
    push        the object's centre is within 2.5 cm of the goal on the table, 4 to 10 cm from where it started
    lift        the object is 4.8 cm or more above where it rested, between the fingers
    pick_place  the object rests on the table within 2.5 cm of a goal 10 cm or more away, and the gripper is open
    stack       the object rests on the base cube, off-centre by 1.5 cm at most, and the gripper is open
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from robo_rl.errors import ConfigError
from robo_rl.types import SuccessSpec
from sims.mujoco.so101 import CATALOGUE, GRIPPER_PARALLEL, HALF_SIZE, HOME

HOLD_STEPS = 5
OPEN = 0.8  # gripper angle [rad] at which grasping tasks start
RELEASED = 0.4  # gripper angle [rad] beyond which nothing is held: the pads are 4 cm apart
LIFT_HEIGHT = 0.08
CARRY_HEIGHT = 0.04
DRAWS = 32  # candidates per rejection-sampled position


@dataclass(frozen=True, slots=True)
class Scene:
    """M rows of physical state.

    `gripper` (M,) rad, and its target `grip` (M,) rad; `tcp` (M, 3) the tool centre, `tcp_up` (M,) how far its axis
    points up (1: fingers straight down); `object_pos`, `object_x`, `object_z`, `object_vel` (M, 3) with the object's
    axes; `base_pos` (M, 3) the cube to stack on, `goal` (M, 3).
    """

    gripper: np.ndarray
    grip: np.ndarray
    tcp: np.ndarray
    tcp_up: np.ndarray
    object_pos: np.ndarray
    object_x: np.ndarray
    object_z: np.ndarray
    object_vel: np.ndarray
    base_pos: np.ndarray
    goal: np.ndarray


@dataclass(frozen=True, slots=True)
class Start:
    """Where M episodes start: joint angles `q` (M, 6), object and base `(x, y, yaw)` (M, 3), `goal` (M, 3)."""

    q: np.ndarray
    object: np.ndarray
    base: np.ndarray
    goal: np.ndarray


@dataclass(frozen=True, slots=True)
class Judgement:
    """`reward` (M,) dense, `success` (M,) bool whether the condition holds now, `distance` (M,) [m] to the goal."""

    reward: np.ndarray
    success: np.ndarray
    distance: np.ndarray


@dataclass(frozen=True)
class Task:
    instruction: str  # with {object} and {base}
    horizon: int
    gripper_range: tuple[float, float]  # rad; nearly closed where the task needs no grasp
    marker: Literal["ball", "disc", "none"]
    has_base: bool
    success: SuccessSpec
    start: Callable[[np.ndarray], Start]  # from uniforms (M, UNIFORMS)
    privileged: Callable[[Scene], dict[str, np.ndarray]]  # parts of observation.environment_state
    judge: Callable[[Scene], Judgement]


UNIFORMS = 12 + 2 * DRAWS


# --- where episodes start --------------------------------------------------------------------------------------


def _arm(u: np.ndarray, gripper: float) -> np.ndarray:
    """Joint angles scattered about home by 0.2 rad in pan and 0.1 rad elsewhere."""
    q = np.tile(np.array(HOME), (len(u), 1))
    q[:, :5] += (2 * u[:, :5] - 1) * np.array([0.2, 0.1, 0.1, 0.1, 0.1])
    q[:, 5] = gripper
    return q


def _object(u: np.ndarray, yaw_range: float, graspable: bool) -> np.ndarray:
    """(x, y, yaw) of the object; where `graspable`, yaw is about the one that needs no wrist roll."""
    xy = _within(u[:, 5:7], (0.19, 0.27), (-0.10, 0.10))
    yaw = yaw_range * (2 * u[:, 7] - 1) + (_natural_yaw(xy) if graspable else 0.0)
    return np.column_stack([xy, yaw])


def _natural_yaw(xy: np.ndarray) -> np.ndarray:
    """Yaw of the gripper's closing direction over (x, y) without wrist roll: away from the pan axis, near enough."""
    return np.arctan2(xy[:, 1], xy[:, 0] - 0.04) - 0.05


def _within(u: np.ndarray, x: tuple[float, float], y: tuple[float, float]) -> np.ndarray:
    return np.stack([x[0] + (x[1] - x[0]) * u[..., 0], y[0] + (y[1] - y[0]) * u[..., 1]], axis=-1)


def _candidates(u: np.ndarray) -> np.ndarray:
    return u[:, 12:].reshape(len(u), DRAWS, 2)


def _first(candidates: np.ndarray, allowed: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """(M, 2): the first allowed of each row's candidates (M, DRAWS, 2), `otherwise` (M, 2) where none is."""
    chosen = candidates[np.arange(len(candidates)), allowed.argmax(1)]
    return np.where(allowed.any(axis=1, keepdims=True), chosen, otherwise)


def _at(xy: np.ndarray, z: float) -> np.ndarray:
    return np.column_stack([xy, np.full(len(xy), z)])


def _parked(rows: int) -> np.ndarray:
    return np.tile([0.35, 0.3, 0.0], (rows, 1))


def _reach_start(u: np.ndarray) -> Start:
    radius, angle = 0.14 + 0.14 * u[:, 8], 0.8 * (2 * u[:, 9] - 1)
    goal = np.column_stack([0.04 + radius * np.cos(angle), radius * np.sin(angle), 0.03 + 0.17 * u[:, 10]])
    return Start(_arm(u, 0.0), _parked(len(u)), _parked(len(u)), goal)


def _push_start(u: np.ndarray) -> Start:
    start = _object(u, np.pi / 4, graspable=False)
    draws = _candidates(u)
    angle, radius = 2 * np.pi * draws[..., 0], 0.04 + 0.06 * draws[..., 1]
    goal = start[:, None, :2] + radius[..., None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    allowed = (goal[..., 0] > 0.17) & (goal[..., 0] < 0.29) & (np.abs(goal[..., 1]) < 0.12)
    inward = np.array([0.23, 0.0]) - start[:, :2]
    inward /= np.linalg.norm(inward, axis=1, keepdims=True) + 1e-9
    xy = _first(goal, allowed, start[:, :2] + 0.05 * inward)
    return Start(_arm(u, 0.0), start, _parked(len(u)), _at(xy, HALF_SIZE))


def _lift_start(u: np.ndarray) -> Start:
    start = _object(u, 0.3, graspable=True)
    return Start(_arm(u, OPEN), start, _parked(len(u)), _at(start[:, :2], HALF_SIZE + LIFT_HEIGHT))


def _apart(u: np.ndarray, start: np.ndarray, clearance: float) -> np.ndarray:
    """(M, 2): a second place on the table, `clearance` or more from the object."""
    places = _within(_candidates(u), (0.18, 0.28), (-0.11, 0.11))
    allowed = np.linalg.norm(places - start[:, None, :2], axis=-1) > clearance
    across = np.column_stack([start[:, 0], start[:, 1] - np.copysign(clearance, start[:, 1])])
    return _first(places, allowed, across)


def _pick_place_start(u: np.ndarray) -> Start:
    start = _object(u, 0.3, graspable=True)
    return Start(_arm(u, OPEN), start, _parked(len(u)), _at(_apart(u, start, 0.10), HALF_SIZE))


def _stack_start(u: np.ndarray) -> Start:
    start = _object(u, 0.3, graspable=True)
    xy = _apart(u, start, 0.08)
    base = np.column_stack([xy, _natural_yaw(xy) + 0.3 * (2 * u[:, 8] - 1)])
    return Start(_arm(u, OPEN), start, base, _at(xy, 3 * HALF_SIZE))


def scene_objects(task: Task, target: str, distractors: int) -> tuple[str, ...]:
    """The scene's objects, all different: the one to handle, the one to stack on, then distractors."""
    chosen = [target]
    if task.has_base:
        chosen.append("green cube" if target.startswith("blue") else "blue cube")
    others = [name for name in CATALOGUE if name not in chosen]
    if not 0 <= distractors <= len(others):
        raise ConfigError(f"env.distractors must be 0 to {len(others)}, got {distractors}.")
    # A stride through the catalogue, so that distractors differ in colour and shape.
    return (*chosen, *(others[7 * i % len(others)] for i in range(distractors)))


def scattered(u: np.ndarray, taken: list[np.ndarray], goal: np.ndarray) -> list[np.ndarray]:
    """`(x, y, yaw)` (M, 3) of one distractor per `2 * DRAWS` uniforms.

    Each is at the first of its candidates 6 cm or more from everything placed before it and from the goal, or at the
    clearest of them.
    """
    places = [pose[:, None, :2] for pose in (*taken, goal)]
    poses = []
    for draws in np.split(u.reshape(len(u), -1, 2), u.shape[1] // (2 * DRAWS), axis=1):
        candidates = _within(draws, (0.13, 0.35), (-0.18, 0.18))
        clearance = np.min([np.linalg.norm(candidates - place, axis=-1) for place in places], axis=0)
        clearest = candidates[np.arange(len(u)), clearance.argmax(1)]
        xy = _first(candidates, clearance > 0.06, clearest)
        places.append(xy[:, None])
        poses.append(np.column_stack([xy, np.pi * draws[:, 0, 0]]))
    return poses


# --- what is privileged ----------------------------------------------------------------------------------------


def _reach_privileged(s: Scene) -> dict[str, np.ndarray]:
    return {"goal_from_tcp": s.goal - s.tcp, "goal": s.goal}


def _object_privileged(s: Scene) -> dict[str, np.ndarray]:
    return {
        "object_from_tcp": s.object_pos - s.tcp,
        "object": s.object_pos,
        "goal_from_object": s.goal - s.object_pos,
        "object_velocity": s.object_vel,
        "object_x_axis": s.object_x,
        "object_z_axis": s.object_z,
    }


def _push_privileged(s: Scene) -> dict[str, np.ndarray]:
    return _object_privileged(s) | {"behind_from_tcp": _behind(s) - s.tcp}


def _behind(s: Scene) -> np.ndarray:
    """(M, 3): where a push towards the goal starts, 3.5 cm behind the object's centre."""
    direction = (s.goal - s.object_pos)[:, :2]
    direction = direction / (np.linalg.norm(direction, axis=1, keepdims=True) + 1e-6)
    return _at(s.object_pos[:, :2] - 0.035 * direction, 0.02)


# --- rewards and success ---------------------------------------------------------------------------------------


def _closeness(distance: np.ndarray, scale: float) -> np.ndarray:
    return 1.0 - np.tanh(scale * distance)


def _reach_judge(s: Scene) -> Judgement:
    distance = np.linalg.norm(s.goal - s.tcp, axis=1)
    success = distance < 0.02
    return Judgement(_closeness(distance, 8.0) + success, success, distance)


def _push_judge(s: Scene) -> Judgement:
    distance = np.linalg.norm((s.goal - s.object_pos)[:, :2], axis=1)
    approach = np.linalg.norm(_behind(s) - s.tcp, axis=1)
    approach = np.where(distance < 0.02, 0.0, approach)
    reward = 0.4 * _closeness(approach, 8.0) + _closeness(distance, 12.0) + (distance < 0.02)
    return Judgement(reward, distance < 0.025, distance)


def _grasp(s: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Reward for reaching and closing (M,), at most 0.9, and whether the object is between the fingers (M,) bool."""
    reach = np.linalg.norm(s.object_pos - s.tcp, axis=1)
    near = reach < 0.03
    closed = np.clip((OPEN - s.gripper) / (OPEN - GRIPPER_PARALLEL), 0.0, 1.0)
    return 0.5 * _closeness(reach, 10.0) + 0.3 * near * closed + 0.1 * np.clip(s.tcp_up, 0.0, 1.0), near


def _lift_judge(s: Scene) -> Judgement:
    grasp, near = _grasp(s)
    height = np.clip((s.object_pos[:, 2] - HALF_SIZE) / LIFT_HEIGHT, 0.0, 1.0)
    success = (height > 0.6) & near
    return Judgement(grasp + 1.5 * height * near + success, success, np.linalg.norm(s.goal - s.object_pos, axis=1))


def _place(s: Scene, tolerance: float) -> Judgement:
    """Grasp, lift, carry over the goal, lower, open: each stage is worth more than staying in the one before."""
    grasp, near = _grasp(s)
    offset = s.goal - s.object_pos
    aside = np.linalg.norm(offset[:, :2], axis=1)
    above = -offset[:, 2]
    lift = s.object_pos[:, 2] - HALF_SIZE
    # Up to carrying height, and no further: what is carried too high does not find its way down.
    height = np.clip(lift / CARRY_HEIGHT, 0.0, 1.0) * np.clip(1.5 - lift / (4 * CARRY_HEIGHT), 0.0, 1.0)
    over = aside < tolerance
    resting = over & (np.abs(above) < 0.006)
    # By the target, not the angle: a grasp must first be slackened, and nothing moves until it is.
    opened = np.clip((s.grip - _FREE[0]) / (RELEASED + 0.1 - _FREE[0]), 0.0, 1.0)
    still = np.linalg.norm(s.object_vel, axis=1) < 0.05
    carried = near & (height > 0.2) | over
    lifted = np.where(over, 1.0, height * near)
    # Flat within a centimetre of the goal: a sharp ridge would punish every try to go down along it.
    reward = np.where(resting, 0.9, grasp) + 0.7 * lifted + 1.5 * carried * _closeness(np.maximum(aside - 0.01, 0), 8.0)
    # Two scales: the last centimetre matters most, but from 15 cm up the way down must still be felt.
    lowered = 0.5 * _closeness(np.abs(above), 25.0) + np.clip(1.0 - np.abs(above) / 0.15, 0.0, 1.0)
    reward = reward + over * lowered + resting * opened
    success = resting & still & (s.gripper > RELEASED)
    return Judgement(reward + success, success, np.linalg.norm(offset, axis=1))


def _pick_place_judge(s: Scene) -> Judgement:
    return _place(s, 0.025)


def _stack_judge(s: Scene) -> Judgement:
    return _place(s, 0.015)


# --- the tasks -------------------------------------------------------------------------------------------------


def _success(quantity: str, threshold: float) -> SuccessSpec:
    return SuccessSpec(quantity, threshold, "m", HOLD_STEPS, "end")


_SHUT, _FREE = (-0.1, 0.1), (-0.1, 1.0)

TASKS: dict[str, Task] = {
    "reach": Task(
        "reach the green ball",
        50,
        _SHUT,
        "ball",
        False,
        _success("distance of the tool centre to the goal", 0.02),
        _reach_start,
        _reach_privileged,
        _reach_judge,
    ),
    "push": Task(
        "push the {object} onto the green disc",
        80,
        _SHUT,
        "disc",
        False,
        _success("distance of the object to the goal", 0.025),
        _push_start,
        _push_privileged,
        _push_judge,
    ),
    "lift": Task(
        "lift the {object}",
        60,
        _FREE,
        "none",
        False,
        _success("height of the object above its rest, more than", 0.6 * LIFT_HEIGHT),
        _lift_start,
        _object_privileged,
        _lift_judge,
    ),
    "pick_place": Task(
        "place the {object} on the green disc",
        100,
        _FREE,
        "disc",
        False,
        _success("distance of the released, resting object to the goal", 0.025),
        _pick_place_start,
        _object_privileged,
        _pick_place_judge,
    ),
    "stack": Task(
        "stack the {object} on the {base}",
        100,
        _FREE,
        "none",
        True,
        _success("horizontal offset of the released object on the base", 0.015),
        _stack_start,
        _object_privileged,
        _stack_judge,
    ),
}
