"""The `mia-lab` commands for a running server, and for the keys of one. A key is never an argument: other users see those."""
from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from ..errors import MiaError
from .client.transport import KEY_NAME, Transport

Command = Callable[[argparse.Namespace], int]
_SECONDS = 60.0


def server_commands(commands: Any) -> dict[str, Command]:
    """Add the commands to an argparse sub-parser; return what runs each."""
    serve = commands.add_parser("serve", help="what a running server serves: reload its folder, list its edits, or print its status")
    serve.add_argument("what", choices=("reload", "list", "status"), help="reload needs a key that may administer; the exit status is 1 "
                       "where a bundle is set aside or a process lags behind")
    serve.add_argument("--url", default="http://localhost:8000", help="the server's address")
    key_file(serve)
    key = commands.add_parser("key", help="make a key for clients of a server, and print what serve.toml needs of it")
    key.add_argument("--tenant", default="default", help="whose key it is: small letters, digits and -")
    key.add_argument("--roles", nargs="+", default=["generate", "steer", "capture"])
    key.add_argument("--inline", action="store_true", help="may bring edits of its own, as a notebook client does")
    return {"serve": _serve, "key": _key}


def key_file(parser: argparse.ArgumentParser) -> None:
    """Add the argument that says where an API key is read from."""
    parser.add_argument("--key-file", type=Path, help=f"a file with the API key; by default the environment's {KEY_NAME}")


def key_of(args: argparse.Namespace) -> str | None:
    """The API key that `--key-file` names; None where it is the environment's. MiaError for a file that holds no key."""
    if args.key_file is None:
        return None
    lines = args.key_file.read_text().split()
    if len(lines) != 1:
        raise MiaError(f"{args.key_file} holds {len(lines)} words; a key file holds the key alone")
    return lines[0]


def _serve(args: argparse.Namespace) -> int:
    from ..show.text import render
    from .telling import ASKED

    with closing(Transport(args.url, key_of(args), _SECONDS)) as http:
        parts, status = ASKED[args.what](http)
    print(render(*parts))
    return status


def _key(args: argparse.Namespace) -> int:
    from .policy import Policy, new_key

    key, sha256 = new_key()
    lines = ["[[keys]]", f'sha256 = "{sha256}"', f"tenant = {json.dumps(args.tenant)}", f"roles = {json.dumps(args.roles)}"]
    lines += ["inline = true"] if args.inline else []
    Policy.read("\n".join(lines).encode())  # a tenant or a role that there is not fails here
    print(f"The key, which is shown this once. Clients send it as Authorization: Bearer KEY, or have it in {KEY_NAME}:\n\n  {key}\n\n"
          "What serve.toml needs of it; then mia-lab serve reload:\n\n" + "\n".join(lines))
    return 0
