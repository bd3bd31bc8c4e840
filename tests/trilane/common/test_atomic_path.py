"""Files that are written aside: under a name of their own, through no link, and with nothing left over."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread

import pytest

from tests.kit.processes import small_disk
from trilane.common.files import OutputError, atomic_path, lock_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions and locks")
ROOT = Path(__file__).parents[3]
KILLED = """
import os, signal, sys
from trilane.common.files import atomic_path
with atomic_path(sys.argv[1]) as aside:
    aside.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "result.txt"


def write(target: Path, text: str = "whole") -> None:
    with atomic_path(target) as aside:
        aside.write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def left_by_a_killed_writer(target: Path) -> Path:
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    [left] = target.parent.glob(".*")
    return left


# --- files of others --------------------------------------------------------------------------------------------------


def test_a_users_own_file_of_a_similar_name_stays(target: Path) -> None:
    mine = {f"result.txt{end}": f"mine {end}" for end in (".part", ".tmp", "~", ".trilane-part")}
    for name, text in mine.items():
        target.with_name(name).write_text(text)
    write(target)
    assert {name: target.with_name(name).read_text() for name in mine} == mine


def test_a_link_at_a_guessed_name_is_not_followed(target: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    target.with_name("result.txt.part").symlink_to(victim)
    write(target)
    assert victim.read_text() == "precious"


def test_a_pipe_and_a_device_are_not_replaced(target: Path) -> None:
    os.mkfifo(target)
    with pytest.raises(OutputError, match=r"result\.txt: expected the name of a file, this is a device or a pipe"):
        write(target)
    assert target.is_fifo()
    with pytest.raises(OutputError, match=r"/dev/null: expected the name of a file, this is a device or a pipe"):
        write(Path(os.devnull))
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize("there", [True, False])
def test_a_target_that_is_a_link_is_refused_before_anything_is_written(target: Path, there: bool) -> None:
    victim = target.with_name("victim")
    if there:
        victim.write_text("precious")
    target.symlink_to(victim)
    with pytest.raises(OutputError, match=r"result\.txt: expected a file, this is a symbolic link to .*victim"):
        write(target)
    assert target.is_symlink()
    assert victim.exists() == there
    assert not there or victim.read_text() == "precious"


def test_a_lock_is_neither_a_link_nor_a_file_with_content(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "notes").write_text("mine")
    for name in ("link", "notes"):
        with pytest.raises(OutputError, match=name):
            lock_file(tmp_path / name)
    assert names(tmp_path) == ["link", "notes"]


def test_writers_of_one_target_share_nothing(target: Path) -> None:
    with atomic_path(target) as one, atomic_path(target) as other:
        one.write_text("one")
        other.write_text("other")
        assert (one.read_text(), other.read_text()) == ("one", "other")
    assert target.read_text() == "one"  # whose block ended last
    assert names(target.parent) == ["result.txt"]


def test_threads_that_write_one_target_leave_one_whole_file(target: Path) -> None:
    texts = [str(number) * 10_000 for number in range(8)]
    errors: list[OSError] = []

    def write_often(text: str) -> None:
        try:
            for _ in range(20):
                write(target, text)
        except OSError as error:
            errors.append(error)

    threads = [Thread(target=write_often, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert target.read_text() in texts
    assert names(target.parent) == ["result.txt"]


# --- permissions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_new_file_has_the_permissions_of_any_new_file(target: Path) -> None:
    write(target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_replaced_file_passes_on_its_permissions(target: Path, mode: int) -> None:
    target.write_text("earlier")
    target.chmod(mode)
    write(target)
    assert target.read_text() == "whole"
    assert stat.S_IMODE(target.stat().st_mode) == mode


def test_while_it_is_written_no_one_else_can_open_it(target: Path) -> None:
    with atomic_path(target) as aside:
        assert stat.S_IMODE(aside.parent.stat().st_mode) == 0o700
        aside.touch()


# --- killed, interrupted, refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_nothing_is_left_after(target: Path, error: type[BaseException]) -> None:
    with suppress(error), atomic_path(target) as aside:
        aside.write_text("half")
        raise error
    assert names(target.parent) == []


def test_what_a_killed_writer_left_is_removed_by_the_next(target: Path) -> None:
    left = left_by_a_killed_writer(target)
    assert left.name.startswith(".result.txt.")
    write(target.with_name("result.txt.other"))
    assert left.exists()  # it is of another target
    write(target)
    assert names(target.parent) == ["result.txt", "result.txt.other"]


def test_what_a_living_writer_has_is_kept(target: Path) -> None:
    with ExitStack() as stack:
        aside = stack.enter_context(atomic_path(target))
        aside.write_text("first")
        left_by_another = subprocess.run([sys.executable, "-c", KILLED, str(target)], cwd=ROOT, check=False)
        assert left_by_another.returncode == -signal.SIGKILL
        write(target, "second")
        assert names(target.parent) == sorted([aside.parent.name, "result.txt"])
    assert target.read_text() == "first"


def test_no_link_in_what_is_removed_is_followed(target: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    left = left_by_a_killed_writer(target)
    (left / "link").symlink_to(tmp_path / "mine")
    (tmp_path / ".result.txt.12345678.trilane-part").symlink_to(tmp_path / "mine")
    write(target)
    assert (tmp_path / "mine" / "precious").exists()
    assert not left.exists()


@pytest.mark.parametrize("name", ["a[b]*?.txt", "-x", "name with spaces", "é" * 100], ids=ascii)
def test_any_name_can_be_written_again(tmp_path: Path, name: str) -> None:
    left_by_a_killed_writer(tmp_path / name)
    write(tmp_path / name)
    assert names(tmp_path) == [name]


def test_a_file_that_does_not_fit_is_named_and_the_earlier_one_stays(target: Path) -> None:
    target.write_text("earlier")
    with small_disk(), pytest.raises(OSError, match="File too large") as raised:
        write(target, "x" * 100_000)
    assert raised.value.filename == str(target)
    assert target.read_text() == "earlier"
    assert names(target.parent) == ["result.txt"]


def test_an_error_of_another_file_keeps_its_name(target: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised, atomic_path(target):
        target.with_name("input").read_text()
    assert raised.value.filename == str(target.with_name("input"))


def test_a_folder_that_is_not_there_is_an_error_of_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        write(tmp_path / "none" / "x")
    assert raised.value.filename == str(tmp_path / "none" / "x")
