"""`python -m benchmarks`: exit codes, files, and mistakes in one line."""

import json

import pytest

from benchmarks import __main__ as program
from benchmarks.__main__ import main
from benchmarks.harness import Suite
from benchmarks.page import Page, Section
from benchmarks.prompts import GSM8K
from benchmarks.suites import SUITES


@pytest.fixture
def asked(monkeypatch):
    """A suite that measures nothing and keeps what it was asked."""
    runs = []

    def give(run):
        runs.append(run)
        return Page([Section(rows=[["1"]], columns=["one"])], {"rows": 1}, run.repeats != 7)

    suite = Suite("T", "a", give, (GSM8K,), 4, repeats=3, takes={"head": "default", "rows": 2})
    monkeypatch.setattr(program, "SUITES", {"some": suite})
    return runs


def fails(capsys, *argv) -> str:
    assert main(list(map(str, argv))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_without_a_suite_all_are_listed(capsys):
    assert main([]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    listed = [words[0] for words in lines if words and words[0] in SUITES]
    assert sorted(listed) == sorted(SUITES)


def test_a_page_and_figures_are_written(asked, data_folder, tmp_path, capsys):
    out, figures = tmp_path / "new" / "pages", tmp_path / "figures.json"
    argv = ["some", "--data-folder", data_folder, "--out", out, "--json", figures]
    argv += ["--prompts-per-set", 2, "--head", "H"]
    assert main(list(map(str, argv))) == 0
    page = (out / "some.md").read_text()
    assert page == capsys.readouterr().out
    assert "python -m benchmarks some --prompts-per-set 2 --repeats 3 --head H" in page
    assert json.loads(figures.read_text())["rows"] == 1
    (run,) = asked
    assert (run.prompts_per_set, run.repeats) == (2, 3)
    assert run.settings == {"head": "H", "rows": 2}


def test_outputs_that_differ_make_it_fail(asked, data_folder, tmp_path):
    argv = ["some", "--data-folder", str(data_folder), "--out", str(tmp_path), "--repeats", "7"]
    assert main(argv) == 1
    assert (tmp_path / "some.md").is_file()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--repeats", "0"], "repeats must be at least 1, got 0"),
        (["--tree", "t.json"], "takes no tree"),
        (["--json", "no/such/file.json"], "--json no/such/file.json"),
        (["--data-folder", "no/such"], f"{GSM8K.file}"),
        (["--out", "a-file"], "--out a-file: must be a folder"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(
    asked, data_folder, tmp_path, monkeypatch, capsys, argv, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    given = ["some", "--data-folder", data_folder, "--out", tmp_path / "pages", *argv]
    assert message in fails(capsys, *given)
    assert not asked
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_an_unknown_suite_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["fly"])
    assert exit_.value.code == 2
    assert "fly" in capsys.readouterr().err
