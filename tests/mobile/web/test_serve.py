"""The server of a page: its headers, what it gives out, and what it refuses."""

import contextlib
import http.client
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from jaxspec.cli import main
from jaxspec.commands import serve as command
from jaxspec.mobile import serve
from jaxspec.mobile.serve import POLICY, page_server, qr_code
from jaxspec.mobile.web import PAGE_FOLDER


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vendor").mkdir()
    for name in ("index.html", "profile.json", "page.js", "model.tflite", "vendor/a.wasm"):
        (tmp_path / name).write_text(name)
    return tmp_path


@contextlib.contextmanager
def running(folder):
    with page_server(folder, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def answer_to(server, path, method="GET"):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer, answer.read()


def test_it_serves_with_the_headers_that_threads_need(folder):
    with running(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        for path, kind in (
            ("/", "text/html; charset=utf-8"),
            ("/page.js", "text/javascript; charset=utf-8"),
            ("/vendor/a.wasm", "application/wasm"),
            ("/profile.json", "application/json"),
            ("/model.tflite", "application/octet-stream"),
        ):
            answer, _ = answer_to(server, path)
            assert answer.status == 200
            assert answer.headers["Content-Type"] == kind
            assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
            assert answer.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe-inline" not in policy


def test_it_lists_no_folders_and_leaves_its_own(folder):
    (folder.parent / "secret.txt").write_text("secret")
    with running(folder) as server:
        for path in ("/vendor/", "/../secret.txt", "/%2e%2e/secret.txt", "/nothing"):
            answer, body = answer_to(server, path)
            assert answer.status == 404, path
            assert b"secret" not in body
        answer, _ = answer_to(server, "/", method="POST")
        assert answer.status == 501


def test_dotfiles_and_links_that_leave_the_folder_are_not_given_out(folder):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (folder / ".env").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / "leaves.txt").symlink_to(outside / "secret.txt")
    (folder / "away").symlink_to(outside)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "stays.js").symlink_to(folder / "page.js")
    (folder / "in.js").symlink_to(".env")
    (folder / "git").symlink_to(".git")
    (folder / "away.d").mkdir()
    (folder / "away.d" / "index.html").symlink_to(outside / "secret.txt")
    os.mkfifo(folder / "pipe.js")
    with running(folder) as server:
        hidden = ("/.env", "/.git/config", "/%2eenv", "/leaves.txt", "/away/secret.txt", "/loop")
        hidden += ("/in.js", "/git/config", "/away.d/", "/pipe.js")
        odd = ("/page.js%00", "/%ff", "/" + "a" * 5000, "/vendor/../../outside/secret.txt")
        for path in (*hidden, *odd):
            answer, body = answer_to(server, path)
            assert answer.status == 404, path
            assert b"secret" not in body
        assert answer_to(server, "/stays.js")[1] == b"page.js"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /page.js", 505),  # at once, without waiting for headers
        (b"GET /page.js HTTP/0.9", 505),
        (b"GET /page.js HTTP/3.0", 505),
        (b"GET /page.js HTTP/9.9\r\n", 505),
        (b"GET /page.js XTTP/1.0\r\n", 400),
        (b"GET /page.js of HTTP/1.1\r\n", 400),
        (b"\0\0 / HTTP/1.1\r\n", 501),
    ],
)
def test_requests_that_are_none_are_refused(folder, line, status, capsys):
    with running(folder) as server, socket.create_connection(server.server_address[:2]) as visitor:
        visitor.sendall(line + b"\r\n")
        visitor.settimeout(10)
        said = b"".join(iter(lambda: visitor.recv(4096), b""))
    assert said.startswith(b"HTTP/1.0 %d " % status)
    assert b"Error code: " in said
    assert capsys.readouterr().err == ""


def test_who_says_nothing_is_let_go_and_the_rest_wait_for_nobody(folder, monkeypatch, capsys):
    monkeypatch.setattr(serve._Handler, "timeout", 1.0)
    with running(folder) as server:
        before, silent = threading.active_count(), []
        for _ in range(300):
            silent.append(socket.create_connection(server.server_address[:2]))
            assert threading.active_count() <= before + serve.MOST_VISITORS
        ends = time.monotonic() + 20
        while threading.active_count() > before and time.monotonic() < ends:
            time.sleep(0.05)
        assert threading.active_count() == before
        assert answer_to(server, "/page.js")[1] == b"page.js"
        for each in silent:
            each.close()
    assert capsys.readouterr().err == ""


def test_who_speaks_slowly_is_let_go(folder, monkeypatch, capsys):
    monkeypatch.setattr(serve._Handler, "timeout", 0.5)
    began = time.monotonic()
    with (
        running(folder) as server,
        socket.create_connection(server.server_address[:2]) as visitor,
        contextlib.suppress(ConnectionError),
    ):
        for byte in b"GET /page.js HTTP/1.1\r\n" + b"a: b\r\n" * 99:
            visitor.sendall(bytes([byte]))
            time.sleep(0.1)
        pytest.fail("it listened for a minute")
    assert time.monotonic() - began < 10
    assert capsys.readouterr().err == ""


def test_the_page_brings_the_policy_of_the_server():
    """For other servers; only a header may say who frames a page."""
    page = (PAGE_FOLDER / "index.html").read_text()
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    assert found[1] + "; frame-ancestors 'none'" == POLICY


@pytest.fixture
def certificate(tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl on the PATH, which is not here")
    path = tmp_path / "page.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-days", "2", "-keyout", str(path), "-out", str(tmp_path / "public.pem")]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "public.pem").read_text())
    return path


def test_who_never_shakes_hands_stops_nobody(folder, certificate, capsys):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with page_server(folder, port=0, certificate=certificate) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        with socket.create_connection(("127.0.0.1", port)) as silent:
            connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
            connection.request("GET", "/page.js")
            assert connection.getresponse().read() == b"page.js"
            silent.sendall(b"no handshake at all\r\n\r\n")
        server.shutdown()
    assert capsys.readouterr().err == ""


def test_who_leaves_is_no_error(folder, capsys):
    with running(folder) as server:
        for error, told in ((ConnectionResetError, False), (KeyError, True)):
            try:
                raise error("gone")
            except error:
                server.handle_error(None, ("127.0.0.1", 1))
            assert (error.__name__ in capsys.readouterr().err) == told


def test_the_command_prints_the_address(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "http.server.ThreadingHTTPServer.serve_forever", lambda *_: (_ for _ in ()).throw(OSError)
    )
    assert main(["serve", str(folder), "--port", "0"]) == 2
    out = capsys.readouterr().out
    assert "http://127.0.0.1:" in out
    assert qr_code("http://127.0.0.1:1/") is None or "\u2588" in out


def test_another_machine_is_told_what_it_will_lack(folder, capsys, monkeypatch):
    monkeypatch.setattr(command, "lan_address", lambda: "192.0.2.7")
    monkeypatch.setattr(
        "http.server.ThreadingHTTPServer.serve_forever", lambda *_: (_ for _ in ()).throw(OSError)
    )
    main(["serve", str(folder), "--port", "0", "--lan"])
    told = capsys.readouterr()
    assert "http://192.0.2.7:" in told.out
    assert "adb reverse" in told.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port must be in [0, 65535], got 70000"),
        (["--key", "key.pem"], "--key: needs its certificate"),
        (["--certificate", "none.pem", "--port", "0"], "--certificate none.pem: cannot be used"),
    ],
)
def test_bad_flags_are_refused(folder, capsys, flags, message):
    assert main(["serve", str(folder), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_certificate_that_would_ask_or_wait_is_refused(certificate, folder, tmp_path, capsys):
    locked = tmp_path / "locked.pem"
    command = [shutil.which("openssl"), "rsa", "-aes256", "-passout", "pass:abcd"]
    subprocess.run([*command, "-in", certificate, "-out", locked], check=True, capture_output=True)
    public = str(tmp_path / "public.pem")
    flags = ["--port", "0", "--certificate", public, "--key", str(locked)]
    assert main(["serve", str(folder), *flags]) == 2
    assert "its key asks for a password" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    assert main(["serve", str(folder), "--port", "0", "--certificate", str(tmp_path / "pipe")]) == 2
    assert "pipe is a device or a pipe" in capsys.readouterr().err


def test_a_folder_without_a_page_is_refused(tmp_path, capsys):
    assert main(["serve", str(tmp_path)]) == 2
    assert "holds no exported page" in capsys.readouterr().err


def test_a_port_in_use_is_refused(folder):
    with (
        running(folder) as server,
        pytest.raises(ValueError, match="cannot be opened"),
    ):
        page_server(folder, port=server.server_address[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host": "a\0"}, r"host must be .*, got 'a\\x00'"),
        ({"host": "\ud800"}, r"host must be .*, got '\\ud800'"),
        ({"host": "::1"}, "host must be an IPv4 address .*, got '::1'"),
        ({"host": "192.0.2.1"}, "host must be an address of this machine"),
        ({"key": "x"}, "key: needs its certificate; give both, got 'x' alone"),
        ({"certificate": "none.pem"}, "certificate none.pem: cannot be used"),
        ({"folder": "a\0"}, r"folder must be a path: .* got 'a\\x00'"),
    ],
)
def test_wrong_arguments_are_named(folder, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        page_server(**{"folder": folder, "port": 0, **arguments})


@pytest.mark.parametrize("port", [1.5, "x", None, True, -1])
def test_what_is_no_port_is_named(folder, port):
    with pytest.raises(ValueError, match=r"^port must be"):
        page_server(folder, port=port)
