"""What a rank's Python imports before the script: the script cannot tell, and its end is quick where nobody can."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from mpexec.launcher import startup
from mpexec.processes.environment import apply_changes

Write = Callable[..., str]


class Done(NamedTuple):
    """How a command ended."""

    stdout: str
    stderr: str
    code: int


def without_addresses(text: str) -> str:
    """The text with all memory addresses alike."""
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def run_both(*args: str, cwd: Path | None = None, **env: str | None) -> tuple[Done, Done]:
    """Run `python -u ARGS` plainly, and with our module, at the same time."""
    plain = apply_changes(os.environ, env)
    ours = dict(plain)
    startup.add_to(ours)
    started = [
        subprocess.Popen(
            [sys.executable, "-u", *args], env=environ, cwd=cwd, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for environ in (plain, ours)
    ]  # fmt: skip
    one, other = (
        Done(*map(without_addresses, process.communicate(timeout=60)), process.returncode) for process in started
    )
    return one, other


def same(*args: str, cwd: Path | None = None, **env: str | None) -> Done:
    """The end of the command, which is the same in both ways."""
    plain, ours = run_both(*args, cwd=cwd, **env)
    assert ours == plain
    return ours


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file below the test's folder, and gives its path."""

    def write(content: str, name: str = "script.py", encoding: str = "utf-8") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding=encoding)
        return str(path)

    return write


FACTS = '''# -*- coding: latin-1 -*-
"""The text of the script."""
import sys
print(sorted(sys.modules), sorted(globals()), sys.argv, sys.orig_argv, sys.path, sorted(sys.path_importer_cache))
print(__name__, __file__, __doc__, __package__, type(__loader__), __builtins__ is sys.modules["builtins"])
print(None if __spec__ is None else __spec__.name, sys.flags, len("é"), sys.stdout.write_through)

import gc, inspect, os
def function():
    return "its source"
print(inspect.getsource(function), len(inspect.stack()), sorted(os.environ.items()))
print(sys.modules["__main__"].function is function, gc.isenabled(), gc.get_freeze_count(), gc.get_threshold())
'''


@pytest.mark.parametrize(
    "env", [{}, {"PYTHONPATH": None}, {"PYTHONPATH": ":/no/such/folder:."}, {"PYTHONSAFEPATH": "1"}]
)
def test_a_script_finds_everything_as_always(write: Write, env: dict[str, str | None]) -> None:
    assert "its source" in same(write(FACTS, encoding="latin-1"), "a", "-m", **env).stdout


def test_modules_folders_and_zip_files_find_everything_as_always(write: Write, tmp_path: Path) -> None:
    write("print('imported', __name__)", "pkg/__init__.py")
    write(FACTS, "pkg/__main__.py", encoding="latin-1")
    write(FACTS, "pkg/mod.py", encoding="latin-1")
    with zipfile.ZipFile(tmp_path / "zipped.pyz", "w") as file:
        file.writestr("__main__.py", FACTS.replace("latin-1", "utf-8"))
    for args in (["-m", "pkg", "a"], ["-m", "pkg.mod"], ["pkg", "a"], ["zipped.pyz"], ["./pkg/mod.py"]):
        assert "its source" in same(*args, cwd=tmp_path).stdout


def test_multiprocessing_finds_the_main_module_as_always(write: Write) -> None:
    body = """
import multiprocessing, os
class Mine:
    def __init__(self, text):
        self.text = text
def answer(connection):
    got = connection.recv()
    connection.send([Mine(got.text + " and back"), type(got).__module__, os.environ.get("PYTHONPATH")])
if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        here, there = context.Pipe()
        process = context.Process(target=answer, args=(there,))
        process.start()
        here.send(Mine("there"))
        got, module, path = here.recv()
        process.join()
        print(isinstance(got, Mine), got.text, module, path, process.exitcode)
"""
    done = same(write(body))
    assert done.stdout.count("True there and back __mp_main__") == 2


FROM_ATEXIT = "import atexit, os, sys, threading, time\n"
ENDINGS = {
    "x = (": 1,
    "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('chained') from error": 1,
    "def f():\n    raise KeyError('deep')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()": 1,
    "import sys\nsys.excepthook = lambda *told: print('mine', told[1])\nraise ValueError('x')": 1,
    "raise ExceptionGroup('two', [ValueError(1), KeyError(2)])": 1,
    "raise KeyboardInterrupt": -2,
    "import os\nos.kill(os.getpid(), 2)": -2,
    "raise SystemExit": 0,
    "raise SystemExit('words')": 1,
    "raise SystemExit([1])": 1,
    "raise SystemExit(259)": 3,
    "exit(True)": 1,
    "import os\nos._exit(5)": 5,
    "import os\nos.abort()": -6,
    FROM_ATEXIT
    + "atexit.register(print, 'last')\nthreading.Timer(0.1, print, ['thread']).start()\nraise ValueError": 1,
    FROM_ATEXIT + "atexit.register(sys.stdout.write, 'no newline')\nsys.exit(4)": 4,
    FROM_ATEXIT + "atexit.register(os._exit, 9)\nraise ValueError('late failure counts')": 9,
    FROM_ATEXIT + "atexit.register(lambda: 1 / 0)\nsys.exit(3)": 3,
    FROM_ATEXIT + "atexit._clear()\nraise ValueError": 1,
    "import warnings\nwarnings.warn('level', stacklevel=2)\nraise ValueError": 1,
}


@pytest.mark.parametrize("body", ENDINGS)
def test_a_script_ends_as_always(write: Write, body: str) -> None:
    assert same(write(body)).code == ENDINGS[body]


def test_what_cannot_be_run_is_told_as_always(write: Write, tmp_path: Path) -> None:
    write("", "pkg/__init__.py")
    write("1 / 0", "pkg/bad.py")
    for args in (["-m", "no_such"], ["-m", "pkg.no_such"], ["-m", "pkg"], ["-m", "pkg.bad"], ["pkg"], ["no_such.py"]):
        done = same(*args, cwd=tmp_path)
        assert done.code in (1, 2)
        assert "sitecustomize" not in done.stderr


def test_the_users_own_sitecustomize_is_imported(write: Write, tmp_path: Path) -> None:
    script = write("import sys\nprint(sys.modules['sitecustomize'].__file__)")
    write("print('mine')", "own/sitecustomize.py")
    write("import no_such_module", "bad/sitecustomize.py")
    own, bad = str(tmp_path / "own"), str(tmp_path / "bad")
    assert same(script, PYTHONPATH=own).stdout == f"mine\n{own}/sitecustomize.py\n"
    assert "no_such_module" in same(script, PYTHONPATH=bad).stderr


FINALIZED = """
import sys
from pathlib import Path
class Loud:
    def __del__(self, print=print):
        print("finalized")
class Cycle:
    pass
cycle = Cycle()
cycle.itself = cycle
"""


def test_what_has_a_finalizer_is_finalized_also_in_a_cycle(write: Write, tmp_path: Path) -> None:
    script = write(FINALIZED + "cycle.loud = Loud()\nraise ValueError")
    assert same(script).stdout == "finalized\n"
    out = tmp_path / "out"
    script = write(FINALIZED + f"cycle.file = open({str(out)!r}, 'a')\ncycle.file.write('kept ')\nraise ValueError")
    same(script)
    assert out.read_text() == "kept kept "


# The callback comes when `sys.modules` is emptied, long after the last function of `atexit`.
TELL_FROZEN = """
import gc, os, sys, types, weakref
class Thing:
    pass
module = sys.modules["told"] = types.ModuleType("told")
module.thing = Thing()
def tell(_, write=os.write, frozen=gc.get_freeze_count, before=gc.get_freeze_count()):
    write(1, b"frozen" if frozen() > before else b"collected")
module.tells = weakref.ref(module.thing, tell)
distributed = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.__file__ = "/lib/torch/__init__.py"
def suspended(file):
    found = {}
    exec(compile("def sample():\\n    yield 1", file, "exec"), found)
    sampler = found["sample"]()
    next(sampler)
    return sampler
del module
"""
QUICK = {
    "raise ValueError": "frozen",
    "raise KeyboardInterrupt": "frozen",
    "distributed.is_initialized = lambda: True\nsys.exit(3)": "frozen",
    "distributed.is_initialized = lambda: False\nsys.exit(3)": "collected",
    "sys.exit(3)": "collected",
    "": "collected",
    "held = suspended('/lib/torch/utils/data/sampler.py')\nraise ValueError": "frozen",
    "held = suspended('/lib/torchmine/sampler.py')\nraise ValueError": "collected",
    "held = open('/dev/null')\nraise ValueError": "collected",
    "class Odd(type):\n    __hash__ = None\nodd = Odd('odd', (), {})()\nraise ValueError": "collected",
}


@pytest.mark.parametrize("body", QUICK)
def test_the_last_collections_are_spared_where_others_wait_and_no_finalizer_is_left(write: Write, body: str) -> None:
    plain, ours = run_both(write(TELL_FROZEN + body))
    assert (plain.stdout, ours.stdout) == ("collected", QUICK[body])
    assert ours[1:] == plain[1:]


def test_a_folder_that_pythonpath_cannot_name_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_FOLDER", "/a:b")
    environ = {"PYTHONPATH": "/c"}
    startup.add_to(environ)
    assert environ == {"PYTHONPATH": "/c"}
