"""`jaxspec serve`: serves an exported page to this machine or to a phone in the network."""

import argparse
import ipaddress
import re
import sys
from pathlib import Path

from jaxspec.extras import install_hint
from jaxspec.mobile.serve import lan_address, page_server, qr_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec serve`."""
    parser.description = (
        "Serves a folder of `jaxspec export web` with the headers that threads need, on loopback "
        "only unless --lan is given. It is a server for development. Browsers give WebGPU, threads "
        "and storage to secure pages only: pages of loopback, or of another address with "
        "--certificate."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--lan", action="store_true", help="accept other machines, such as a phone")
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0: any (default: %(default)s)"
    )
    parser.add_argument(
        "--certificate", type=Path, metavar="FILE.pem", help="speak HTTPS with this certificate"
    )
    parser.add_argument("--key", type=Path, metavar="FILE.pem", help="key of --certificate")


def run(args: argparse.Namespace) -> int:
    """Serves until interrupted."""
    host = "0.0.0.0" if args.lan else "127.0.0.1"
    try:
        server = page_server(args.folder, host, args.port, args.certificate, args.key)
    except ValueError as error:
        raise ValueError(re.sub(r"^(?=(port|certificate|key)\b)", "--", str(error))) from None
    with server:
        scheme = "https" if args.certificate else "http"
        name = lan_address() if args.lan else "127.0.0.1"
        address = f"{scheme}://{name}:{server.server_address[1]}/"
        code = qr_code(address)
        if code is None:
            print(f"(for a QR code here: {install_hint('web')})", file=sys.stderr)
        else:
            print(code)
        print(address, flush=True)
        if scheme == "http" and not ipaddress.ip_address(name).is_loopback:
            port = server.server_address[1]
            print(
                "A page from this address is not secure to a browser: one thread, no WebGPU, and "
                "the model is loaded anew each time. Give --certificate, or plug the phone in, "
                f"`adb reverse tcp:{port} tcp:{port}`, and open http://localhost:{port}/ there.",
                file=sys.stderr,
            )
        server.serve_forever()
    return 0
