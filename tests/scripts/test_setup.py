"""The scripts set themselves up: what they install, when, and what they say when they cannot.

They run as they are, in a copy of the tree whose Python only pretends to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SCRIPTS: Final = ("run", "test", "check", "bench")

#: Writes down how it is called, and answers what the environment tells it to.
PYTHON: Final = """#!/bin/sh
echo "python $*" >>"$CALLS"
case "$*" in
*"find_spec('nixl_cu12')"*) exit "${NIXL_MISSING:-0}" ;;
*"find_spec('mooncake')"*) exit "${MOONCAKE_MISSING:-0}" ;;
*libibverbs*) exit "${LIBRARIES_MISSING:-0}" ;;
*"find_spec('torch')"*) exit "${TORCH_MISSING:-0}" ;;
*--report*)
    for word; do [ "$previous" = --report ] && printf '%s' "$PLAN" >"$word"; previous=$word; done ;;
*--dry-run*nixl-cu12* | *--dry-run*mooncake*) exit "${NO_WHEEL:-0}" ;;
"- "*) exit "${NO_UNPACK:-0}" ;;
*"pip install"*) exit "${NO_PIP:-0}" ;;
esac
exit 0
"""
TOOL: Final = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case " $FAILING " in *" $(basename "$0") "*) exit 1 ;; esac
exit 0
"""


class Tree:
    """A copy of the scripts with a pretended virtual environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._calls = directory / "calls"
        shutil.copytree(ROOT / "scripts", directory / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, directory / name)
        bin_directory = directory / ".venv" / "bin"
        bin_directory.mkdir(parents=True)
        for name, text in (
            ("python", PYTHON),
            *((tool, TOOL) for tool in ("kv-coordinator", "ruff", "mypy", "lint-imports")),
        ):
            (bin_directory / name).write_text(text)
            (bin_directory / name).chmod(0o755)

    def script(self, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script to its end."""
        self._calls.write_text("")
        return subprocess.run(
            [self.directory / "scripts" / name, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
            cwd="/",
            env={"PATH": os.environ["PATH"], "CALLS": str(self._calls), **environment},
        )

    @property
    def calls(self) -> list[str]:
        """How Python and the tools were called in the last run."""
        return self._calls.read_text().splitlines()

    @property
    def installed(self) -> list[str]:
        """The extras that were installed in the last run."""
        return [
            call.partition(f"-e {self.directory}")[2] for call in self.calls if f"-e {self.directory}" in call
        ]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize("name", [*SCRIPTS, "_setup", "../.ci/run"])
def test_a_script_is_sound_bash(name: str) -> None:
    path = ROOT / "scripts" / name
    subprocess.run(["/bin/bash", "-n", path], check=True)
    assert os.access(path, os.X_OK) == (name != "_setup")


def test_run_shows_the_demo_with_nixl_and_passes_its_arguments_on(tree: Tree) -> None:
    done = tree.script("run", "--handoffs", "20", "--json", "out file.json")
    assert done.returncode == 0, done.stderr
    assert tree.installed == ["[nixl,torch]"]
    assert tree.calls[-1] == "kv-coordinator demo --backend nixl --handoffs 20 --json out file.json"


@pytest.mark.parametrize("arguments", [("--backend", "loopback"), ("--backend=loopback",)])
def test_loopback_installs_no_native_wheel(tree: Tree, arguments: tuple[str, ...]) -> None:
    done = tree.script("run", *arguments, NIXL_MISSING="1")
    assert done.returncode == 0, done.stderr
    assert tree.installed == ["[torch]"]
    assert not any("nixl" in call for call in tree.calls)
    assert tree.calls[-1] == f"kv-coordinator demo {' '.join(arguments)}"


def test_where_no_nixl_wheel_is_loopback_is_used_and_told(tree: Tree) -> None:
    done = tree.script("run", "--handoffs", "5", NIXL_MISSING="1", NO_WHEEL="1")
    assert done.returncode == 0, done.stderr
    assert "There is no NIXL wheel for this platform" in done.stderr
    assert tree.installed == ["[torch]"]
    assert tree.calls[-1] == "kv-coordinator demo --backend loopback --handoffs 5"


def test_nixl_that_was_asked_for_is_not_replaced(tree: Tree) -> None:
    done = tree.script("run", "--backend", "nixl", NIXL_MISSING="1", NO_WHEEL="1", NO_PIP="1")
    assert done.returncode == 2
    assert "The installation has failed" in done.stderr
    assert not any(call.startswith("kv-coordinator") for call in tree.calls)


def test_everything_is_installed_in_the_pinned_versions(tree: Tree) -> None:
    tree.script("run")
    installs = [call for call in tree.calls if "pip install" in call]
    assert installs
    assert all(f"-c {tree.directory}/constraints.txt" in call for call in installs)


def test_nothing_is_installed_again_until_something_changes(tree: Tree) -> None:
    tree.script("run")
    assert tree.installed
    tree.script("run")
    assert not tree.installed
    with (tree.directory / "constraints.txt").open("a") as file:
        file.write("new==1\n")
    tree.script("run")
    assert tree.installed


def test_an_installation_that_fails_is_tried_again(tree: Tree) -> None:
    assert tree.script("run", NO_PIP="1").returncode == 2
    assert tree.script("run").returncode == 0
    assert tree.installed == ["[nixl,torch]"]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host has an NVIDIA GPU")
def test_a_cuda_torch_is_not_taken_unasked(tree: Tree) -> None:
    cuda = {"TORCH_MISSING": "1", "PLAN": '{"install": [{"metadata": {"name": "nvidia-cudnn-cu13"}}]}'}
    done = tree.script("run", **cuda)
    assert done.returncode == 2
    assert "is a CUDA build of several gigabytes" in done.stderr
    assert "KV_COORDINATOR_TORCH=any" in done.stderr
    assert not tree.installed
    assert tree.script("run", KV_COORDINATOR_TORCH="any", **cuda).returncode == 0
    assert tree.installed == ["[nixl,torch]"]


def test_a_cpu_torch_is_taken(tree: Tree) -> None:
    done = tree.script("run", TORCH_MISSING="1", PLAN='{"install": [{"metadata": {"name": "torch"}}]}')
    assert done.returncode == 0, done.stderr
    assert tree.installed == ["[nixl,torch]"]


def test_check_goes_through_all_checks_and_names_what_failed(tree: Tree) -> None:
    done = tree.script("check", FAILING="mypy lint-imports")
    assert done.returncode == 1
    assert "Failed: mypy; import-linter; " in done.stderr
    tools = [call.split()[0] for call in tree.calls if not call.startswith("python")]
    assert tools == ["ruff", "ruff", "mypy", "lint-imports"]


def test_check_is_content_when_all_is_well(tree: Tree) -> None:
    done = tree.script("check")
    assert done.returncode == 0
    assert done.stderr.endswith("All checks passed.\n")
    assert tree.installed == ["[dev,torch]"]


def test_test_passes_its_arguments_to_pytest(tree: Tree) -> None:
    done = tree.script("test", "-k", "some thing")
    assert done.returncode == 0, done.stderr
    assert tree.calls[-1] == "python -m pytest -n 4 -k some thing"
    assert tree.installed == ["[dev,mooncake,nixl,torch]"]


@pytest.mark.parametrize("name", ["test", "bench"])
def test_engines_that_cannot_be_had_are_left_out_and_told(tree: Tree, name: str) -> None:
    done = tree.script(name, NIXL_MISSING="1", MOONCAKE_MISSING="1", NO_WHEEL="1")
    assert done.returncode == 0, done.stderr
    assert "NIXL is left out" in done.stderr
    assert "Mooncake is left out" in done.stderr
    assert tree.installed == ["[dev,torch]"]


def test_mooncake_that_was_asked_for_is_installed(tree: Tree) -> None:
    done = tree.script("run", "--backend", "mooncake", "--handoffs", "5")
    assert done.returncode == 0, done.stderr
    assert tree.installed == ["[mooncake,torch]"]
    assert not any("nixl" in call for call in tree.calls)
    assert tree.calls[-1] == "kv-coordinator demo --backend mooncake --handoffs 5"


def test_what_mooncake_needs_is_installed_by_root(tree: Tree, tmp_path: Path) -> None:
    path = pretended(
        tmp_path, {"id": "echo 0", "dpkg-query": "exit 1", "apt-get": 'echo "apt-get $*" >>"$CALLS"'}
    )
    done = tree.script("run", "--backend", "mooncake", LIBRARIES_MISSING="1", PATH=path)
    assert done.returncode == 0, done.stderr
    (installed,) = [call for call in tree.calls if call.startswith("apt-get install")]
    assert installed.endswith(" libibverbs1 libnuma1 libcurl4")
    assert tree.installed == ["[mooncake,torch]"]


def test_what_mooncake_needs_is_named_to_others(tree: Tree, tmp_path: Path) -> None:
    """The demo with mooncake cannot be shown then; the tests leave it out."""
    path = pretended(tmp_path, {"id": "echo 1000", "dpkg-query": "exit 1"})
    done = tree.script("run", "--backend", "mooncake", LIBRARIES_MISSING="1", PATH=path)
    assert done.returncode == 2
    assert "please install them: libibverbs1 libnuma1 libcurl4" in done.stderr
    assert not tree.installed
    done = tree.script("test", LIBRARIES_MISSING="1", PATH=path)
    assert done.returncode == 0, done.stderr
    assert "these Debian packages are missing: libibverbs1 libnuma1 libcurl4" in done.stderr
    assert tree.installed == ["[dev,nixl,torch]"]


def pretended(directory: Path, programs: dict[str, str]) -> str:
    """Make programs of shell code; the search path that finds them first."""
    place = directory / "programs"
    place.mkdir()
    for name, code in programs.items():
        (place / name).write_text(f"#!/bin/sh\n{code}\n")
        (place / name).chmod(0o755)
    return f"{place}:{os.environ['PATH']}"


def test_a_host_without_python_is_told_what_to_install(tree: Tree, tmp_path: Path) -> None:
    shutil.rmtree(tree.directory / ".venv")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "cat", "dirname", "flock", "sha256sum"):
        (programs / name).symlink_to(shutil.which(name) or "")
    done = tree.script("run", "--backend", "loopback", PATH=str(programs))
    assert done.returncode == 2
    assert "Python 3.11 is needed" in done.stderr
    assert "apt-get install python3.11" in done.stderr


def test_missing_debian_packages_are_named_to_who_may_not_install_them(tree: Tree, tmp_path: Path) -> None:
    path = pretended(
        tmp_path,
        {
            "id": "echo 1000",
            "dpkg-query": 'for name; do :; done\n[ "$name" = here ] && echo "install ok installed"',
        },
    )
    done = subprocess.run(
        [
            "/bin/bash",
            "-c",
            'source "$0/scripts/_setup"; debian_packages here libmissing1 libmissing2',
            tree.directory,
        ],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": path},
    )
    assert done.returncode == 2
    assert done.stderr == "These Debian packages are needed; please install them: libmissing1 libmissing2\n"


def ci(tree: Tree, sglang_env: str, bound_s: str) -> subprocess.CompletedProcess[str]:
    """Run what CI runs, with scripts of which all but one are content."""
    for name, code in (("check", "echo checked"), ("test", "echo tested"), ("sglang-env", sglang_env)):
        (tree.directory / "scripts" / name).write_text(f"#!/bin/sh\n{code}\n")
    shutil.copytree(ROOT / ".ci", tree.directory / ".ci")
    return subprocess.run(
        [tree.directory / ".ci" / "run"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={"PATH": os.environ["PATH"], "KV_COORDINATOR_SGLANG_S": bound_s},
    )


@pytest.mark.parametrize(("broken", "code"), [("0", 0), ("1", 2)])
def test_sources_of_vllm_that_cannot_be_unpacked_are_no_environment(
    tree: Tree, tmp_path: Path, broken: str, code: int
) -> None:
    place = tmp_path / "vllm"
    (place / "bin").mkdir(parents=True)
    shutil.copy(tree.directory / ".venv" / "bin" / "python", place / "bin" / "python")
    settings = {"TMPDIR": str(tmp_path), "KV_COORDINATOR_VLLM_ENV": str(place), "NO_UNPACK": broken}
    done = tree.script("vllm-env", **settings)
    assert done.returncode == code, done.stderr
    assert (place / ".installed").exists() == (code == 0)
    assert not list(tmp_path.glob("tmp.*"))


def test_ci_makes_the_environment_of_sglang_and_does_not_speak_of_it(tree: Tree) -> None:
    done = ci(tree, "echo /some/python; echo Installing >&2", "30")
    assert (done.returncode, done.stdout, done.stderr) == (0, "checked\ntested\n", "")


@pytest.mark.parametrize(
    ("sglang_env", "why"),
    [("echo Installing >&2; sleep 60", "Installing"), ("echo no; echo 'No pip.' >&2; exit 2", "No pip.")],
)
def test_ci_goes_on_where_sglang_cannot_be_had_and_says_so_in_a_line(
    tree: Tree, sglang_env: str, why: str
) -> None:
    done = ci(tree, sglang_env, "1")
    assert done.returncode == 0, done.stderr
    checked, told, tested = done.stdout.splitlines()
    assert (checked, tested) == ("checked", "tested")
    assert told == (
        "The tests against the real SGLang are skipped, for its environment cannot be made in time: " + why
    )
