"""The `mia-lab` command."""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .errors import MiaError


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return the exit status."""
    parser = argparse.ArgumentParser(prog="mia-lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="steer the embedded model and write a self-contained HTML report")
    demo.add_argument("--out", type=Path, default=Path("mia_lab_demo.html"), help="where the report goes")
    card = commands.add_parser("card", help="load a model and print what works on it: a verdict per point, edit and feature")
    card.add_argument("model", help='"demo", a Hugging Face id or a path')
    card.add_argument("--markdown", action="store_true", help="print a Markdown table")
    card.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help='vLLM options, as in \'{"dtype": "float32"}\'')
    args = parser.parse_args(argv)
    try:
        return {"demo": _demo, "card": _card}[args.command](args)
    except MiaError as error:
        print(f"mia-lab {args.command}: {error}", file=sys.stderr)
        return 1


def _demo(args: argparse.Namespace) -> int:
    from . import demo as tour

    print(f"report: {tour.run(args.out)}")
    return 0


def _card(args: argparse.Namespace) -> int:
    from .bench.card import card
    from .show.parts import Table
    from .show.text import render

    lines = card(args.model, **args.engine)
    rows = tuple((line.what, line.name, line.verdict, line.seen) for line in lines)
    header = ("", "name", "verdict", "seen")
    if args.markdown:
        print("\n".join("| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *rows)))
    else:
        print(render(Table(header, rows)))
    return int(any(line.verdict in ("FAILED", "refused") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
