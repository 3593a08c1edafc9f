# SPDX-License-Identifier: Apache-2.0
"""What Gymnasium's MuJoCo v5 tasks observe, pay and call healthy, written for batches. Settings are those of
`gymnasium.make` without arguments.

Axes: M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class After:
    """M rows after a control step.

    `qpos`, `qvel` now, the qpos `before`, and the `action`. What MuJoCo derives from a state is not of that state after
    `mj_step` but of where the integrator last looked, and Gymnasium reads it so: the positions (M, 3) of the task's
    `bodies`, now and `bodies_before`, and `contact`, the external forces (M, nbody, 6).
    """

    qpos: np.ndarray
    qvel: np.ndarray
    before: np.ndarray
    action: np.ndarray
    bodies: dict[str, np.ndarray]
    bodies_before: dict[str, np.ndarray]
    contact: np.ndarray
    dt: float


@dataclass(frozen=True)
class Task:
    xml: str
    frame_skip: int
    horizon: int
    observe: Callable[[After], np.ndarray]
    reward: Callable[[After, np.ndarray], np.ndarray]  # of the step and whether the row is healthy
    healthy: Callable[[After], np.ndarray]
    noise: float  # half-width of the uniform position noise at the start
    velocity_noise: Literal["uniform", "normal"] = "uniform"
    bodies: tuple[str, ...] = ()
    contact: bool = False
    place: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None  # writes goals; from uniforms (M, 64)


def _always(s: After) -> np.ndarray:
    return np.ones(len(s.qpos), bool)


def _speed(s: After) -> np.ndarray:
    return (s.qpos[:, 0] - s.before[:, 0]) / s.dt


def _effort(s: After) -> np.ndarray:
    return np.square(s.action).sum(1)


def _within(x: np.ndarray, low: float, high: float) -> np.ndarray:
    return (low < x) & (x < high)


def _hopper_healthy(s: After) -> np.ndarray:
    rest = np.concatenate([s.qpos[:, 2:], s.qvel], axis=1)
    return (np.abs(rest) < 100).all(1) & (s.qpos[:, 1] > 0.7) & _within(s.qpos[:, 2], -0.2, 0.2)


def _walker_healthy(s: After) -> np.ndarray:
    return _within(s.qpos[:, 1], 0.8, 2.0) & _within(s.qpos[:, 2], -1.0, 1.0)


def _ant_healthy(s: After) -> np.ndarray:
    return (s.qpos[:, 2] >= 0.2) & (s.qpos[:, 2] <= 1.0)


def _clipped_contact(s: After) -> np.ndarray:
    return s.contact.clip(-1.0, 1.0)


def _ant_observe(s: After) -> np.ndarray:
    forces = _clipped_contact(s)[:, 1:].reshape(len(s.qpos), -1)  # the world body's are always 0
    return np.concatenate([s.qpos[:, 2:], s.qvel, forces], axis=1)


def _ant_reward(s: After, healthy: np.ndarray) -> np.ndarray:
    speed = (s.bodies["torso"][:, 0] - s.bodies_before["torso"][:, 0]) / s.dt
    return speed + healthy - 0.5 * _effort(s) - 5e-4 * np.square(_clipped_contact(s)).sum((1, 2))


def _walking(skip: int, clip: float = np.inf) -> Callable[[After], np.ndarray]:
    """Positions without the first `skip`, and velocities within `clip`."""

    def observe(s: After) -> np.ndarray:
        velocity = s.qvel if clip == np.inf else s.qvel.clip(-clip, clip)
        return np.concatenate([s.qpos[:, skip:], velocity], axis=1)

    return observe


def _forward(effort: float, alive: float = 0.0) -> Callable[[After, np.ndarray], np.ndarray]:
    return lambda s, healthy: _speed(s) + alive * healthy - effort * _effort(s)


def _reacher_observe(s: After) -> np.ndarray:
    theta, gap = s.qpos[:, :2], s.bodies["fingertip"] - s.bodies["target"]
    return np.concatenate([np.cos(theta), np.sin(theta), s.qpos[:, 2:], s.qvel[:, :2], gap[:, :2]], axis=1)


def _reacher_reward(s: After, healthy: np.ndarray) -> np.ndarray:
    return -np.linalg.norm(s.bodies["fingertip"] - s.bodies["target"], axis=1) - _effort(s)


def _reacher_place(u: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
    # Uniform in the disc by rejection, as there; the first of 16 draws that lies in it (all miss once in 10^10).
    draws = 0.4 * u[:, :32].reshape(-1, 16, 2) - 0.2
    inside = np.linalg.norm(draws, axis=-1) < 0.2
    qpos[:, -2:] = draws[np.arange(len(u)), inside.argmax(1)]
    qvel[:, -2:] = 0.0


def _pusher_observe(s: After) -> np.ndarray:
    return np.concatenate(
        [s.qpos[:, :7], s.qvel[:, :7], *(s.bodies[b] for b in ("tips_arm", "object", "goal"))], axis=1
    )


def _pusher_reward(s: After, healthy: np.ndarray) -> np.ndarray:
    near = np.linalg.norm(s.bodies["object"] - s.bodies["tips_arm"], axis=1)
    distance = np.linalg.norm(s.bodies["object"] - s.bodies["goal"], axis=1)
    return -distance - 0.1 * _effort(s) - 0.5 * near


def _pusher_place(u: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
    draws = u[:, :64].reshape(-1, 32, 2) * np.array([0.3, 0.4]) + np.array([-0.3, -0.2])
    apart = np.linalg.norm(draws, axis=-1) > 0.17
    qpos[:, -4:-2] = draws[np.arange(len(u)), apart.argmax(1)]
    qpos[:, -2:] = 0.0
    qvel[:, -4:] = 0.0


TASKS: dict[str, Task] = {
    "HalfCheetah-v5": Task("half_cheetah.xml", 5, 1000, _walking(1), _forward(0.1), _always, 0.1, "normal"),
    "Hopper-v5": Task("hopper.xml", 4, 1000, _walking(1, 10.0), _forward(1e-3, 1.0), _hopper_healthy, 5e-3),
    "Walker2d-v5": Task("walker2d_v5.xml", 4, 1000, _walking(1, 10.0), _forward(1e-3, 1.0), _walker_healthy, 5e-3),
    "Ant-v5": Task("ant.xml", 5, 1000, _ant_observe, _ant_reward, _ant_healthy, 0.1, "normal", ("torso",), True),
    "Swimmer-v5": Task("swimmer.xml", 4, 1000, _walking(2), _forward(1e-4), _always, 0.1),
    "InvertedPendulum-v5": Task(
        "inverted_pendulum.xml",
        2,
        1000,
        _walking(0),
        lambda s, healthy: healthy.astype(np.float64),
        lambda s: np.abs(s.qpos[:, 1]) <= 0.2,
        0.01,
    ),
    "Reacher-v5": Task(
        "reacher.xml",
        2,
        50,
        _reacher_observe,
        _reacher_reward,
        _always,
        0.1,
        bodies=("fingertip", "target"),
        place=_reacher_place,
    ),
    "Pusher-v5": Task(
        "pusher_v5.xml",
        5,
        100,
        _pusher_observe,
        _pusher_reward,
        _always,
        0.0,
        bodies=("tips_arm", "object", "goal"),
        place=_pusher_place,
    ),
}
VELOCITY_NOISE = {"Reacher-v5": 0.005, "Pusher-v5": 0.005}  # where it differs from the position noise
