# SPDX-License-Identifier: Apache-2.0
"""Forward and inverse kinematics of a serial chain of hinges, for N configurations at once in numpy.

Only element-wise arithmetic, no BLAS: a row's result does not depend on which other rows it is computed with.
"""

from __future__ import annotations

import mujoco
import numpy as np


class Chain:
    """The hinges between the world and one site of a MuJoCo model; each must turn about its body's z axis."""

    def __init__(self, model: mujoco.MjModel, site: str):
        site_id = model.site(site).id
        bodies, body = [], int(model.site_bodyid[site_id])
        while body:
            bodies.insert(0, body)
            body = int(model.body_parentid[body])
        # Fixed transforms before each hinge; bodies without a joint are folded into the next one.
        self.joints: list[int] = []
        self._rotations: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []
        rotation, offset = np.eye(3), np.zeros(3)
        for body in bodies:
            offset = offset + rotation @ model.body_pos[body]
            rotation = rotation @ _matrix(model.body_quat[body])
            if model.body_jntnum[body]:
                joint = int(model.body_jntadr[body])
                if not np.array_equal(model.jnt_axis[joint], [0, 0, 1]):
                    raise ValueError(f"Joint `{model.joint(joint).name}` does not turn about z.")
                self.joints.append(joint)
                self._rotations.append(rotation)
                self._offsets.append(offset)
                rotation, offset = np.eye(3), np.zeros(3)
        self._rotations.append(rotation @ _matrix(model.site_quat[site_id]))
        self._offsets.append(offset + rotation @ model.site_pos[site_id])
        self.low = model.jnt_range[self.joints, 0]
        self.high = model.jnt_range[self.joints, 1]

    def forward(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Site position (N, 3) [m] and rotation (N, 3, 3), columns the site's axes, at joint angles (N, J) [rad]."""
        position, rotation, _, _ = self._walk(q)
        return position.T, rotation.transpose(2, 0, 1)

    def jacobian(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Position, rotation, and their Jacobians (N, 3, J): linear [m/rad] and angular, in the world frame."""
        position, rotation, anchors, axes = self._walk(q)
        angular = np.stack([a.T for a in axes], axis=2)
        arms = np.stack([(position - p).T for p in anchors], axis=2)
        linear = np.cross(angular, arms, axis=1)
        return position.T, rotation.transpose(2, 0, 1), linear, angular

    def _walk(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], list[np.ndarray]]:
        # Axes are (3, N), the batch last: numpy's loops are then long and contiguous.
        cos, sin = np.cos(q.T), np.sin(q.T)
        position = np.repeat(self._offsets[0][:, None], len(q), axis=1)
        x, y, z = (np.repeat(self._rotations[0][:, [i]], len(q), axis=1) for i in range(3))
        anchors, axes = [], []
        for j in range(len(self.joints)):
            anchors.append(position)
            axes.append(z)
            turned = (x * cos[j] + y * sin[j], y * cos[j] - x * sin[j], z)
            position = position + _combine(turned, self._offsets[j + 1])
            x, y, z = (_combine(turned, column) for column in self._rotations[j + 1].T)
        return position, np.stack([x, y, z], axis=1), anchors, axes


def _combine(axes: tuple[np.ndarray, ...], weights: np.ndarray) -> np.ndarray:
    """The weighted sum of axes; most of a robot's fixed turns are by right angles, so most weights are zero."""
    terms = [axis * weight for axis, weight in zip(axes, weights, strict=True) if weight]
    total = terms[0] if terms else np.zeros_like(axes[0])
    for term in terms[1:]:
        total += term
    return total


def solve_down(
    chain: Chain,
    q: np.ndarray,
    target: np.ndarray,
    iterations: int = 3,
    damping: float = 1e-6,
    tilt_weight: float = 0.02,
    max_turn: float = 0.2,
    free: int = 4,
) -> np.ndarray:
    """Joint angles (N, J) near `q` that bring the site to `target` (N, 3) with its z axis up (fingers down).

    Damped least squares (Wampler 1986) on the first `free` joints; the others keep their angles. Where the wrist
    cannot point down, position wins over tilt by `1 / tilt_weight` [rad/m] squared.
    """
    q = q.copy()
    low, high = chain.low[:free], chain.high[:free]
    up = np.array([0.0, 0.0, 1.0])
    for _ in range(iterations):
        position, rotation, linear, angular = chain.jacobian(q)
        error = np.concatenate([target - position, tilt_weight * np.cross(rotation[:, :, 2], up)], axis=1)
        jac = np.concatenate([linear, tilt_weight * angular], axis=1)[:, :, :free]
        step = _damped(jac, error, damping)
        # A joint at its limit would swallow its share of the motion: leave it out and let the others do it.
        angles = q[:, :free]
        blocked = ((angles <= low) & (step < 0)) | ((angles >= high) & (step > 0))
        if blocked.any():
            step = _damped(jac * ~blocked[:, None], error, damping)
        q[:, :free] = np.clip(angles + np.clip(step, -max_turn, max_turn), low, high)
    return q


def _damped(jac: np.ndarray, error: np.ndarray, damping: float) -> np.ndarray:
    normal = np.einsum("nik,nil->nkl", jac, jac) + damping * np.eye(jac.shape[2])
    return np.linalg.solve(normal, np.einsum("nik,ni->nk", jac, error)[..., None])[..., 0]


def _matrix(quat: np.ndarray) -> np.ndarray:
    matrix = np.empty(9)
    mujoco.mju_quat2Mat(matrix, quat / np.linalg.norm(quat))
    return np.where(np.abs(matrix) < 1e-12, 0.0, matrix).reshape(3, 3)  # rounding noise of right angles
