# SPDX-License-Identifier: Apache-2.0
"""The run directory: what was run, with what, and what came out. Needs no torch."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robo_rl.errors import ConfigError
from robo_rl.files import write_whole

PACKAGES = ("robo-rl", "torch", "numpy", "mujoco", "gymnasium", "mani-skill", "sapien", "stable-baselines3")


@dataclass(frozen=True)
class RunDir:
    """A directory with config.yaml, command.txt and versions.json; result.json once the run has ended."""

    path: Path

    @staticmethod
    def create(path: Path, config: str, resume: bool = False) -> RunDir:
        """Make the directory and record configuration (YAML text), command line and versions.

        Raises:
            ConfigError: it is a file; or it already holds something and `resume` is False; or there is none to resume.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"The run directory `{path}` is a file. Choose another --run-dir.")
        if resume and not path.exists():
            raise ConfigError(
                f"There is no run directory `{path}` to resume. Give one that an earlier run has written."
            )
        if not resume:
            if path.exists() and any(path.iterdir()):
                raise ConfigError(
                    f"`{path}` is not empty. Choose another --run-dir, or continue it with --resume {path}."
                )
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.yaml").write_text(config)
            (path / "command.txt").write_text(command() + "\n")
        (path / "versions.json").write_text(json.dumps(versions(), indent=1))
        return RunDir(path)

    def write_result(self, result: dict[str, Any]) -> dict[str, Any]:
        """Write result.json; see `write_result`."""
        return write_result(self.path / "result.json", result)


def write_result(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Add command and versions to a result, write it whole or not at all, and return what was written."""
    result = to_json(result | {"command": command(), "versions": versions()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1))
    return result


def to_json(value: Any) -> Any:
    """`value` with None for NaN and infinities: JSON has no such numbers, and strict readers refuse the whole file."""
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def command() -> str:
    """The command line of this process."""
    return shlex.join(
        ["python" if sys.argv[0].endswith(".py") else "robo-rl", *sys.argv[sys.argv[0].endswith("robo-rl") :]]
    )


def versions() -> dict[str, str]:
    """Versions of everything that may change a number, and the commit where there is one."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "HEAD")
    if commit:
        found["commit"] = commit + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    return found


def _git(*arguments: str) -> str:
    """git's answer about the folder that this package lies in; empty where there is no git."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
