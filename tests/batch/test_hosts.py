"""Jobs on several processes, over the loopback interface.

How processes find one another is tested without JAX's service, in threads; whole jobs, with
processes that are killed, are slow tests.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxspec.batch import JobReport, OutputError, Writer
from jaxspec.batch import hosts as module
from jaxspec.batch.hosts import HostError, joined
from jaxspec.batch.parts import check_parts, part_header, part_path, put_together
from jaxspec.cli import main
from jaxspec.commands import EXIT_ERROR, EXIT_INTERRUPTED
from jaxspec.commands.batch import decode_share, show
from tests.batch.conftest import PROMPTS

HEADER = {"seed": 0}
FACTS = {"jaxspec": "0.1.0"}


def free_port() -> int:
    """One of two neighbours that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        try:
            socket.create_server(("127.0.0.1", port + 1)).close()
        except OSError:
            continue
        return port


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost", 2, 0), "coordinator must be HOST:PORT of process 0, got 'localhost'"),
        (("localhost:x", 2, 0), "coordinator must be HOST:PORT"),
        (("localhost:65535", 2, 0), "coordinator must be HOST:PORT"),
        (("no-such-host.invalid:1", 2, 0), "there is no host 'no-such-host.invalid'"),
        (("localhost:1", 0, 0), "num_processes must be at least 1, got 0"),
        (("localhost:1", 2, 2), r"process_id must be in 0\.\.1, got 2"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(HostError, match=message), joined(*arguments):
        pass


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_wait_without_an_end_or_a_beginning_is_refused(seconds):
    with (
        pytest.raises(HostError, match="join_seconds must be in 1"),
        joined("localhost:1", 2, 1, seconds=seconds),
    ):
        pass


def test_a_wrong_address_is_noticed():
    port = free_port()
    with pytest.raises(HostError, match=f"nobody answers at 127.0.0.1:{port} .* after 0.3 s"):
        module._reached("127.0.0.1", port, 2, 1, FACTS, 0.3)
    with socket.create_server(("127.0.0.1", port)) as other:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        with pytest.raises(HostError, match="is not process 0 of a job"):
            module._reached("127.0.0.1", port, 2, 1, FACTS, 0.3)


def test_an_address_of_another_machine_is_noticed_by_process_0():
    # Of a network for documentation: nobody's.
    with pytest.raises(HostError, match=r"process 0 cannot listen at 192\.0\.2\.1"):
        module._gathered("192.0.2.1", free_port(), 2, FACTS, 0.3)


def test_processes_that_do_not_come_are_named():
    with pytest.raises(HostError, match=r"processes 1, 2 of 3 did not come .* within 0\.2 s"):
        module._gathered("127.0.0.1", free_port(), 3, FACTS, 0.2)


@pytest.mark.parametrize(
    ("num", "index", "facts", "message"),
    [
        (2, 1, {"jaxspec": "0.0.9"}, "mixed versions: process 1 .* 0.0.9 there and 0.1.0 in"),
        (3, 1, FACTS, "process 1 was told of 3 processes, process 0 of 2"),
        (2, 0, FACTS, "two processes have the process_id 0"),
    ],
)
def test_processes_that_do_not_fit_are_refused_on_both_sides(num, index, facts, message):
    port, errors = free_port(), []

    def other():
        try:
            module._reached("127.0.0.1", port, num, index, facts, 5.0)
        except HostError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(HostError, match=message) as raised:
        module._gathered("127.0.0.1", port, 2, FACTS, 5.0)
    thread.join(10.0)
    assert errors == [str(raised.value)]


def test_strangers_are_ignored():
    port, welcomed = free_port(), []

    def others():
        with socket.socket() as stranger:
            while stranger.connect_ex(("127.0.0.1", port)):
                time.sleep(0.05)
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        welcomed.append(module._reached("127.0.0.1", port, 2, 1, FACTS, 5.0))

    thread = threading.Thread(target=others)
    thread.start()
    lines = module._gathered("127.0.0.1", port, 2, FACTS, 5.0)
    thread.join(10.0)
    assert list(lines) == [1]
    welcomed[0].send(hello="there")
    assert lines[1].receive(5.0) == {"hello": "there"}


def test_the_code_itself_is_compared():
    facts = module.code_in_use()
    assert facts.keys() == {"jaxspec", "code of jaxspec", "jax"}


# --- Parts ------------------------------------------------------------------------------------


def record(line: int, sample: int = 0) -> dict:
    return {"line": line, "sample": sample, "text": f"é{line}"}


def write_part(out: Path, index: int, num: int, records: list[dict]) -> None:
    with Writer(part_path(out, index, num), part_header(HEADER, index, num)) as part:
        part.append(records)


def test_parts_are_put_together_by_line_and_sample(tmp_path):
    out = tmp_path / "out.jsonl"
    write_part(out, 0, 2, [record(5), record(1, 1), record(1, 0)])
    write_part(out, 1, 2, [record(4), record(2)])
    with Writer(out, HEADER) as whole:
        whole.append([record(4)])  # put there by an earlier process, before it was killed
        assert put_together(whole, HEADER, 2) == 4
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [record(4), record(1, 0), record(1, 1), record(2), record(5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.progress"]


def test_what_a_killed_process_left_half_written_is_not_put_together(tmp_path):
    out = tmp_path / "out.jsonl"
    write_part(out, 0, 1, [record(1)])
    with part_path(out, 0, 1).open("ab") as file:
        file.write(b'{"line": 2, "sam')
    with Writer(out, HEADER) as whole:
        assert put_together(whole, HEADER, 1) == 1


def test_a_part_that_process_0_cannot_see_is_named(tmp_path):
    out = tmp_path / "out.jsonl"
    write_part(out, 0, 2, [record(1)])
    with Writer(out, HEADER) as whole, pytest.raises(OutputError, match="all processes share"):
        put_together(whole, HEADER, 2)
    assert part_path(out, 0, 2).is_file()


def test_parts_of_another_job_are_refused(tmp_path):
    out = tmp_path / "out.jsonl"
    check_parts(out, 2, resume=False)
    write_part(out, 1, 2, [record(1)])
    check_parts(out, 2, resume=True)
    with pytest.raises(OutputError, match="is there already; resume that job with --resume"):
        check_parts(out, 2, resume=False)
    with pytest.raises(OutputError, match="of a job with 2 processes; start as many"):
        check_parts(out, 4, resume=True)
    with pytest.raises(OutputError, match="of a job with 2 processes"):
        check_parts(out, 0, resume=True)


class Met:
    """Processes of a job that runs in one: the last to finish is process 0."""

    reports: list[dict]

    def __init__(self, index: int, num: int, reports: list[dict]):
        self.index, self.num, self.reports = index, num, reports
        self.early: list[int] = []

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def agree(self, header: dict) -> None:
        pass

    def begin(self, done: set) -> set:
        return done

    def share(self, rows: list) -> list:
        return rows[self.index :: self.num]

    def finish(self, report: dict) -> list[dict]:
        self.reports.insert(0, json.loads(json.dumps(report)))
        self.early = [one["process"] for one in self.reports if one["interrupted"]]
        return self.reports if self.is_first else []


@pytest.mark.parametrize("stopped", [False, True])
def test_figures_are_written_once_and_are_of_all_processes(stopped, tmp_path, capsys):
    path, reports = tmp_path / "figures.json", []
    args = argparse.Namespace(output=tmp_path / "out.jsonl", resume=True, json=str(path))

    def decode(rows: list[int], writer: Writer) -> JobReport:
        writer.append([record(line) for line in rows])
        tokens = 10 * len(rows)
        return JobReport(
            num_records=len(rows),
            num_done=len(rows),
            num_tokens=tokens,
            seconds=tokens / 5,
            interrupted=stopped and 2 in rows,
        )

    for index in (2, 1, 0):
        given = decode_share(args, Met(index, 3, reports), [1, 2, 3, 4], HEADER, decode)
        assert path.exists() is False
        assert show(args, *given) == (EXIT_INTERRUPTED if stopped and index < 2 else 0)
    figures = json.loads(path.read_text())
    assert [one["process"] for one in figures["processes"]] == [0, 1, 2]
    assert [one["num_tokens"] for one in figures["processes"]] == [20, 10, 10]
    assert (figures["num_done"], figures["num_tokens"], figures["seconds"]) == (4, 40, 4.0)
    assert figures["tokens_per_second"] == 10.0  # the slowest process ends the job
    assert figures["interrupted"] == stopped


@pytest.mark.parametrize("num_good", [0, 1])
def test_whether_every_row_was_bad_is_asked_of_all_processes(num_good, tmp_path, capsys):
    """A share without a good row, or without any row, is no failure of the job."""
    reports = []
    args = argparse.Namespace(output=tmp_path / "out.jsonl", resume=True, json=None)

    def decode(rows: list[int], writer: Writer) -> JobReport:
        writer.append([record(line) for line in rows])
        bad = sum(line > num_good for line in rows)
        return JobReport(num_records=len(rows), num_done=len(rows), num_errors=bad)

    codes = {
        index: show(args, *decode_share(args, Met(index, 3, reports), [1, 2], HEADER, decode))
        for index in (2, 1, 0)
    }
    assert codes == {2: 0, 1: 0, 0: 0 if num_good else EXIT_ERROR}
    assert ("every row was bad" in capsys.readouterr().err) == (not num_good)


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@pytest.mark.parametrize("stopped", [[], [1], [0, 2]])
def test_every_process_hears_who_stopped_early(stopped, monkeypatch):
    monkeypatch.setattr(module.jax.distributed, "shutdown", lambda: None)
    pairs = {index: connection() for index in (1, 2)}
    lines = {index: module.Line(pair[0]) for index, pair in pairs.items()}
    first = module.Processes(0, 3, lines)
    others = [module.Processes(i, 3, {0: module.Line(pair[1])}) for i, pair in pairs.items()]

    def finish(one):
        one.finish({"process": one.index, "interrupted": one.index in stopped})
        one.leave()

    threads = [threading.Thread(target=finish, args=(one,)) for one in others]
    for thread in threads:
        thread.start()
    finish(first)
    for thread in threads:
        thread.join(10.0)
    assert [one.early for one in (first, *others)] == [stopped] * 3


def test_flags_that_go_together(tmp_path, capsys):
    argv = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    assert main([*argv, "--distributed", "--num-processes", "2"]) == 2
    assert "--distributed: give --coordinator, --process-id as well" in capsys.readouterr().err
    assert main([*argv, "--process-id", "1"]) == 2
    assert "--process-id: needs --distributed" in capsys.readouterr().err


# --- Whole jobs -------------------------------------------------------------------------------

TOKENS, ROWS = 96, 120
SETTINGS = ("--max-new-tokens", str(TOKENS), "--temperature", "1", "--batch", "2")


def command(folder: Path, model: str, out: str) -> list[str]:
    """Over a file of prompts that it writes."""
    rows = [{"id": 100 + i, "prompt": f"{PROMPTS[i % len(PROMPTS)]} {i}"} for i in range(ROWS)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [sys.executable, "-m", "jaxspec", "batch", "in.jsonl", out, "--model", model, *SETTINGS]


@pytest.fixture(scope="module")
def of_one(folder, environment, tmp_path_factory):
    """What one process writes."""
    place = tmp_path_factory.mktemp("alone")
    subprocess.run(
        command(place, folder, "one.jsonl"),
        cwd=place,
        env=environment,
        check=True,
        capture_output=True,
        timeout=600,
    )
    return records(place / "one.jsonl")


@pytest.fixture
def job(tmp_path, folder, environment):
    """Starts the processes of a job over a file of prompts, each with a log of its own."""
    started: list[subprocess.Popen] = []
    whole = command(tmp_path, folder, "out.jsonl")

    def start(num: int, *flags: str, changed: dict[int, list[str]] | None = None):
        port = free_port()
        processes = []
        for index in range(num):
            places = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(num)]
            own = ["--process-id", str(index), *(changed or {}).get(index, [])]
            with (tmp_path / f"log{index}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*whole, "--distributed", *places, *own, *flags],
                        cwd=tmp_path,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        started.extend(processes)
        return processes

    start.folder = tmp_path
    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def records(path: Path) -> list[dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda one: (one["line"], one["sample"]))


def ends(processes, seconds: float = 600.0) -> list[int]:
    until = time.monotonic() + seconds
    return [process.wait(max(1.0, until - time.monotonic())) for process in processes]


def log(folder: Path, index: int) -> str:
    return (folder / f"log{index}").read_text(errors="replace")


def wait_for_a_record(folder: Path, index: int, num: int) -> None:
    """Of one process: by then all have begun."""
    until = time.monotonic() + 600
    path = part_path(folder / "out.jsonl", index, num)
    while not (path.is_file() and path.stat().st_size):
        assert time.monotonic() < until, [log(folder, index)[-2000:] for index in range(num)]
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4])
def test_several_processes_write_what_one_writes(job, of_one, num):
    processes = job(num, "--json", "figures.json")
    assert ends(processes) == [0] * num, [log(job.folder, index) for index in range(num)]
    assert f"put together: {ROWS} records" in log(job.folder, 0)
    written = [json.loads(line) for line in (job.folder / "out.jsonl").read_text().splitlines()]
    assert [one["line"] for one in written] == list(range(1, ROWS + 1))
    assert written == of_one
    figures = json.loads((job.folder / "figures.json").read_text())
    assert [one["process"] for one in figures["processes"]] == list(range(num))
    assert figures["num_done"] == figures["num_records"] == ROWS
    assert not list(job.folder.glob("*.part-*"))
    # A job that is done is done: nothing is decoded again, and nothing changes.
    before = (job.folder / "out.jsonl").read_bytes()
    assert ends(job(num, "--resume")) == [0] * num
    assert (job.folder / "out.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(("num", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_when_one_is_killed_the_others_say_so_and_the_job_resumes(job, of_one, num, victim):
    processes = job(num)
    wait_for_a_record(job.folder, victim, num)
    processes[victim].send_signal(signal.SIGKILL)
    codes = ends(processes, 60.0)
    assert codes == [-9 if index == victim else 2 for index in range(num)]
    for index in set(range(num)) - {victim}:
        last = log(job.folder, index).splitlines()[-1]
        assert last.startswith(f"jaxspec: error: process {victim}")
        assert "is gone" in last
        assert last.endswith("start all processes again with --resume.")
    assert ends(job(num, "--resume")) == [0] * num
    assert (job.folder / "out.jsonl").read_text().count("\n") == ROWS
    assert records(job.folder / "out.jsonl") == of_one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "5"], "process 1 was given another job: seed is 5 there and 0 in process 0"),
        (["--model", "nowhere"], "There is no folder 'nowhere'"),
        (["--expected-speedup", "2"], "needs a guard"),
    ],
)
def test_processes_of_different_jobs_are_refused_and_leave_no_output(job, flags, message):
    processes = job(2, changed={1: flags})
    assert ends(processes) == [2, 2]
    for index in range(2):
        assert message in log(job.folder, index)
    assert not list(job.folder.glob("out.jsonl*"))
