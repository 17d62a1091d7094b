"""A web server for exported pages, with the headers that threads in a browser need.

It is for development: it serves one folder to a few visitors, and knows no log, no limit of rates
and no user.
"""

import errno
import functools
import io
import socket
import ssl
import sys
import threading
import time
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

from jaxspec.checkpoint.files import as_path, open_file
from jaxspec.core.checks import checked, shown, within
from jaxspec.mobile.web import PROFILE_FILE

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; worker-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    # Both make a page "cross-origin isolated"; otherwise it has no SharedArrayBuffer, no threads.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    # Workers do not inherit the policy of a page.
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".wasm": "application/wasm",
    ".tflite": "application/octet-stream",
}


MOST_VISITORS = 64
"""Connections at once; any further one is closed."""
SILENT_SECONDS = 30.0
"""A visitor who has not said in so long what is wanted, or takes nothing for so long, is let go."""


class _Heard(io.RawIOBase):
    """Bytes that a visitor sends until a time has passed, however they are spread over it."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self._ends = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        before = self._connection.gettimeout()
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(before)


class _Handler(SimpleHTTPRequestHandler):
    """Serves the files of one folder, without a list of them. A connection is for one request."""

    timeout = SILENT_SECONDS
    raw_requestline: bytes
    extensions_map = _TYPES  # pyright: ignore[reportAssignmentType, reportIncompatibleUnannotatedOverride]

    def setup(self) -> None:
        super().setup()
        assert self.timeout is not None
        self.rfile.close()
        self.rfile = io.BufferedReader(_Heard(self.connection, self.timeout))

    def parse_request(self) -> bool:
        words = self.raw_requestline.split()
        # A line of two words is one of HTTP/0.9, after which no headers come.
        version = words[2] if len(words) > 2 else b"HTTP/0.9"
        if version.startswith(b"HTTP/") and version not in (b"HTTP/1.0", b"HTTP/1.1"):
            self.command = self.requestline = ""
            self.send_error(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
            return False
        return super().parse_request()

    def send_error(self, code, message=None, explain=None) -> None:
        self.request_version = self.protocol_version  # else a wrong version has no status line
        super().send_error(code, message, explain)

    def send_head(self):
        if not self._is_given_out():
            self.send_error(HTTPStatus.NOT_FOUND, "no such file")
            return None
        return super().send_head()

    def _is_given_out(self) -> bool:
        """True for files of the folder, by the names that links lead to: no dotfile, no pipe."""
        try:
            name = unquote(urlsplit(self.path).path, errors="strict")
            if "\0" in name or any(part.startswith(".") for part in name.split("/")):
                return False
            found = Path(self.translate_path(self.path))
            if found.is_dir():
                found /= "index.html"
            found = found.resolve()
            parts = found.relative_to(Path(self.directory).resolve()).parts
            return found.is_file() and not any(part.startswith(".") for part in parts)
        except (OSError, RuntimeError, ValueError):  # a name too long, a loop of links, no UTF-8
            return False

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def list_directory(self, path) -> None:
        self.send_error(404, "no such file")

    def version_string(self) -> str:
        return "jaxspec"

    def log_message(self, format: str, *args) -> None:
        pass


class _Server(ThreadingHTTPServer):
    """Ignores visitors who leave in the middle of a file or do not trust the certificate."""

    request_queue_size = MOST_VISITORS

    def __init__(self, *args):
        self._places = threading.BoundedSemaphore(MOST_VISITORS)
        super().__init__(*args)

    def process_request(self, request, client_address) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()  # no thread was begun
            raise

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError | ssl.SSLError):
            super().handle_error(request, client_address)


def page_server(
    folder: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
) -> ThreadingHTTPServer:
    """Opens a server on a port; it answers once `serve_forever` is called.

    Args:
        folder: written by `jaxspec export web`.
        host: an address of this machine; "0.0.0.0": all of them.
        port: 0: any that is free.
        certificate: with `key` in PEM: speak HTTPS.
        key: of the certificate; `None`: in the same file.

    Raises:
        ValueError: the folder holds no exported page, the host is none of this machine, the port is
            none or is not free, the certificate cannot be read, its key asks for a password, or a
            key is given without a certificate. The message names the argument first.
    """
    folder, host = as_path("folder", folder), checked("host", host, str)
    certificate = None if certificate is None else as_path("certificate", certificate)
    key = None if key is None else as_path("key", key)
    if key is not None and certificate is None:
        raise ValueError(f"key: needs its certificate; give both, got {shown(str(key))} alone.")
    port = checked("port", port, Annotated[int, within(0, (1 << 16) - 1)])
    if not (folder / PROFILE_FILE).is_file() or not (folder / "index.html").is_file():
        raise ValueError(
            f"{folder} holds no exported page: make one by `jaxspec export web MODEL {folder} "
            "--drafter eagle:head=HEAD`."
        )
    handler = functools.partial(_Handler, directory=str(folder))
    try:
        server = _Server((host, port), handler)
    except (TypeError, ValueError, socket.gaierror):  # of the name, before any address
        raise ValueError(
            f"host must be an IPv4 address or a name of this machine, got {shown(host)}."
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"host must be an address of this machine, or 0.0.0.0 for all; got {shown(host)}."
            ) from None
        raise ValueError(
            f"port: {host}:{port} cannot be opened ({error.strerror}); take another, or 0 for any."
        ) from None
    if certificate is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            for path in (certificate, key):
                if path is not None:
                    open_file(path).close()
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            server.server_close()
            raise ValueError(f"certificate {certificate}: cannot be used ({error}).") from None
        # The handshake runs in the visitor's own thread, so that a slow one does not stop others.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    return server


def _no_password() -> str:
    # Without this, OpenSSL asks on the terminal.
    raise ValueError("its key asks for a password: write it without, by `openssl pkey`")


def lan_address() -> str:
    """Returns this machine's address in its network, or loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; only finds a route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def qr_code(address: str) -> str | None:
    """Draws an address for a phone's camera, in characters; `None` without `segno`."""
    try:
        import segno
    except ImportError:
        return None
    import io

    out = io.StringIO()
    segno.make(address, error="m", micro=False).terminal(out, compact=True)
    return out.getvalue()
