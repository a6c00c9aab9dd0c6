"""Being looked at from outside: on request only, by this user only, and without a trace afterwards."""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpexec.cli import drivers
from mpexec.cli.app import run
from mpexec.cli.drivers import find_drivers
from mpexec.errors import ConfigError
from mpexec.executor import inspection, inspection_folder
from mpexec.executor.inspection import offer, withdraw
from mpexec.executor.inspection_folder import InspectionFolder, own_place, usual_places


class Looked:
    """An executor as far as it is looked at."""

    world_size = 2

    def describe(self) -> dict[str, Any]:
        return {"kind": "mp", "state": "RUNNING", "calls_in_flight": 1, "ranks": [{"rank": 0, "pid": 77}]}

    def rank_stacks(self) -> dict[int, str]:
        return {0: "in forward", 1: "in forward, too"}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder that is looked into; inspection is asked for."""
    runtime = Path(tempfile.mkdtemp())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("MPEXEC_INSPECT", "1")
    monkeypatch.setattr(drivers, "usual_places", lambda: [runtime / "mpexec"])
    yield runtime / "mpexec"
    shutil.rmtree(runtime)


@pytest.fixture
def looked(place: Path) -> Iterator[Looked]:
    executor = Looked()
    offer(executor)
    yield executor
    withdraw(executor)


def ask(place: Path, question: bytes, *, wait: bool = True) -> bytes:
    """One question to the only driver, as bytes; its answer."""
    with InspectionFolder(place) as folder:
        ((name, _),) = folder.sockets()
        with folder.connect(name) as connection:
            connection.sendall(question)
            connection.setblocking(True)
            connection.settimeout(10)
            return connection.recv(1 << 20) if wait else b""


def inspection_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mpexec-inspection"]


def test_an_executor_that_is_not_asked_to_offers_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0", None):
        monkeypatch.setenv("MPEXEC_INSPECT", value) if value is not None else monkeypatch.delenv("MPEXEC_INSPECT")
        offer(Looked())
        assert not place.exists()
        assert not inspection_threads()


def test_it_describes_itself_and_shows_all_stacks(looked: Looked) -> None:
    (driver,) = find_drivers()
    assert driver.pid == os.getpid()
    assert driver.executors == [{"world_size": 2, **looked.describe()}]
    assert "pytest" in driver.command
    assert driver.has_process(77)
    assert not driver.has_process(78)
    (driver,) = find_drivers("stacks")
    assert driver.executors[0]["stacks"] == {"0": "in forward", "1": "in forward, too"}
    (main,) = [thread for thread in driver.answer["threads"] if thread["name"] == "MainThread"]
    assert "find_drivers" in main["stack"]
    assert "mpexec-inspection" not in [thread["name"] for thread in driver.answer["threads"]]


def test_folder_and_socket_are_this_users_alone_and_go_with_the_last_executor(place: Path) -> None:
    first, second = Looked(), Looked()
    offer(first)
    offer(second)
    assert place.stat().st_mode & 0o777 == 0o700
    assert len(inspection_threads()) == len(os.listdir(place)) == 1
    assert len(find_drivers()[0].executors) == 2
    withdraw(first)
    assert len(find_drivers()[0].executors) == 1
    withdraw(second)
    withdraw(second)
    assert os.listdir(place) == []
    assert not inspection_threads()
    assert find_drivers() == []


def test_an_executor_that_nobody_holds_any_more_is_not_shown(looked: Looked) -> None:
    other = Looked()
    offer(other)
    assert len(find_drivers()[0].executors) == 2
    del other
    gc.collect()
    assert len(find_drivers()[0].executors) == 1


def test_the_socket_goes_with_the_last_executor_that_nobody_holds_any_more(place: Path) -> None:
    executor = Looked()
    offer(executor)
    (thread,) = inspection_threads()
    del executor
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert os.listdir(place) == []


def test_an_executor_that_is_forgotten_amid_an_answer_takes_the_socket_with_it(place: Path) -> None:
    class Forgotten(Looked):
        def describe(self) -> dict[str, Any]:
            held.clear()
            return {"kind": "mp"}

    held: list[Looked] = [Forgotten()]
    offer(held[0])
    (thread,) = inspection_threads()
    ask(place, b'{"want": "describe"}\n')  # which may not be answered any more
    thread.join(10)
    assert not thread.is_alive()
    assert os.listdir(place) == []


def test_one_that_fails_to_tell_does_not_hide_the_others(looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute(Looked):
        def describe(self) -> dict[str, Any]:
            raise RuntimeError("I say nothing")

    mute = Mute()
    offer(mute)
    try:
        (driver,) = find_drivers()
        assert sorted(map(len, driver.executors)) == [1, 5]
        assert {"error": "RuntimeError: I say nothing"} in driver.executors
    finally:
        withdraw(mute)


@pytest.mark.parametrize(
    "question",
    [b"\n", b"{\n", b"[]\n", b'"describe"\n', b'{"want": "shell"}\n', b"\x80\x04\x95\n", b"[" * 4000 + b"\n"],
)
def test_a_question_that_is_none_is_answered_with_an_error(looked: Looked, place: Path, question: bytes) -> None:
    assert list(json.loads(ask(place, question))) == ["error"]


def test_too_long_a_question_is_left_and_the_next_one_answered(looked: Looked, place: Path) -> None:
    try:
        answer = ask(place, b"x" * 10_000)
    except ConnectionError:  # it was hung up on while it still spoke
        answer = b""
    assert answer == b""
    assert len(find_drivers()) == 1


def test_another_user_is_not_answered(looked: Looked, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "peer_of", lambda connection: (1, os.geteuid() + 1))
    with pytest.raises(ConnectionError):
        assert ask(place, b'{"want": "describe"}\n') == b""
        raise ConnectionResetError("hung up")
    assert find_drivers() == []


def test_a_driver_of_another_user_is_not_believed(looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "peer_of", lambda connection: (1, os.geteuid() + 1))
    assert find_drivers() == []


def test_a_client_that_says_nothing_does_not_hold_up_the_release(place: Path) -> None:
    executor = Looked()
    offer(executor)
    with InspectionFolder(place) as folder:
        ((name, _),) = folder.sockets()
        with folder.connect(name):
            (thread,) = inspection_threads()
            withdraw(executor)
            assert not thread.is_alive()


def test_sockets_of_drivers_that_have_ended_are_swept(place: Path, looked: Looked) -> None:
    with InspectionFolder(place) as folder:
        listening, name = folder.listen()
        listening.close()
        (place / ".4-00000000.sock").touch()
        os.utime(place / ".4-00000000.sock", (0, 0))
        (place / ".5-00000000.sock").touch()  # of a driver that is about to listen
        (place / "notes.txt").touch()
        (place / "124-aaaaaaaa.sock").mkdir()  # nobody's
        assert name in os.listdir(place)
        assert len(find_drivers()) == 1
        assert sorted(os.listdir(place))[0] == ".5-00000000.sock"
        assert len(os.listdir(place)) == 4


def test_a_driver_that_does_not_answer_is_listed_with_what_the_kernel_says(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "_ANSWER_S", 0.05)
    with InspectionFolder(place, create=True) as folder:
        listening, name = folder.listen()
        with listening:
            (driver,) = find_drivers()
        folder.remove(name)
    assert "does not answer within 0.05 s" in driver.answer["error"]


def test_stack_of_a_driver_that_does_not_answer_is_one_message_and_exit_code_1(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drivers, "_ANSWER_S", 0.05)
    with InspectionFolder(place, create=True) as folder:
        listening, name = folder.listen()
        with listening:
            assert run(["stack", str(os.getpid())]) == 1
            assert run(["stack", "77"]) == 1  # which may be a rank of it
            assert run(["ps"]) == 0
        folder.remove(name)
    shown, complaint = capsys.readouterr()
    of_driver, of_rank = complaint.splitlines()
    assert of_driver.startswith(f"mpexec: driver {os.getpid()} does not answer within 0.05 s")
    assert f"process 77 belongs to no driver that answers; driver {os.getpid()} does not answer" in of_rank
    assert f"{os.getpid()}  does not answer within 0.05 s" in shown


def test_ps_has_one_line_for_each_whatever_a_driver_calls_its_things(
    looked: Looked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = {"rank": 0, "pid": 77, "method": "do\rwn", "node": "\x1b[31mred"}
    facts = {"kind": "mp", "state": "BROKEN", "calls_in_flight": 0, "root_cause": "one\ntwo", "ranks": [rank]}
    monkeypatch.setattr(looked, "describe", lambda: facts)
    monkeypatch.setattr(drivers, "_read", lambda pid, name: "python\0-c\0import x\n\x1b]0;title\x07x\u2028y")
    assert run(["ps"]) == 0
    of_driver, of_rank = capsys.readouterr().out.splitlines()
    assert of_driver.endswith("(one two)  2 ranks  0 in flight  python -c import x ?]0;title?x y")
    assert "?[31mred" in of_rank
    assert "do wn" in of_rank
    assert run(["stack", str(os.getpid())]) == 0
    assert not {"\x1b", "\r"} & set(capsys.readouterr().out)


def test_only_the_driver_that_is_meant_is_asked(looked: Looked) -> None:
    assert len(find_drivers("stacks", only=os.getpid())) == 1
    assert find_drivers("stacks", only=os.getpid() + 1) == []


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_this_users_alone_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        InspectionFolder(place)
    place.rmdir()
    real = place.with_name("elsewhere")
    real.mkdir(mode=0o700)
    place.symlink_to(real)
    with pytest.raises(ConfigError, match="link"):
        InspectionFolder(place, create=True)
    place.unlink()
    place.touch()
    with pytest.raises(ConfigError, match="no folder"):
        InspectionFolder(place)
    monkeypatch.setattr(inspection_folder.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {os.getuid()}"):
        InspectionFolder(real)


def test_a_thread_that_cannot_be_started_leaves_nothing_and_the_executor_works_without(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    executor, before = Looked(), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        offer(executor)
    assert "can't start new thread" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == before
    with InspectionFolder(place) as folder:
        assert list(folder.sockets()) == []


def test_an_executor_may_be_released_amid_an_answer_on_the_thread_that_answers(
    looked: Looked, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Looked()
    offer(other)

    def describe() -> dict[str, Any]:  # as where a garbage collection runs a finalizer
        withdraw(other)
        return {"kind": "mp"}

    monkeypatch.setattr(looked, "describe", describe)
    assert b'"mp"' in ask(place, b'{"want": "describe"}\n')
    assert inspection_threads()


def test_an_unsafe_folder_is_logged_and_the_executor_works_without(
    place: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    executor = Looked()
    offer(executor)
    assert "no inspection of this process" in caplog.text
    assert not inspection_threads()
    withdraw(executor)
    assert find_drivers() == []
    assert "can be entered by others" in capsys.readouterr().err


def test_without_a_runtime_folder_it_is_in_tmp_and_all_places_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    in_tmp, of_system = Path(f"/tmp/mpexec-{os.getuid()}"), Path(f"/run/user/{os.getuid()}/mpexec")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert own_place() == in_tmp
    assert usual_places() == [of_system, in_tmp]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/no/such/folder")
    assert own_place() == in_tmp
    assert usual_places() == [Path("/no/such/folder/mpexec"), of_system, in_tmp]


# -- fork --------------------------------------------------------------------------------------------------------------


def test_a_forked_child_leaves_its_parents_socket_alone_and_has_one_of_its_own(looked: Looked, place: Path) -> None:
    before = os.listdir(place)
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            withdraw(looked)  # its parent's
            own = Looked()
            offer(own)
            names = sorted(os.listdir(place))
            withdraw(own)
            os.write(writable, json.dumps([names, os.listdir(place)]).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writable)
    try:
        assert select.select([readable], [], [], 30)[0]
        during, after = json.loads(os.read(readable, 1 << 16))
    finally:
        os.close(readable)
        _, status = os.waitpid(pid, 0)
    assert status == 0
    assert len(during) == 2
    assert f"{pid}-" in " ".join(during)
    assert after == before
    assert len(find_drivers()) == 1


def test_a_connection_is_refused_by_the_kernel_once_the_driver_has_gone(place: Path) -> None:
    executor = Looked()
    offer(executor)
    with InspectionFolder(place) as folder:
        ((name, _),) = folder.sockets()
        withdraw(executor)
        with pytest.raises(OSError, match="No such file"):
            folder.connect(name)
