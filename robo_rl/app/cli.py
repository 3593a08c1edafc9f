# SPDX-License-Identifier: Apache-2.0
"""The command line: `robo-rl COMMAND ...`, and the same functions behind the files in `launch/`.

Each command takes a YAML file and dotted overrides. Errors that are the user's to mend are printed without a traceback,
exit status 2.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from robo_rl.errors import ConfigError, RoboRLError

COMMANDS = ("train", "offline", "evaluate", "collect", "bench", "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
    """The console command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: robo-rl {{{','.join(COMMANDS)}}} ...\n\nEach command explains itself with --help.")
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "train": train,
        "offline": offline,
        "evaluate": evaluate,
        "collect": collect,
        "bench": bench,
        "doctor": doctor,
    }
    if command not in commands:
        print(f"error: unknown command `{command}`. Known: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    return commands[command](rest)


def train(arguments: Sequence[str] | None = None) -> int:
    """Train in simulation: `train CONFIG.yaml [--seed 3 --env.num-envs 64 ...]` or `train --resume RUN`."""
    # Waiting OpenMP threads spin by default and take the core that the physics needs. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    description = "Train in simulation. With a configuration, --help also lists every field that it has."
    parser = _training_parser("train", description)
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue a run directory; takes nothing else")
    options, overrides, config_path = _parse_training(parser, arguments)
    if options.help:
        return 0

    def run() -> dict[str, Any] | None:
        from robo_rl.app import train_sim
        from robo_rl.config import load

        if options.resume is not None:
            if config_path is not None or overrides or options.run_dir is not None:
                raise ConfigError(
                    "--resume takes a run directory and nothing else: its config.yaml is the configuration."
                )
            config, run_dir = train_sim.load_run_config(options.resume), options.resume
        else:
            path = _required(config_path, "train")
            config = load(train_sim.TrainSimConfig, path, overrides)
            run_dir = options.run_dir or _new_run_dir(path, config.seed)
        if options.dry_run:
            print(train_sim.dry_run(config))
            return None
        print(f"run directory: {run_dir}")
        result = train_sim.train_sim(config, run_dir, options.resume is not None, False if options.plain else None)
        if result["interrupted"]:
            print(f"interrupted; continue with: --resume {run_dir}")
        return result

    return _report(run, "train", arguments)


def offline(arguments: Sequence[str] | None = None) -> int:
    """Train from data: `offline CONFIG.yaml [--demonstrations.episodes 8 ...]`."""
    parser = _training_parser("offline", "Train from demonstrations.")
    options, overrides, config_path = _parse_training(parser, arguments)
    if options.help:
        return 0

    def run() -> dict[str, Any] | None:
        from robo_rl.app import train_offline
        from robo_rl.config import load

        path = _required(config_path, "offline")
        config = load(train_offline.TrainOfflineConfig, path, overrides)
        if options.dry_run:
            print(train_offline.dry_run(config))
            return None
        run_dir = options.run_dir or _new_run_dir(path, config.seed)
        print(f"run directory: {run_dir}")
        return train_offline.train_offline(config, run_dir, False if options.plain else None)

    return _report(run, "offline", arguments)


def evaluate(arguments: Sequence[str] | None = None) -> int:
    """Evaluate an actor: `evaluate RUN [--evaluation.episodes 200]`, `evaluate expert|MODEL.zip --config YAML`."""
    parser = _parser("evaluate", "Evaluate a checkpoint, the scripted expert, or a zip of Stable-Baselines3.")
    parser.add_argument("actor", help="run or checkpoint directory, `expert`, or a zip of Stable-Baselines3")
    parser.add_argument("--config", type=Path, help="YAML whose `env` to use (default: the run's own)")
    parser.add_argument("--out", type=Path, help="where to write result.json and the video (default: RUN/evaluation)")
    options, overrides = _parse(parser, arguments)

    def run() -> dict[str, Any]:
        from robo_rl.app.evaluate import EvaluateConfig
        from robo_rl.app.evaluate import evaluate as run_evaluate
        from robo_rl.config import override
        from robo_rl.tracking.run_dir import write_result

        config = EvaluateConfig(env=_env_of(options), actor=options.actor)
        config = override(config, overrides) if overrides else config
        folder = options.out or _default_out(options.actor, "evaluation")
        return write_result(folder / "result.json", run_evaluate(config, folder))

    return _report(run, "evaluate", arguments)


def collect(arguments: Sequence[str] | None = None) -> int:
    """Collect episodes: `collect expert --config YAML --out DIR [--episodes 100 --successful-only]`."""
    parser = _parser("collect", "Write episodes of an actor to a folder of safetensors and JSON.")
    parser.add_argument("actor", help="run or checkpoint directory, or `expert`")
    parser.add_argument("--config", type=Path, help="YAML whose `env` to use (default: the run's own)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the episodes: a new one, or to go on with")
    options, overrides = _parse(parser, arguments)

    def run() -> dict[str, Any]:
        from robo_rl.app.collect import CollectConfig
        from robo_rl.app.collect import collect as run_collect
        from robo_rl.config import override
        from robo_rl.tracking.run_dir import write_result

        config = CollectConfig(env=_env_of(options), actor=options.actor)
        result = run_collect(override(config, overrides) if overrides else config, options.out)
        return write_result(options.out / "result.json", result)

    return _report(run, "collect", arguments)


def bench(arguments: Sequence[str] | None = None) -> int:
    """Measure speed against peers in the same run: `bench sim ppo [--quick]`."""
    from robo_rl.app import bench as module

    return module.main(list(sys.argv[1:] if arguments is None else arguments))


def doctor(arguments: Sequence[str] | None = None) -> int:
    """Say what this installation can do, and what is missing for the rest."""
    _parse(_parser("doctor", "Check this installation."), arguments)
    from robo_rl.app.doctor import report

    print(report())
    return 0


def _env_of(options: argparse.Namespace) -> Any:
    """The environment to use: from --config, else from the run directory that the actor lies in."""
    from robo_rl.app.train_sim import TrainSimConfig, load_run_config
    from robo_rl.config import load

    if options.config is not None:
        return load(TrainSimConfig, options.config).env
    for folder in (Path(options.actor), *Path(options.actor).parents):
        if (folder / "config.yaml").exists():
            return load_run_config(folder).env
    raise ConfigError(f"`{options.actor}` does not say its environment. Add --config configs/train/NAME.yaml.")


def _default_out(actor: str, name: str) -> Path:
    path = Path(actor)
    return path / name if path.is_dir() else Path("runs") / name / (path.stem or actor)


def _parser(command: str, description: str, first: str = "", add_help: bool = True) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"robo-rl {command} {first}".strip(),
        description=description,
        epilog="Every field of the configuration can be overridden: --seed 3 --env.num-envs 64",
        allow_abbrev=False,
        add_help=add_help,
    )


def _training_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = _parser(command, description, first="CONFIG.yaml", add_help=False)
    parser.add_argument("--run-dir", "--run_dir", type=Path, help="where to write (default: runs/NAME/TIME-sSEED)")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="build everything, print shapes, stop")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live panel")
    return parser


def _parse_training(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str], Path | None]:
    """Our own options, the overrides, and the configuration file. `options.help`: help was asked for and given; with a
    file it goes on to every field of that."""
    options, overrides = _parse(parser, arguments)
    config = _take_config(overrides)
    asked = "--help" in overrides or "-h" in overrides
    if asked:
        parser.print_help()
    options.help = asked and config is None
    return options, overrides, config


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the rest, which overrides fields of the configuration."""
    return parser.parse_known_args(sys.argv[1:] if arguments is None else list(arguments))


def _take_config(overrides: list[str]) -> Path | None:
    """Remove the YAML file from the overrides, wherever it stands among them. (As argparse's positional it would have
    to come first: what follows an option that argparse does not know may be that option's value.)"""
    for i, argument in enumerate(overrides):
        if argument.endswith((".yaml", ".yml")) or (i == 0 and not argument.startswith("-") and "=" not in argument):
            return Path(overrides.pop(i))
    return None


def _new_run_dir(config: Path, seed: int) -> Path:
    return Path("runs") / config.stem / f"{time.strftime('%Y%m%d-%H%M%S')}-s{seed}"


def _required(config: Path | None, folder: str) -> Path:
    if config is None:
        from robo_rl.config import CONFIGS

        known = ", ".join(f"configs/{folder}/{p.name}" for p in sorted((CONFIGS / folder).glob("*.yaml")))
        raise ConfigError(f"Name a configuration: a file of yours, or one that comes with this package: {known}.")
    return config


def _report(run: Callable[[], dict[str, Any] | None], name: str, arguments: Sequence[str] | None) -> int:
    """Run a command, print its result as the last line, and turn the user's errors into messages. `arguments` None:
    those of the process."""
    from robo_rl.tracking.run_dir import commanded

    try:
        with commanded(None if arguments is None else ["robo-rl", name, *arguments]):
            result = run()
    except RoboRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: The disk is full: {error}. Free some space.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if result is not None:
        print(json.dumps(result))
        return 130 if result.get("interrupted") else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
