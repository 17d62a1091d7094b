"""A save that is interrupted or killed at any of its moves leaves the old checkpoint."""

import itertools
import os
from pathlib import Path

import jax
import pytest

from jaxspec.checkpoint import CheckpointError, Model, files, load, recover_files, save, save_orbax
from tests.checkpoint.networks import assert_same_network

SAVERS = {"huggingface": save, "orbax": save_orbax}
MOST_MOVES = 40


class Stopped(BaseException):
    """Neither an Exception nor expected by anyone, like KeyboardInterrupt."""


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes and every sub-folder, hidden ones included."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def stop_at(patch: pytest.MonkeyPatch, folder: Path, *moves: int) -> None:
    """Makes some of the coming moves into or out of `folder` raise, counted from 0."""
    move, count = os.replace, itertools.count()

    def counted(source, target):
        if folder in (Path(source).parent, Path(target).parent) and next(count) in moves:
            raise Stopped
        move(source, target)

    patch.setattr(os, "replace", counted)


def kill_at(patch: pytest.MonkeyPatch, folder: Path, move: int) -> None:
    """Like `stop_at`, but nothing is cleaned up after the move either."""

    def dead(staging):
        raise Stopped

    stop_at(patch, folder, move)
    patch.setattr(files, "_undo", dead)


def shifted(network) -> Model:
    return Model(jax.tree.map(lambda leaf: leaf + 1, network))


layouts = pytest.mark.parametrize("layout", sorted(SAVERS))


@layouts
def test_an_interrupted_move_changes_nothing(layout, tiny_network, tmp_path, monkeypatch):
    SAVERS[layout](Model(tiny_network), tmp_path)
    (tmp_path / "recipe.md").write_text("how it was made")
    old, new = contents(tmp_path), shifted(tiny_network)
    for move in range(MOST_MOVES):
        with monkeypatch.context() as patch:
            stop_at(patch, tmp_path, move)
            try:
                SAVERS[layout](new, tmp_path)
                break
            except Stopped:
                assert contents(tmp_path) == old
    assert 3 < move < MOST_MOVES - 1
    assert_same_network(load(tmp_path).network, new.network)
    assert (tmp_path / "recipe.md").exists()
    assert not list(tmp_path.glob(".saving-*"))


@layouts
def test_a_save_killed_while_it_changes_the_layout_is_recovered(
    layout, tiny_network, tmp_path, monkeypatch
):
    before = {"huggingface": "orbax", "orbax": "huggingface"}[layout]
    SAVERS[before](Model(tiny_network), tmp_path)
    old, new = contents(tmp_path), shifted(tiny_network)
    for move in range(MOST_MOVES):
        with monkeypatch.context() as patch:
            kill_at(patch, tmp_path, move)
            try:
                SAVERS[layout](new, tmp_path)
                break
            except Stopped:
                with pytest.raises(CheckpointError, match=r"not complete.*recover_files"):
                    load(tmp_path)
        recover_files(tmp_path)
        assert contents(tmp_path) == old
    assert 4 < move < MOST_MOVES - 1
    assert_same_network(load(tmp_path).network, new.network)


@layouts
def test_after_a_killed_save_the_next_one_succeeds(layout, tiny_network, tmp_path, monkeypatch):
    SAVERS[layout](Model(tiny_network), tmp_path)
    new = shifted(tiny_network)
    with monkeypatch.context() as patch:
        kill_at(patch, tmp_path, 4)
        with pytest.raises(Stopped):
            SAVERS[layout](new, tmp_path)
    SAVERS[layout](new, tmp_path)
    assert_same_network(load(tmp_path).network, new.network)
    assert not list(tmp_path.glob(".saving-*"))


def replace_two_of_three(folder: Path) -> None:
    with files.replacing_files(folder, obsolete=["gone*"]) as staging:
        (staging / "weights").write_text("new")
        (staging / "added").write_text("new")
        (staging / "tree").mkdir()
        (staging / "tree" / "leaf").write_text("new")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("weights", "gone-1", "stays"):
        (tmp_path / name).write_text("old")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "leaf").write_text("old")
    return tmp_path


@pytest.mark.parametrize("first", range(6))
def test_interrupting_the_undoing_loses_nothing(first, folder, monkeypatch):
    old = contents(folder)
    for later in range(1, 5):
        with monkeypatch.context() as patch:
            stop_at(patch, folder, first, first + later)
            with pytest.raises(Stopped):
                replace_two_of_three(folder)
        # The next save begins with recovering, then fails for a reason of its own.
        with pytest.raises(OSError, match="disk full"), files.replacing_files(folder):
            raise OSError("disk full")
        assert contents(folder) == old


def test_a_save_killed_when_all_was_moved_counts(folder, monkeypatch):
    expected = {"weights": b"new", "added": b"new", "stays": b"old"}
    with monkeypatch.context() as patch:
        # Killed between the last move and the clearing up.
        patch.setattr(files.shutil, "rmtree", lambda *args, **kwargs: None)
        replace_two_of_three(folder)
    assert list(folder.glob(".saving-*/.originals/gone-1"))
    files.check_whole(folder)
    recover_files(folder)
    assert contents(folder) == {**expected, "tree": None, "tree/leaf": b"new"}


def test_an_interrupted_first_save_leaves_no_folder(tmp_path, monkeypatch):
    stop_at(monkeypatch, tmp_path / "new", 1)
    with pytest.raises(Stopped):
        replace_two_of_three(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_no_move_can_begin_without_a_journal(folder, monkeypatch):
    def stopped(source, target):
        raise Stopped

    old = contents(folder)
    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(Stopped):
        replace_two_of_three(folder)
    assert contents(folder) == old


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "^max_positions must be at least 1, got 0"),
        (-3, "^max_positions must be at least 1, got -3"),
        (65, "^max_positions must be at most 64, .*; got 65"),
        (10**6, "^max_positions must be at most 64, .*; got 1000000"),
    ],
)
@layouts
def test_a_length_to_load_for_is_named_when_refused(
    layout, length, message, tiny_network, tmp_path
):
    SAVERS[layout](Model(tiny_network), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, max_positions=length)


@pytest.mark.parametrize(
    "journal",
    ["{}", '{"added": 5}', '{"added": ["../victim"]}', '{"added": [".."]}', '{"added": [1]}'],
)
def test_a_journal_of_somebody_else_removes_nothing(journal, tmp_path):
    staging = tmp_path / "model" / ".saving-1"
    (staging / ".originals").mkdir(parents=True)
    (staging / ".journal.json").write_text(journal)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    with pytest.raises(CheckpointError, match=r"added must be a list of file names"):
        recover_files(tmp_path / "model")
    assert (victim / "kept").exists()
    assert staging.exists()
