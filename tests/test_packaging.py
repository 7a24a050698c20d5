"""The project's files: one import namespace, one direction of imports, honest versions, whole wheels."""

from __future__ import annotations

import ast
import glob
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "trtl_rl"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# From the bottom up: each part imports itself and what stands before it.
PARTS = ("core", "engines", "trainer", "cli")


def project() -> dict[str, object]:
    """The [project] table of pyproject.toml."""
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def modules() -> dict[str, Path]:
    """Every module by its dotted name, found through the links as an installer finds it."""
    found = {}
    for folder in (PACKAGE, *(PACKAGE / part for part in PARTS[1:])):
        for path in folder.rglob("*.py"):
            name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            found[name.removesuffix(".__init__")] = path
    return found


def part_of(module: str) -> str:
    """Which of PARTS a module of trtl_rl belongs to."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in PARTS else "core"


def imported(source: str, module: str, is_package: bool) -> set[str]:
    """Names of trtl_rl that a source imports anywhere in it, functions included; relative ones made absolute."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, base] if base else above)
            names.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
    return {name for name in names if name.split(".")[0] == "trtl_rl"}


def wrong_imports(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a module imports from a part above its own."""
    own = PARTS.index(part_of(module))
    return sorted(n for n in imported(source, module, is_package) if PARTS.index(part_of(n)) > own)


def test_imports_run_one_way() -> None:
    found = modules()
    assert "trtl_rl.engines.engine" in found
    wrong = {
        name: bad
        for name, path in found.items()
        # The package itself hands out Trainer; the test below shows that it does so only on demand.
        if name != "trtl_rl" and (bad := wrong_imports(name, path.read_text(), path.name == "__init__.py"))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("trtl_rl.rollout", "from trtl_rl.engines import engine"),
        ("trtl_rl.model.bind", "def f():\n    from trtl_rl import trainer"),
        ("trtl_rl.engines.host", "import trtl_rl.trainer.loop as loop"),
        ("trtl_rl.trainer.loop", "from ..cli.main import app"),
        ("trtl_rl.config", "from .engines.engine import RolloutEngine"),
    ],
)
def test_import_in_the_wrong_direction_is_seen(module: str, source: str) -> None:
    assert wrong_imports(module, source) != []


def test_importing_the_package_loads_no_torch() -> None:
    heavy = {"torch", "transformers", "datasets", "pydantic", "trtl_rl.trainer"}
    code = f"import sys, trtl_rl; print(trtl_rl.__version__, *({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", shown.stdout), shown.stdout


def test_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import trtl_rl

    with pytest.raises(AttributeError, match="Trainr"):
        _ = trtl_rl.Trainr
    assert {"Trainer", "TrainerConfig", "__version__"} <= set(dir(trtl_rl))


def test_files_stay_short_enough_to_read() -> None:
    paths = [*modules().values(), *ROOT.glob("tests/*.py"), *ROOT.glob("bench/*.py"), *ROOT.glob("examples/*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: length for name, length in lengths.items() if length >= 450} == {}


def pins() -> list[Requirement]:
    """The lines of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned(python: str) -> dict[str, str]:
    """Version by name for one Python version on Linux; fails when a package has two."""
    versions: dict[str, str] = {}
    for pin in pins():
        if pin.marker is None or pin.marker.evaluate({"python_version": python, "python_full_version": f"{python}.0"}):
            (only,) = pin.specifier
            assert only.operator == "==" and "*" not in only.version, f"{pin} is not exact"
            name = canonicalize_name(pin.name)
            assert name not in versions, f"{name} has two versions for Python {python}"
            versions[name] = only.version
    return versions


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_lie_within_the_declared_ranges(python: str) -> None:
    table = project()
    assert python in SpecifierSet(str(table["requires-python"]))
    versions = pinned(python)
    extras = table["optional-dependencies"]
    needed = [*table["dependencies"], *extras["dev"], *extras["math"], *extras["report"], *extras["reasoning-gym"]]  # type: ignore[index,misc]
    for requirement in map(Requirement, needed):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} has no pin for Python {python}"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}, but the pin is {version}"


def test_no_file_names_a_package_index() -> None:
    for name in ("constraints.txt", "pyproject.toml", "Makefile", ".ci/run"):
        assert not re.search(r"https?://|index-url|find-links", (ROOT / name).read_text()), name


def built(source: Path, out: Path, kind: str) -> Path:
    """Build ``wheel`` or ``sdist`` from ``source`` with this environment's setuptools; returns the file."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


def contents(wheel: Path) -> dict[str, bytes]:
    """File by name in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_wheel_is_whole_and_equals_the_one_built_from_the_sdist(tmp_path: Path) -> None:
    # From a copy without build leftovers: setuptools would put stale files of ./build into the wheel.
    leave = shutil.ignore_patterns(".git", ".venv", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=leave)
    wheel = contents(built(copy, tmp_path / "wheel", "wheel"))

    for name, path in modules().items():
        assert path.relative_to(ROOT).as_posix() in wheel, f"{name} is not in the wheel"
    kinds = {".yaml", ".json", ".jsonl", ".safetensors", ".typed", ".j2"}
    found = map(
        Path, glob.glob(f"{PACKAGE}/**", recursive=True)
    )  # unlike rglob it follows the links to the other folders
    data = [path for path in found if (path.suffix or path.name) in kinds]
    for path in data:
        assert wheel.get(path.relative_to(ROOT).as_posix()) == path.read_bytes(), f"{path} is not in the wheel"
    assert {path.suffix for path in data} >= {".yaml", ".json", ".safetensors", ".j2"}
    assert {name.split("/")[0] for name in wheel} == {"trtl_rl", f"trtl_rl-{project_version()}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel)

    sdist = built(copy, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        assert not [member.name for member in members if member.issym() or member.islnk()]
        names = {member.name.split("/", 1)[-1] for member in members}
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert {"Makefile", "constraints.txt", "LICENSE", "tests/conftest.py", "trtl_rl/engines/engine.py"} <= names
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert contents(built(unpacked, tmp_path / "again", "wheel")) == wheel


def project_version() -> str:
    """The version that the package states."""
    import trtl_rl

    return trtl_rl.__version__
