# SPDX-License-Identifier: Apache-2.0
"""The SO-101 arm at a table, as one self-contained MJCF text: primitives only, no mesh and no file.

Kinematics, inertials, joint ranges and servos are those of the LeRobot project's `so101_new_calib` model
(https://github.com/TheRobotStudio/SO-ARM100; a test compares the two). What differs, and why:

* capsules and boxes instead of meshes: software rendering is 40 times faster, collision detection 2.6 times;
* only fingers and palm collide, with objects and the table: the arm's own links never meet in these tasks;
* the moving finger's pad is parallel to the fixed one when they are 30 mm apart, the objects' width. With pads parallel
  at another width, edges press on the object and squeeze it out;
* the gripper servo gives at most 1.0 N m of its 3.35: enough to hold 30 g, and the grasp stays numerically quiet.

World frame: origin under the arm's base, x forward, y left, z up, the table at z = 0; metres, kilograms, radians.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from robo_rl.errors import unknown_name

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
JOINT_LOW = (-1.9198621771937616, -1.7453292519943224, -1.69, -1.6580628494556928, -2.7438472969992493, -0.17453297762)
JOINT_HIGH = (1.9198621771937634, 1.7453292519943366, 1.69, 1.6580627293335335, 2.841206309382605, 1.7453291995659765)
HOME = (-0.0073840627, -0.26984446, 0.2153543677, 1.6252864191, -0.0008332627, 0.8)
"""Joint angles with the tool centre at (0.22, 0, 0.09), fingers straight down and open."""
GRIPPER_PARALLEL = 0.25
"""Gripper angle at which the pads are parallel and one object's width apart."""

HALF_SIZE = 0.015
"""Half of an object's height, and of its width between the fingers."""

COLORS = {
    "red": (0.80, 0.10, 0.10),
    "green": (0.10, 0.60, 0.15),
    "blue": (0.10, 0.20, 0.80),
    "yellow": (0.90, 0.80, 0.10),
    "purple": (0.50, 0.10, 0.60),
}
SHAPES = {
    "cube": ("box", (HALF_SIZE, HALF_SIZE, HALF_SIZE)),
    "cylinder": ("cylinder", (HALF_SIZE, HALF_SIZE)),
    "block": ("box", (HALF_SIZE, 1.5 * HALF_SIZE, HALF_SIZE)),
}
CATALOGUE = tuple(f"{color} {shape}" for shape in SHAPES for color in COLORS)
"""Names of all objects. Every one is as high as it is wide, rests at `HALF_SIZE` and weighs 30 g."""

CAMERAS = ("front", "wrist")


@dataclass(frozen=True)
class Physics:
    """Solver settings. These hold a grasp for seconds at 10 ms (measured); fewer iterations let it explode."""

    timestep: float = 0.01
    iterations: int = 30
    ls_iterations: int = 20
    impratio: float = 10.0
    gripper_force: float = 1.0  # N m


def build_xml(
    objects: Sequence[str] = ("red cube",),
    marker: Literal["ball", "disc", "none"] = "none",
    physics: Physics = Physics(),
) -> str:
    """The whole scene as MJCF text.

    Args:
        objects: names out of `CATALOGUE`, one free body each: `object0`, `object1`, ... Models with equally many
            objects have equal state sizes whatever the objects are.
        marker: how the goal is drawn, a mocap body `goal` that touches nothing.
    """
    return _TEMPLATE.format(
        physics=physics,
        force=physics.gripper_force,
        objects="".join(_object(i, name) for i, name in enumerate(objects)),
        goal=_MARKERS[marker],
    )


def _object(index: int, name: str) -> str:
    if name not in CATALOGUE:
        raise unknown_name("object", name, CATALOGUE)
    color, shape = name.split()
    kind, size = SHAPES[shape]
    return f"""
    <body name="object{index}" pos="{0.22 + 0.05 * index} 0 {HALF_SIZE}">
      <freejoint name="object{index}"/>
      <geom name="object{index}" class="object" type="{kind}" size="{_text(size)}" rgba="{_text(COLORS[color])} 1"/>
    </body>"""


def _text(numbers: Sequence[float]) -> str:
    return " ".join(str(x) for x in numbers)


_MARKERS = {
    "none": "",
    "ball": '<body name="goal" mocap="true"><geom class="drawn" type="sphere" size=".012" rgba=".1 .9 .3 .6"/></body>',
    "disc": '<body name="goal" mocap="true">'
    '<geom class="drawn" type="cylinder" size=".025 .0005" rgba=".1 .9 .3 1"/></body>',
}

# Contact bits: table 1, objects 2, fingers and palm 4. Objects meet everything, fingers never each other.
_TEMPLATE = """
<mujoco model="so101_tabletop">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{physics.timestep}" integrator="implicitfast" cone="elliptic" impratio="{physics.impratio}"
          iterations="{physics.iterations}" ls_iterations="{physics.ls_iterations}">
    <!-- A failed state must stay visible: by default MuJoCo would quietly go on from the model's initial one. -->
    <flag autoreset="disable"/>
  </option>
  <visual>
    <quality offsamples="0" shadowsize="0" numslices="12" numstacks="6" numquads="2"/>
    <global offwidth="640" offheight="480"/>
    <map znear="0.02"/>
  </visual>
  <default>
    <default class="sts3215">
      <joint axis="0 0 1" damping="0.60" frictionloss="0.052" armature="0.028"/>
      <position kp="17.8" forcerange="-3.35 3.35"/>
    </default>
    <default class="drawn">
      <geom contype="0" conaffinity="0" mass="0" group="1" rgba="1 .82 .12 1"/>
    </default>
    <default class="finger">
      <geom type="box" contype="4" conaffinity="3" condim="4" friction="1.5 .02 .0001" mass="0" group="1"
            solref=".01 1" solimp=".95 .99 .001" rgba=".95 .75 .1 1"/>
    </default>
    <default class="object">
      <geom mass=".03" contype="2" conaffinity="7" condim="4" friction="1 .01 .0001"/>
    </default>
  </default>
  <worldbody>
    <light pos=".2 0 1.5" dir="0 0 -1" castshadow="false"/>
    <camera name="front" pos=".62 0 .38" xyaxes="0 1 0 -.6 0 .8" fovy="50"/>
    <geom name="table" type="plane" pos=".2 0 0" size=".6 .6 .05" contype="1" conaffinity="6" friction="1 .005 .0001"
          rgba=".5 .5 .55 1"/>
    <body name="base" childclass="sts3215">
      <inertial pos="0.0137179 -5.19711e-05 0.0334843" mass="0.147"
                fullinertia="0.000114686 0.000136117 0.000130364 -4.59787e-07 4.97151e-06 9.75275e-08"/>
      <geom class="drawn" type="capsule" fromto="0 0 .02 0 0 .06" size=".03"/>
      <body name="shoulder" pos="0.0388353 -8.97657e-09 0.0624" quat="3.56167e-16 1.22818e-15 -1 -4.14635e-16">
        <joint name="shoulder_pan" range="-1.9198621771937616 1.9198621771937634"/>
        <inertial pos="-0.0307604 -1.66727e-05 -0.0252713" mass="0.100006"
                  fullinertia="8.3759e-05 8.10403e-05 2.39783e-05 7.55525e-08 -1.16342e-06 1.54663e-07"/>
        <geom class="drawn" type="capsule" fromto="-.03 0 -.03 -.03 0 -.055" size=".024"/>
        <body name="upper_arm" pos="-0.0303992 -0.0182778 -0.0542" quat="0.5 -0.5 -0.5 -0.5">
          <joint name="shoulder_lift" range="-1.7453292519943224 1.7453292519943366"/>
          <inertial pos="-0.0898471 -0.00838224 0.0184089" mass="0.103"
                    fullinertia="4.08002e-05 0.000147318 0.000142487 -1.97819e-05 -4.03016e-08 8.97326e-09"/>
          <geom class="drawn" type="capsule" fromto="0 0 .018 -.11257 -.028 .018" size=".016"/>
          <body name="lower_arm" pos="-0.11257 -0.028 1.73763e-16" quat="0.707107 -5.98613e-17 -2.58051e-17 0.707107">
            <joint name="elbow_flex" range="-1.69 1.69"/>
            <inertial pos="-0.0980701 0.00324376 0.0182831" mass="0.104"
                      fullinertia="2.87438e-05 0.000159844 0.00014529 7.41152e-06 1.26409e-06 -4.90188e-08"/>
            <geom class="drawn" type="capsule" fromto="0 0 .018 -.1349 .0052 .018" size=".015"/>
            <body name="wrist" pos="-0.1349 0.0052 3.62355e-17" quat="0.707107 9.58722e-16 -7.51313e-16 -0.707107">
              <joint name="wrist_flex" range="-1.6580628494556928 1.6580627293335335"/>
              <inertial pos="-0.000103312 -0.0386143 0.0281156" mass="0.079"
                        fullinertia="3.68263e-05 2.5391e-05 2.1e-05 1.7893e-08 -5.28128e-08 3.6412e-06"/>
              <geom class="drawn" type="capsule" fromto="0 0 .018 0 -.0611 .018" size=".016"/>
              <body name="gripper" pos="5.55112e-17 -0.0611 0.0181" quat="0.0172091 -0.0172091 0.706897 0.706897">
                <joint name="wrist_roll" range="-2.7438472969992493 2.841206309382605"/>
                <inertial pos="0.000213627 0.000245138 -0.025187" mass="0.087"
                          fullinertia="2.75087e-05 4.33657e-05 3.45059e-05 -3.35241e-07 -5.7352e-06 -5.17847e-08"/>
                <camera name="wrist" pos=".012 .065 -.035" quat=".9537 -.3007 0 0" fovy="75"/>
                <geom name="palm" class="finger" condim="3" pos=".005 0 -.03" size=".022 .018 .022" rgba=".2 .2 .2 1"/>
                <geom name="fixed_finger" class="finger" pos="-.0068 -.0002 -.0795" size=".0052 .009 .0255"/>
                <site name="gripperframe" group="3" pos="-0.0079 -0.000218121 -0.0981274"
                      quat="0.707107 0 0.707107 0"/>
                <!-- Between the fingers, 6 mm clear of the fixed one so that it does not land on the object. -->
                <site name="tcp" group="3" size=".003" pos=".0194 -.0002 -.094"/>
                <body name="moving_jaw_so101_v1" pos="0.0202 0.0188 -0.0234"
                      quat="0.707107 0.707107 -1.85362e-08 1.85362e-08">
                  <joint name="gripper" range="-0.17453297762778586 1.7453291995659765"/>
                  <inertial pos="-0.00157495 -0.0300244 0.0192755" mass="0.012"
                            fullinertia="6.61427e-06 1.89032e-06 5.28738e-06 -3.19807e-07 -5.90717e-09 -1.09945e-07"/>
                  <geom name="moving_finger" class="finger" pos="-.0020689854 -.0594358419 .019"
                        quat=".7015896965 -.7015896965 .0881583678 -.0881583678" size=".0045 .009 .0235"/>
                </body>
              </body>
            </body>
          </body>
        </body>
      </body>
    </body>{objects}
    {goal}
  </worldbody>
  <actuator>
    <position name="shoulder_pan" class="sts3215" joint="shoulder_pan" ctrlrange="-1.91986 1.91986"/>
    <position name="shoulder_lift" class="sts3215" joint="shoulder_lift" ctrlrange="-1.74533 1.74533"/>
    <position name="elbow_flex" class="sts3215" joint="elbow_flex" ctrlrange="-1.69 1.69"/>
    <position name="wrist_flex" class="sts3215" joint="wrist_flex" ctrlrange="-1.65806 1.65806"/>
    <position name="wrist_roll" class="sts3215" joint="wrist_roll" ctrlrange="-2.74385 2.84121"/>
    <position name="gripper" class="sts3215" joint="gripper" ctrlrange="-0.17453 1.74533"
              forcerange="-{force} {force}"/>
  </actuator>
</mujoco>
"""
