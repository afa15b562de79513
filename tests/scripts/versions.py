"""The tests of cache, generation and methods under the oldest and the newest transformers that
`pyproject.toml` admits.

    python tests/scripts/versions.py            # both
    python tests/scripts/versions.py 5.4.0      # or those that are named

Each version goes into a virtual environment of its own, on top of the packages of this one.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import requires
from pathlib import Path

TESTS = """
aligners/test_table_aligner cache/test_cache cache/test_relative methods/test_methods
models/test_models models/test_rotation_trial streaming/test_generation streaming/test_text
"""
TESTS = [f"tests/{name}.py" for name in TESTS.split()]


def admitted() -> str:
    """The requirement, such as `transformers<6,>=5.0`."""
    return next(r for r in requires("kvalign") or () if r.startswith("transformers"))


def oldest() -> str:
    found = re.search(r">=([\d.]+)", admitted())
    assert found, admitted()
    return f"transformers=={found[1]}"


def run(requirement: str, folder: Path) -> tuple[str, str, bool]:
    """The version installed, the last line of pytest, and whether all passed."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    below, of_folder = sysconfig.get_path("purelib"), dict(base=str(folder))
    site = Path(sysconfig.get_path("purelib", "venv", of_folder))
    (site / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    install = [python, "-m", "pip", "install", "--quiet", "--upgrade", requirement]
    subprocess.run(install, check=True, capture_output=True)
    ask = "import transformers; print(transformers.__version__)"
    version = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    test = [python, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", *TESTS]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # two would thrash
    done = subprocess.run(test, capture_output=True, text=True, env=one_thread)
    lines = done.stdout.splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(line, file=sys.stderr)
    return version.stdout.strip(), lines[-1] if lines else done.stderr, done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("versions", nargs="*", help="of transformers; default: oldest and newest")
    names = parser.parse_args().versions
    wanted = [f"transformers=={name}" for name in names] or [oldest(), admitted()]
    all_passed = True
    for requirement in wanted:
        with tempfile.TemporaryDirectory() as folder:
            version, line, passed = run(requirement, Path(folder))
        print(f"transformers {version}: {line}", flush=True)
        all_passed &= passed
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
