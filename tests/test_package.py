"""The package as a newcomer meets it: what it imports, what the install files promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
THEORY = ["tradeoff", "bounds", "priors", "stats", "mechanisms", "games", "tables", "camouflage", "constructions"]

# Refuses every public module that is neither in the standard library nor named on the command line.
REFUSE = """
import sys
allowed = set(sys.stdlib_module_names) | set(sys.argv[1].split(","))
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed and not name.startswith("_"):
            raise ModuleNotFoundError(f"{name} is not installed in this test")
sys.meta_path.insert(0, Refuse())
"""


def run_with_only(modules, code):
    command = [sys.executable, "-c", REFUSE + code, ",".join(["memorization", *modules])]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_theory_runs_on_numpy_and_scipy_alone():
    imports = "\n".join(f"import memorization.{name}" for name in THEORY)
    use = """
from memorization import bounds, tradeoff
print(bounds.extraction_bound(tradeoff.PureDP(1.0), 0.01), bounds.extraction_bound(tradeoff.GaussianDP(1.0), 0.01))
"""
    done = run_with_only(["numpy", "scipy"], imports + use)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0.0271828")


def test_import_of_the_package_itself_needs_nothing():
    done = run_with_only([], "import memorization; print(memorization.__version__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == PROJECT["version"]


@pytest.mark.parametrize("name", THEORY)
def test_theory_modules_do_not_import_what_they_rarely_need(name):
    heavy = (
        "{'torch', 'transformers', 'dp_accounting', 'sklearn', 'scipy.stats', 'scipy.optimize', 'matplotlib', 'yaml'}"
    )
    code = f"import sys, memorization.{name}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "code",
    [
        "from memorization import ledger; ledger.claims()",
        "from memorization.tradeoff import dp_sgd; dp_sgd(1.0, 0.01, 10)",
    ],
)
def test_a_missing_extra_is_named(code):
    done = run_with_only(["numpy", "scipy"], code)
    assert done.returncode == 1 and "ImportError" in done.stderr
    assert re.search(r'pip install "memorization\[\w+\]"', done.stderr)


def requirement_names(requirements):
    return {re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower() for requirement in requirements}


def test_base_install_is_numpy_and_scipy():
    assert requirement_names(PROJECT["dependencies"]) == {"numpy", "scipy"}


def test_conda_environment_installs_the_projects_extras():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (python,) = (item for item in environment["dependencies"] if isinstance(item, str) and item.startswith("python"))
    version = tuple(int(part) for part in re.search(r"[\d.]+", python).group().split("."))
    least = tuple(int(part) for part in re.search(r"[\d.]+", PROJECT["requires-python"]).group().split("."))
    assert version >= least
    (pip,) = (item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    (line,) = pip  # nothing besides the project itself, so that no version can drift apart
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", line).group(1).split(",")
    assert set(extras) <= PROJECT["optional-dependencies"].keys() and {"book", "test"} <= set(extras)


def test_versions_that_move_the_pages_are_locked():
    locked = {line.split("==")[0] for line in PROJECT["optional-dependencies"]["book"] if "==" in line}
    assert {"jupyter-book", "sphinx", "sphinx-book-theme", "sphinx-proof", "myst-nb", "jupytext"} <= locked


def test_the_readme_has_two_commands_and_ci_runs_the_second():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"<!-- (\w+) command -->\n```bash\n(.+?)\n```", readme)
    assert [name for name, _ in commands] == ["book", "test"]
    for _, command in commands:
        (extra,) = re.findall(r'pip install -e "\.\[(\w+)\]"', command)
        assert extra in PROJECT["optional-dependencies"]
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text()
