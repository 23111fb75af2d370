"""The `mia-lab` command."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .errors import MiaError


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return the exit status."""
    parser = argparse.ArgumentParser(prog="mia-lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="steer the embedded model and write a self-contained HTML report")
    demo.add_argument("--out", type=Path, default=Path("mia_lab_demo.html"), help="where the report goes")
    args = parser.parse_args(argv)
    from . import demo as tour

    try:
        print(f"report: {tour.run(args.out)}")
    except MiaError as error:
        print(f"mia-lab {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
