# SPDX-License-Identifier: Apache-2.0
"""One page on what this installation can do, and the command that mends what it cannot."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

PACKAGES = {  # distribution: what it is for
    "torch": "train",
    "mujoco": "train",
    "gymnasium": "train",
    "tensorboard": "train",
    "av": "train",
    "mani-skill": "maniskill",
    "stable-baselines3": "sb3",
}


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    found: str
    mend: str = ""


def checks() -> list[Check]:
    """Everything that is looked at, in order of importance."""
    out = [
        Check(
            "Python",
            (3, 11) <= sys.version_info[:2] <= (3, 12),
            platform.python_version(),
            "Use Python 3.12 or 3.11: make PYTHON=python3.12 test",
        ),
        Check("cores", True, str(os.cpu_count())),
    ]
    for package, extra in PACKAGES.items():
        try:
            out.append(Check(package, True, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            out.append(Check(package, False, "missing", f"pip install -c constraints.txt -e '.[{extra}]'"))
    out.append(_try("rendering (EGL or OSMesa)", _render, "apt-get install libegl1 libgl1-mesa-dri libosmesa6"))
    out.append(_try("tabletop steps", _step, "see the error"))
    ffmpeg = shutil.which("ffmpeg")
    out.append(Check("ffmpeg", ffmpeg is not None, ffmpeg or "missing", "apt-get install ffmpeg (only for players)"))
    return out


def report() -> str:
    """The page as text; each line that is not well says what to do."""
    lines = []
    for check in checks():
        lines.append(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:28} {check.found}")
        if not check.ok:
            lines.append(f"      -> {check.mend}")
    return "\n".join(lines)


def _try(name: str, attempt: Callable[[], str], mend: str) -> Check:
    try:
        return Check(name, True, attempt())
    except Exception as error:  # whatever goes wrong is the finding
        return Check(name, False, f"{type(error).__name__}: {error}".splitlines()[0][:100], mend)


def _render() -> str:
    # In a process of its own: a broken OpenGL driver may take the process with it.
    code = (
        "import sims, torch\n"
        "from sims.mujoco.tabletop import TabletopConfig\n"
        "env = sims.make(TabletopConfig(num_envs=1))\n"
        "picture = env.render(); env.close()\n"
        "assert picture.std() > 1, 'the picture is empty'\n"
        "print(picture.shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return f"one picture {done.stdout.strip()}"


def _step() -> str:
    import time

    import torch

    import sims
    from sims.mujoco.tabletop import TabletopConfig

    env = sims.make(TabletopConfig(num_envs=64))
    env.reset(seed=0)
    action = torch.zeros(64, 6)
    env.step(action)
    start = time.perf_counter()
    for _ in range(20):
        env.step(action)
    rate = 64 * 20 / (time.perf_counter() - start)
    env.close()
    return f"{rate:,.0f} steps/s at 64 environments"
