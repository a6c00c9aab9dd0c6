"""Every code block of the README does what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
PROGRAMS = [code for kind, code in BLOCKS if kind == "python"]
SESSIONS = [text for kind, text in BLOCKS if kind == "console"]
EXPECTED = {
    "class Doubler": "[40, 41]\n",
    "class Shards": "[1999999000000.0, 5999999000000.0]\nmissing: (0, 1)\n",
    "class Picky": "RemoteTraceback\n[7, 7]\n",
    "class Greeter": "['rank 0 of 2 greets everybody', 'rank 1 of 2 greets everybody']\n",
    "BlockingEngine(": "",
    "Engine.from_pretrained": "",
}


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as rays:  # the logs of a Ray cluster stay
        return subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "RAY_TMPDIR": rays},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )


def test_every_block_is_a_program_or_a_session() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "console"}
    assert len(PROGRAMS) == len(EXPECTED)


@pytest.mark.parametrize("code", PROGRAMS, ids=lambda code: next(name for name in EXPECTED if name in code))
def test_a_program_of_the_readme_prints_what_it_says(code: str, tmp_path: Path) -> None:
    if "RayExecutor" in code and find_spec("ray") is None:
        pytest.skip("needs the extra: pip install 'mpexec[ray]'")
    script = tmp_path / "program.py"
    script.write_text(code)
    ended = run(sys.executable, str(script), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "DeprecationWarning" not in ended.stderr
    expected = next(text for name, text in EXPECTED.items() if name in code)
    assert expected.splitlines() == [] or ended.stdout.endswith(expected.splitlines()[-1] + "\n"), ended.stdout
    for line in expected.splitlines():
        assert line in ended.stdout
    assert ended.stdout.strip(), "it prints something"


def test_the_output_of_a_dying_rank_is_the_real_one() -> None:
    session = next(text for text in SESSIONS if "rank_dies" in text)
    command, _, shown = session.partition("\n")
    assert command == "$ python examples/rank_dies.py"
    ended = run(sys.executable, "examples/rank_dies.py")
    assert ended.returncode == 0
    assert ended.stderr == ""

    def normal(text: str) -> set[str]:
        return set(re.sub(r"pid \d+", "pid N", text).splitlines())

    # Whether the kernel's count of memory kills grew meanwhile is this machine's business.
    assert normal(ended.stdout) == normal(shown) or "memory kills grew" in ended.stdout


def test_the_commands_of_the_readme_run() -> None:
    commands = [line[2:] for text in SESSIONS for line in text.splitlines() if line.startswith("$ ")]
    tools = [command.split()[0] for command in commands if command.startswith("tools/")]
    assert tools == ["tools/demo", "tools/test"]
    for tool in tools:  # running the tests inside the tests would not end; the demo is the next command
        assert (ROOT / tool).stat().st_mode & 0o111
    for command in commands:
        if command.startswith("mpexec generate"):
            ended = run(sys.executable, "-m", "mpexec", "generate", "--max-new-tokens", "8", "In the beginning")
            assert ended.returncode == 0, ended.stderr
            assert len(ended.stdout.split()) >= 3
        elif command.startswith("mpexec run"):
            ended = run(sys.executable, "-m", *shlex.split(command))
            assert ended.returncode == 0, ended.stderr
            assert sorted(ended.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
        elif command.startswith("mpexec"):
            ended = run(sys.executable, "-m", *command.split())
            assert ended.returncode == 0, ended.stderr
            assert "kjv" in ended.stdout
