# SPDX-License-Identifier: Apache-2.0
"""Pictures of many MuJoCo states, fast on a CPU, in one process or several.

What makes software rendering quick: coarse primitives only, no shadows or reflections, and `LP_NUM_THREADS=0`, which
keeps Mesa from starting threads for pictures of 84 pixels; processes use the cores better. EGL where it works, else
OSMesa; `MUJOCO_GL` decides where it is set.

Axes: M pictures' rows, out of N.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from robo_rl.errors import ConfigError, ContractError
from sims.mujoco.physics import FULL
from sims.worker_process import Block

_FLAGS_OFF = ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX", "mjRND_HAZE", "mjRND_FOG")


class Renderer:
    """Draws states of models that share their sizes, in this process. Close it before the interpreter ends."""

    def __init__(self, models: Sequence[mujoco.MjModel], cameras: Sequence[str], height: int, width: int):
        """The camera "" sees the whole model. Raises ConfigError where no OpenGL can be had, saying what was tried."""
        self.models, self.cameras, self.height, self.width = list(models), list(cameras), height, width
        for model in self.models:
            model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        self._gl: Any = _gl_context(width, height)
        self._context: Any = mujoco.MjrContext(self.models[0], mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(self.models[0], maxgeom=self.models[0].ngeom + 10)
        for flag in _FLAGS_OFF:
            self._scene.flags[getattr(mujoco.mjtRndFlag, flag)] = 0
        self._option, self._perturb = mujoco.MjvOption(), mujoco.MjvPerturb()
        self._data = mujoco.MjData(self.models[0])
        self._views = []
        for name in self.cameras:
            view = mujoco.MjvCamera()
            if name:
                view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, self.models[0].camera(name).id
            else:
                mujoco.mjv_defaultFreeCamera(self.models[0], view)
            self._views.append(view)
        self._viewport = mujoco.MjrRect(0, 0, width, height)
        atexit.register(self.close)  # before EGL's own exit handler, which would leave this with a dead context

    def render(self, state: np.ndarray, goal: np.ndarray, variant: np.ndarray) -> np.ndarray:
        """Pictures (M, cameras, height, width, 3) uint8, a view upside down, of states (M, nstate).

        `goal` (M, 3) is where the marker goes, `variant` (M,) each row's index into `models`.
        """
        out = np.empty((len(state), len(self.cameras), self.height, self.width, 3), np.uint8)
        self._gl.make_current()
        for row in range(len(state)):
            model, data = self.models[variant[row]], self._data
            mujoco.mj_setState(model, data, state[row], FULL)
            if model.nmocap:
                data.mocap_pos[0] = goal[row]
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)  # for cameras that follow the centre of mass
            mujoco.mj_camlight(model, data)
            for i, view in enumerate(self._views):
                mujoco.mjv_updateScene(
                    model, data, self._option, self._perturb, view, mujoco.mjtCatBit.mjCAT_ALL, self._scene
                )
                mujoco.mjr_render(self._viewport, self._scene, self._context)
                mujoco.mjr_readPixels(out[row, i], None, self._viewport, self._context)
        return out[:, :, ::-1]  # OpenGL is bottom up

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._gl is not None:
            self._gl.make_current()
            self._context.free()
            self._gl.free()
            self._gl = self._context = None


class RenderPool:
    """The same pictures from several processes over shared memory; bit-identical, and no torch in the workers.

    Processes start by `spawn`: a script that makes one needs the usual `if __name__ == "__main__":`.
    """

    def __init__(
        self, xmls: Sequence[str], cameras: Sequence[str], height: int, width: int, num_rows: int, processes: int
    ):
        model = mujoco.MjModel.from_xml_string(xmls[0])
        self._block = Block(
            {
                "state": ((num_rows, mujoco.mj_stateSize(model, FULL)), "float64"),
                "goal": ((num_rows, 3), "float64"),
                "variant": ((num_rows,), "int64"),
                "pictures": ((num_rows, len(cameras), height, width, 3), "uint8"),
            }
        )
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        atexit.register(self.close)
        for _ in range(processes):
            mine, theirs = spawn.Pipe()
            setup = (tuple(xmls), tuple(cameras), height, width, self._block.name, self._block.fields)
            process = spawn.Process(target=_worker, args=(theirs, *setup), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def render(self, state: np.ndarray, goal: np.ndarray, variant: np.ndarray) -> np.ndarray:
        """See `Renderer.render`; the result is overwritten by the next call."""
        rows = len(state)
        for name, array in (("state", state), ("goal", goal), ("variant", variant)):
            self._block[name][:rows] = array
        workers = min(len(self._pipes), rows)
        bounds = [rows * i // workers for i in range(workers + 1)]
        for pipe, start, stop in zip(self._pipes, bounds, bounds[1:], strict=False):
            pipe.send_bytes(f"{start} {stop}".encode())
        for pipe in self._pipes[:workers]:
            try:
                answer = pipe.recv_bytes()
            except EOFError:
                raise ContractError("A render process died; its last words are on stderr.") from None
            if answer:
                raise ContractError(f"A render process failed: {answer.decode()}")
        return self._block["pictures"][:rows]

    def close(self) -> None:
        atexit.unregister(self.close)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
        self._pipes, self._processes = [], []
        self._block.close()


def _worker(pipe: Any, xmls: tuple, cameras: tuple, height: int, width: int, name: str, fields: dict) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent, which closes its workers
    block = Block(fields, name)
    renderer, problem = None, b""
    try:
        renderer = Renderer([mujoco.MjModel.from_xml_string(xml) for xml in xmls], cameras, height, width)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".encode()
    while True:
        try:
            command = pipe.recv_bytes()
        except EOFError:
            command = b""  # the parent is gone
        if not command:
            break
        if renderer is not None:
            rows = slice(*map(int, command.split()))
            block["pictures"][rows] = renderer.render(block["state"][rows], block["goal"][rows], block["variant"][rows])
        pipe.send_bytes(problem)
    if renderer is not None:
        renderer.close()


def _gl_context(width: int, height: int) -> Any:
    """A current off-screen OpenGL context."""
    os.environ.setdefault("LP_NUM_THREADS", "0")
    name = "cgl" if sys.platform == "darwin" else os.environ.get("MUJOCO_GL", "").lower()
    if name not in ("cgl", "egl", "osmesa"):
        # MuJoCo takes OpenGL's functions from whichever library is loaded, so one process cannot try both.
        probe = "import mujoco.egl; mujoco.egl.GLContext(8, 8).make_current()"
        works = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode == 0
        name = os.environ["MUJOCO_GL"] = "egl" if works else "osmesa"  # render processes inherit the answer
    try:
        context = importlib.import_module(f"mujoco.{name}").GLContext(width, height)
        context.make_current()
    except Exception as error:  # whatever a driver raises
        raise ConfigError(
            f"Cameras need off-screen OpenGL; `{name}` fails with {type(error).__name__}: {error}. "
            "Install libegl1, libgl1-mesa-dri and libosmesa6, or use no cameras."
        ) from error
    return context
