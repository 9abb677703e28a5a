"""The wheel overlays the installed axolotl, so what it ships is part of the contract."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution, entry_points
from pathlib import Path
from zipfile import ZipFile

import click
import pytest
from packaging.requirements import Requirement

from axolotl.integrations.protrain.args import ProTrainArgs
from axolotl.integrations.protrain.versions import supported

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = "axolotl/integrations/protrain/"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of this checkout and its wheel, built offline with what is installed."""
    # From a copy: setuptools would ship what it finds in a stale build/ folder.
    source = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    for path in map(Path, found.stdout.splitlines()):
        if (ROOT / path).exists():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, source / path)
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", str(source)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> ZipFile:
    (path,) = built.glob("*.whl")
    return ZipFile(path)


def test_the_sdist_has_what_a_packager_runs_and_reads(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    names = {Path(*Path(name).parts[1:]) for name in tarfile.open(path).getnames()}
    wanted = ["Makefile", "CITATION.cff", "docs/plan.md", "docs/images/paging.svg"]
    wanted += ["examples/demo.py", "tests/conftest.py", "tools/pages.py"]
    assert {*map(Path, wanted)} <= names


def metadata_folder(wheel: ZipFile) -> str:
    (path,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    return path.removesuffix("METADATA")


def metadata(wheel: ZipFile) -> Message:
    return Parser().parsestr(wheel.read(metadata_folder(wheel) + "METADATA").decode())


def test_wheel_ships_this_package_and_nothing_else(wheel: ZipFile) -> None:
    dist_info = metadata_folder(wheel)
    shipped = {name for name in wheel.namelist() if not name.startswith(dist_info)}
    sources = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*")
        if path.suffix in (".py", ".md", ".html") and ".egg-info" not in str(path)
    }
    assert shipped == sources
    assert all(name.startswith(PACKAGE) for name in shipped)


def test_no_init_shadows_axolotl() -> None:
    for folder in ("axolotl", "axolotl/integrations"):
        assert [path.name for path in (SRC / folder).glob("*.py")] == []


def test_wheel_has_the_licence(wheel: ZipFile) -> None:
    licence = wheel.read(metadata_folder(wheel) + "licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"


def test_errors_name_the_versions_that_the_wheel_asks_for(wheel: ZipFile) -> None:
    needed = {*map(Requirement, metadata(wheel).get_all("Requires-Dist"))}
    assert {"axolotl", "torch"} == {*supported()}
    assert needed.issuperset(supported().values())


def test_wheel_has_the_command_and_the_plugin(wheel: ZipFile) -> None:
    parser = ConfigParser()
    parser.read_string(wheel.read(metadata_folder(wheel) + "entry_points.txt").decode())
    command = "axolotl.integrations.protrain.cli:protrain"
    assert dict(parser["axolotl.cli_commands"]) == {"protrain": command}
    assert dict(parser["console_scripts"]) == {"axolotl-protrain": command}
    # Axolotl reads "module:Class" as the "module.Class" of a YAML
    assert dict(parser["axolotl.plugins"]) == {
        "protrain": "axolotl.integrations.protrain:ProTrainPlugin"
    }


def test_wheel_has_the_readme_of_the_integration(wheel: ZipFile) -> None:
    text = wheel.read(PACKAGE + "README.md").decode()
    assert "axolotl.integrations.protrain.ProTrainPlugin" in text
    # each key that it names is one
    for key in re.findall(r"`(protrain_[a-z0-9_]+)`", text):
        assert key in ProTrainArgs.model_fields, key


def test_the_command_is_a_click_group() -> None:
    (command,) = entry_points(group="axolotl.cli_commands", name="protrain")
    assert isinstance(command.load(), click.Group)


def test_json_comes_alone_without_the_logo_of_axolotl() -> None:
    module = "axolotl.integrations.protrain.cli"
    done = subprocess.run(
        [sys.executable, "-m", module, "plan", "nothing.yaml", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert json.loads(done.stdout)["verdict"] == "unsupported"


def test_wheel_is_what_is_installed(wheel: ZipFile) -> None:
    """The editable install and the wheel describe the same distribution."""
    installed, built = distribution("axolotl-protrain").metadata, metadata(wheel)
    for key in ("Name", "Version", "Requires-Python", "Requires-Dist"):
        assert installed.get_all(key) == built.get_all(key)
