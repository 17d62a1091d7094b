"""Signals, closed pipes, narrow and plain terminals, and line ends of Windows."""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings

import pytest

from jaxspec import cli
from jaxspec.checkpoint import shipped_models
from jaxspec.cli import main
from jaxspec.commands import info
from jaxspec.progress import progress_bar

# Work in C that no signal reaches and that lets other threads run, as compiling does.
BUSY = f"""
import hashlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxspec import cli
from jaxspec.commands import info
from jaxspec.commands.interrupts import telling

def run(args):
    with telling(lambda: "3 of 8 rows are there"):
        print("begun", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", {10**9})

info.run = run
sys.argv = ["jaxspec", "info"]
cli.command_line()
"""


def check_ends_in_time(program, lines):
    """Sends a Ctrl-C after each line; the last one ends the program within two seconds."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in lines:
            assert process.stdout.readline() == f"{line}\n"
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 2
    assert (process.returncode, out) == (130, "")
    assert err == "interrupted: 3 of 8 rows are there\n"


def test_ctrl_c_ends_what_python_cannot_stop_and_says_what_is_done():
    check_ends_in_time(BUSY, ["begun"])


def test_ctrl_c_says_how_far_a_bar_was(capsys, monkeypatch):
    def run(args):
        with progress_bar(3) as advance:
            advance("a")
            advance("b")
            raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", run)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "interrupted: 1 of 3 done, now b\n"


# Python drops what is raised while an object is deleted, or in a callback of the collector.
DELETING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxspec import cli
from jaxspec.commands import info
from jaxspec.commands.interrupts import telling

class Slow:
    def __del__(self):
        print("begun", flush=True)
        time.sleep(60)

def run(args):
    with telling(lambda: "3 of 8 rows are there"):
        Slow()
        time.sleep(60)

info.run = run
sys.argv = ["jaxspec", "info"]
cli.command_line()
"""


def test_ctrl_c_ends_where_python_drops_exceptions():
    check_ends_in_time(DELETING, ["begun"])


# Prints a line when the imports begin that take a second. Python runs it at its start.
WATCHED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
def watch(event, args):
    if event == "import" and args[0] == "jax":
        print("importing", flush=True)
sys.addaudithook(watch)
"""
SCRIPT = "import sys; from jaxspec.cli import command_line; sys.exit(command_line())"


@pytest.mark.parametrize("seconds", [0, 0.02, 0.1, 0.3, 0.8, 2])
@pytest.mark.parametrize("way", ["script", "module"])
def test_ctrl_c_while_python_imports_is_quiet(tmp_path, way, seconds):
    (tmp_path / "sitecustomize.py").write_text(WATCHED)
    (tmp_path / "jaxspec").write_text(SCRIPT)
    called = {"script": [str(tmp_path / "jaxspec")], "module": ["-m", "jaxspec"]}[way]
    search = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, *called, "generate", "demo", "-"],  # which then waits for its prompt
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
    ) as process:
        assert process.stdout.readline() == "importing\n"
        time.sleep(seconds)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert time.monotonic() - start < 2
        assert process.stderr.read() in ("", "interrupted\n")


COMPILING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxspec import cli

sys.argv = ["jaxspec", "generate", "demo-draft", "abc", "--drafter", "lookup"]
cli.command_line()
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_first_generate_while_it_compiles():
    """The program of a step, which takes seconds to compile; nothing is kept from before."""
    if "demo-draft" not in shipped_models():
        pytest.skip("needs the shipped models, which are not here")
    environment = {**os.environ, "JAXSPEC_CACHE": "off", "JAX_LOG_COMPILES": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", COMPILING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        lines = iter(process.stderr.readline, "")
        assert any("to MLIR module conversion jit(_step_stream)" in line for line in lines)
        time.sleep(0.3)  # now XLA compiles, for seconds
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 2
    assert (process.returncode, out.strip()) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err


# Waits on after an interruption, as the end of a `with` block may.
WAITING = """
import contextlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxspec import cli
from jaxspec.commands import info
from jaxspec.commands.interrupts import go_on, telling

def run(args):
    with telling(lambda: "3 of 8 rows are there"):
        for handled in (go_on, go_on, int, int):
            with contextlib.suppress(KeyboardInterrupt):
                print("waiting", flush=True)
                time.sleep(60)
            handled()

info.run = run
sys.argv = ["jaxspec", "info"]
cli.command_line()
"""


def test_a_second_ctrl_c_ends_what_waits_after_the_first():
    """Two are dealt with, as those that end answers of a chat; the third is not."""
    check_ends_in_time(WAITING, ["waiting"] * 4)


def test_busy_work_lets_other_threads_run():
    """As the test above needs: it takes long, and is no Python."""
    start = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    assert (time.monotonic() - start) * 10_000 > 60


@pytest.mark.parametrize("words", ["--help", "info", "drafters eagle", "generat", "demo --help"])
def test_a_closed_pipe_is_quiet(words):
    """Standard output is closed, then both streams; `true` reads nothing."""
    command = f"sleep 0.1; '{sys.executable}' -m jaxspec {words}"
    for pipe in ("|", "2>&1 |"):
        done = subprocess.run(
            ["bash", "-c", f"({command}) {pipe} true; echo ${{PIPESTATUS[0]}}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() in ("0", "2")
        assert not re.search("Traceback|BrokenPipe|Exception", done.stderr), done.stderr


def test_another_end_keeps_its_code(monkeypatch):
    def run(args):
        raise SystemExit(1)

    monkeypatch.setattr(info, "run", run)
    with pytest.raises(SystemExit) as exit_:
        main(["info"])
    assert exit_.value.code == 1


def test_a_warning_is_one_line_without_code(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back at the end
    monkeypatch.setattr(cli, "main", lambda: 0)
    with pytest.raises(SystemExit):
        cli.command_line()
    shown = warnings.formatwarning(UserWarning("no such luck"), UserWarning, "cli.py", 1, "x = 1")
    assert shown == "jaxspec: warning: no such luck\n"


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 60 columns."""
    settings = {"TTY_COMPATIBLE": "1", "COLUMNS": "60", "LINES": "30", "TERM": "xterm"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return monkeypatch


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


class TestTerminals:
    """Output of terminals that show less."""

    def text(self, capsys, folder: str, *more: str) -> str:
        argv = ["generate", folder, "one, two, one", "--max-tokens", "90", "--drafter", "lookup"]
        assert main([*argv, *more]) == 0
        return capsys.readouterr().out

    def test_colours_are_left_out_where_they_are_not_wanted(self, capsys, terminal, folder):
        coloured = self.text(capsys, folder)
        terminal.setenv("NO_COLOR", "1")
        plain = self.text(capsys, folder)
        terminal.setenv("TERM", "dumb")
        dumb = self.text(capsys, folder)
        assert "\x1b[32m" in coloured
        assert "\x1b[32m" not in plain
        assert "\x1b" not in dumb
        terminal.delenv("TTY_COMPATIBLE")
        whole = self.text(capsys, folder)
        seen = re.compile(r"[^!-~]")  # the text of a random model has control characters
        assert seen.sub("", dumb) == seen.sub("", whole)

    @pytest.mark.parametrize(
        "words", ["--help", "generate --help", "batch --help", "drafters deer", "tune tree --help"]
    )
    def test_help_and_tables_fit_sixty_columns(self, capsys, terminal, words):
        with contextlib.suppress(SystemExit):
            main(words.split())
        lines = without_escapes(capsys.readouterr().out).splitlines()
        # argparse does not divide the name of a flag and its values.
        long = [line for line in lines if len(line.rstrip()) > 60]
        assert not [line for line in long if not line.lstrip().startswith("-")], long


class TestLineEnds:
    """Files with the line ends of Windows."""

    def test_a_prompt_is_the_same(self, capsys, folder, tmp_path):
        outputs = []
        for name, data in (("unix", b"one\ntwo\n"), ("windows", b"one\r\ntwo\r\n")):
            (tmp_path / name).write_bytes(data)
            argv = ["generate", folder, "--file", str(tmp_path / name), "--max-tokens", "6"]
            assert main([*argv, "--json"]) == 0
            outputs.append(json.loads(capsys.readouterr().out))
        first, second = outputs
        assert first["tokens"] == second["tokens"]
        assert second["prompt"] == "one\ntwo\n"

    def test_prompts_are_the_same(self, folder, tmp_path):
        records = []
        for name, end in (("unix", "\n"), ("windows", "\r\n")):
            lines = [json.dumps({"prompt": prompt}) for prompt in ("abc", "xyz")]
            (tmp_path / name).write_bytes("".join(f"{line}{end}{end}" for line in lines).encode())
            out = str(tmp_path / f"{name}.jsonl")
            argv = ["batch", str(tmp_path / name), out, "-m", folder, "--max-tokens", "6"]
            assert main([*argv, "--in-order"]) == 0
            with open(out, encoding="utf-8") as file:
                records.append([json.loads(line)["tokens"] for line in file])
        assert records[0] == records[1]
