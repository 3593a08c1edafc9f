# SPDX-License-Identifier: Apache-2.0
"""What the layout promises: light imports, honest packages, versions without hosts, configurations in the wheel."""

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("robo_rl", "sims", "policies", "real_robot")

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"blocked: {{name}}")
sys.meta_path.insert(0, Blocked())
import {module}
"""


def existing(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is not None]


@pytest.mark.parametrize(
    "module",
    existing(
        "robo_rl",
        "robo_rl.types",
        "robo_rl.errors",
        "robo_rl.seeding",
        "robo_rl.config",
        "robo_rl.checkpoint",
        "robo_rl.tracking",
        "robo_rl.tracking.panel",
        "robo_rl.tracking.run_dir",
        "robo_rl.tracking.tracker",
        "robo_rl.tracking.video",
        "robo_rl.data.episodes",
        "real_robot",
    ),
)
def test_robot_side_imports_without_torch_and_mujoco(module):
    code = BLOCKED.format(blocked={"torch", "mujoco"}, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in sorted((ROOT / "sims").rglob("*.py"))]
)
def test_simulator_modules_import_without_torch(module):
    module = module.removesuffix(".__init__")
    if module.startswith(("sims.maniskill", "sims.isaac_gym", "sims.sb3")):
        pytest.skip("what they adapt is itself built on torch")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked={"torch"}, module=module)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_packages_are_ours_and_scripts_are_not_packages():
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        assert Path(spec.origin).is_relative_to(ROOT), f"`{name}` comes from {spec.origin}, not from this clone"
    # An __init__.py would make ours shadow ROS 2's package of the same name.
    assert not list(ROOT.glob("launch/__init__.py")) + list(ROOT.glob("configs/**/__init__.py"))


def test_every_script_name_is_free():
    for script in (ROOT / "launch").glob("*.py"):
        assert importlib.util.find_spec(script.stem) is None, f"launch/{script.name} would hide an installed module"


def test_constraints_name_versions_only_and_cover_what_we_ask_for():
    pins = set()
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r'([a-z0-9-]+)==[0-9a-z.]+(; python_version (<|>=) "3\.12")?', line)
            assert match, line
            pins.add(match[1])
    extras = PYPROJECT["project"]["optional-dependencies"]
    asked = PYPROJECT["project"]["dependencies"] + [r for name, rs in extras.items() if name != "ros" for r in rs]
    names = {re.match(r"[A-Za-z0-9-]+", r)[0].lower() for r in asked} - {"robo-rl"}  # type: ignore[index]
    assert names <= pins, f"not in constraints.txt: {sorted(names - pins)}"


def test_all_is_every_extra_that_pip_can_install():
    extras = PYPROJECT["project"]["optional-dependencies"]
    listed = set(re.findall(r"[a-z0-9]+", extras["all"][0].partition("[")[2]))
    assert listed == set(extras) - {"all", "ros"}


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_named_in_a_page_exist(page):
    text = (ROOT / page).read_text()
    rooms = "|".join((*PACKAGES, "launch", "configs", "tests", "docs"))
    named = set(re.findall(rf"(?<![\w/])((?:{rooms})/[\w/.-]*\w\.(?:py|yaml|md|json))(?![\w/])", text))
    assert {p for p in named if not (ROOT / p).exists()} - {"sims/NAME.py", "docs/results/NAME.md"} == set()


def test_every_python_file_names_its_licence():
    for path in (p for room in (*PACKAGES, "launch", "tests") for p in (ROOT / room).rglob("*.py")):
        assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n"), path


def test_nothing_unpickles():
    forbidden = re.compile(r"\b(import pickle\b|pickle\.load|yaml\.load\(|torch\.load\((?![^)]*weights_only=True))")
    for path in (p for room in (*PACKAGES, "launch") for p in (ROOT / room).rglob("*.py")):
        assert not forbidden.search(path.read_text()), path


def test_wheel_holds_packages_and_configs_but_no_tests(tmp_path):
    pytest.importorskip("hatchling")
    from hatchling.builders.wheel import WheelBuilder

    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*PACKAGES, "robo_rl-0.1.0.dist-info"}
    configs = {str(p.relative_to(ROOT / "configs")) for p in (ROOT / "configs").rglob("*.yaml")}
    assert {f"robo_rl/_configs/{c}" for c in configs} <= set(names)
    entry_points = zipfile.ZipFile(wheel).read("robo_rl-0.1.0.dist-info/entry_points.txt").decode()
    assert "robo-rl = robo_rl.app.cli:main" in entry_points
