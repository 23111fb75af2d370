"""The `mia-lab` commands for bundles and for the files of other tools."""
from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BundleError

if TYPE_CHECKING:
    from ..session import Session

Command = Callable[[argparse.Namespace], int]


def bundle_commands(commands: Any) -> dict[str, Command]:
    """Add the commands to an argparse sub-parser; return what runs each."""
    inspect = commands.add_parser("inspect", help="print what a .steer bundle holds")
    inspect.add_argument("bundle", type=Path)
    diff = commands.add_parser("diff", help="print how a second bundle differs from a first; 1 where it does")
    diff.add_argument("bundle", type=Path, nargs=2)
    verify = commands.add_parser("verify", help="replay a bundle's golden outputs on a model; 1 where one differs")
    verify.add_argument("bundle", type=Path)
    verify.add_argument("model", nargs="?", help='"demo", a Hugging Face id or a path; or give --server')
    verify.add_argument("--server", metavar="URL", help="a running server, in place of a model")
    verify.add_argument("--key-file", type=Path, help="a file with the server's API key; by default the environment's MIA_LAB_API_KEY")
    _engine(verify)
    _signer(verify)
    sign = commands.add_parser("sign", help="sign a bundle with an ed25519 key: openssl genpkey -algorithm ed25519 -out key.pem")
    sign.add_argument("bundle", type=Path)
    sign.add_argument("--key", type=Path, required=True, help="private key, PEM")
    push = commands.add_parser("push-dir", help="put a bundle into a server's folder in one step; the one before it is kept")
    push.add_argument("bundle", type=Path)
    push.add_argument("directory", type=Path)
    _signer(push)
    commands.add_parser("targets", help="print the formats that edits can be written to and read from")
    _convert(commands.add_parser("convert", help="turn a bundle into another tool's file, or the reverse"))
    return {"inspect": _inspect, "diff": _diff, "verify": _verify, "sign": _sign, "push-dir": _push, "targets": _targets,
            "convert": _converted}


def _convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--to", required=True, help='a format of `mia-lab targets`, or "steer"')
    parser.add_argument("--from", dest="origin", help="the source's format, where its name does not say it")
    parser.add_argument("--bos", choices=("none", "skip", "edit"), help="what becomes of BOS where a format cannot name it: prompts have "
                        "none, it is position 0 and left out, or it is edited with the rest")
    parser.add_argument("--model", default="", help="the model's name, which some formats keep; for --to steer, the model to run")
    parser.add_argument("--feature", type=int, help="of an autoencoder")
    parser.add_argument("--value", type=float, help="to set that feature to; without it, its direction is added")
    _engine(parser)


def _engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", type=json.loads, default={}, metavar="JSON", help="Session arguments and vLLM options")


def _signer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--signer", type=str, help="a public key (PEM file, or 64 hexadecimal digits) that must have signed the bundle")


def _inspect(args: argparse.Namespace) -> int:
    from ..show.text import render
    from .report import inspect

    print(render(*inspect(args.bundle)))
    return 0


def _diff(args: argparse.Namespace) -> int:
    from .report import differences

    found = differences(*args.bundle)
    print("\n".join(found) or "no difference")
    return int(bool(found))


def _verify(args: argparse.Namespace) -> int:
    from ..session import Session
    from .bundle import opened, verify

    if (args.model is None) == (args.server is None):
        raise BundleError("give the model to verify it on, or --server URL")
    opened(args.bundle, args.signer)  # before minutes of loading a model
    with Session(args.model, **args.session) if args.server is None else _client(args) as session:
        print(verify(args.bundle, session, signer=args.signer))
    return 0


def _client(args: argparse.Namespace) -> Session:
    from ..serve.client.client import Client
    from ..serve.commands import key_of

    return Client(args.server, key_of(args))


def _sign(args: argparse.Namespace) -> int:
    from .signing import sign

    print(f"signed: {sign(args.bundle, args.key)}")
    return 0


def _push(args: argparse.Namespace) -> int:
    from .pushing import push

    print(f"in place: {push(args.bundle, args.directory, args.signer)}")
    return 0


def _targets(args: argparse.Namespace) -> int:
    from ..show.parts import Table
    from ..show.text import render
    from .targets.registry import TARGETS

    rows = tuple((target.name, ", ".join(suffix or "folder" for suffix in target.suffixes), "yes" if target.reads else "no",
                  "yes" if target.writes else "no", target.what, target.says, target.lacks) for target in TARGETS.values())
    print(render(Table(("format", "files", "read", "written", "what it is", "what it says", "what it cannot say"), rows)))
    return 0


def _converted(args: argparse.Namespace) -> int:
    from .bundle import export, load

    asked = {name: value for name, value in (("feature", args.feature), ("value", args.value)) if value is not None}
    edits = load(args.source, format=args.origin, **asked)
    if args.to != "steer":
        options = {"bos": args.bos, "model": args.model}
        print(f"written: {export(edits, args.target, format=args.to, **{k: v for k, v in options.items() if v})}")
        return 0
    if not args.model:
        raise BundleError("a bundle holds what a model said with its edits: give --model")
    from ..session import Session

    points = sorted({point.kind for edit in edits for point in edit.steps})
    with Session(args.model, **{"points": points} | args.session) as session:
        print(f"written: {export(edits, args.target, session=session, provenance={'imported from': args.source.name})}")
    return 0
