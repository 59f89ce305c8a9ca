"""What a user installs: the wheel, the core without extras, the command line's first words."""

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from attnloom.cli.main import main

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "attnloom" / "backends" / "cpu" / "kernels"
PAGE = ROOT / "attnloom" / "plots"


def _run(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(args, capture_output=True, text=True, cwd=ROOT, check=False, **options)


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> list[str]:
    """Paths inside a wheel built from a copy of the sources."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    tracked = _run("git", "ls-files", "-co", "--exclude-standard").stdout.split("\n")
    if tracked == [""]:
        pytest.skip("needs a git checkout to know which files belong to the project")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_the_package_and_nothing_else(wheel_names):
    assert {name.split("/")[0].split("-")[0] for name in wheel_names} == {"attnloom"}


def test_the_wheel_holds_every_module_every_kernel_source_and_the_page(wheel_names):
    package = ROOT / "attnloom"
    wanted = [p for p in package.rglob("*.py") if "__pycache__" not in p.parts]
    kernels = [p for p in KERNELS.iterdir() if p.suffix in (".h", ".cpp")]
    page = [p for p in PAGE.iterdir() if p.suffix in (".css", ".js")]
    assert kernels and page
    missing = {
        p.relative_to(ROOT).as_posix() for p in [*wanted, *kernels, *page, package / "py.typed"]
    } - set(wheel_names)
    assert not missing


def test_the_core_imports_without_the_extras():
    code = (
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'hypothesis', 'pytest'): sys.modules[name] = None\n"
        "import attnloom\n"
        "attnloom.flex_attention, attnloom.create_block_mask, attnloom.BlockMask\n"
    )
    done = _run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_the_demo_without_its_extras_says_how_to_get_them(monkeypatch, capsys):
    real, missing = importlib.util.find_spec, ("rich", "matplotlib")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in missing else real(name, *a)
    )
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "attnloom demo needs rich and matplotlib, which the core of attnloom does not install. "
        "Run: pip install 'attnloom[demo]'\n"
    )


def test_the_command_line_lists_its_commands():
    done = _run(sys.executable, "-m", "attnloom.cli.main", "--help")
    assert done.returncode == 0
    assert re.search(r"^ +demo +train a small language model", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seconds", "0", "must be above 0, got 0"),
        ("--steps", "-3", "must be above 0, got -3"),
        ("--steps", "many", "invalid int value: 'many'"),
    ],
)
def test_the_demo_refuses_options_that_mean_nothing(option, value, message, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["demo", option, value])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_no_module_imports_torch_flex_attention():
    """The library is an implementation of its own: torch's is for tests and benchmarks."""
    importing = re.compile(r"^\s*(from|import)\s+torch\.(nn\.attention|_higher_order_ops)", re.M)
    guilty = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "attnloom").rglob("*.py")
        if importing.search(path.read_text())
    ]
    assert not guilty


def test_the_readme_example_runs():
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {"__name__": "__main__"}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == tuple(names[size] for size in "BHSD")
    for leaf in ("query", "key", "value", "bias"):
        grad = names[leaf].grad
        assert grad.isfinite().all() and grad.abs().max() > 0
