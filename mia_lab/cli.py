"""The `mia-lab` command."""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .bundles.commands import bundle_commands
from .errors import MiaError
from .serve.commands import server_commands


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
    bench = commands.add_parser("bench", help="measure what taps cost, beside the same model without them")
    bench.add_argument("model", nargs="*", default=["demo"], help='shapes (llama-8b, ...), "demo", Hugging Face ids or paths')
    bench.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128, 256], help="requests at a time")
    bench.add_argument("--tokens", type=int, nargs=2, default=[128, 128], metavar=("IN", "OUT"), help="of each request")
    bench.add_argument("--rounds", type=int, default=7, help="pairs of runs of each case")
    bench.add_argument("--case", nargs="+", default=[], help="only these cases")
    bench.add_argument("--profile", nargs="+", default=[], metavar="CASE", help="cases of which to take a GPU profile")
    bench.add_argument("--layers", type=int, help="cut a shape to so many blocks")
    bench.add_argument("--alone", action="store_true", help="without the native engine, for a model that fits once: beside its idle self")
    bench.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="vLLM options for both engines")
    bench.add_argument("--session", type=json.loads, default={}, metavar="JSON", help="Session arguments for the tapped one; with --http, "
                       "what additional_config's mia_lab has beside its folder")
    bench.add_argument("--peers", action="store_true", help="also run other tools on the same work, those that are installed")
    bench.add_argument("--http", action="store_true", help="as clients see it: two vLLM servers, without mia_lab and with a folder of "
                       "bundles, loaded in turn by streamed completions; steering by name, captures fetched. A step is then the time from "
                       "token to token in a stream. Not with --alone, --peers or --profile")
    bench.add_argument("--out", type=Path, default=Path("overhead.json"), help="raw figures; a plot goes beside it")
    run = {"demo": _demo, "card": _card, "bench": _bench} | bundle_commands(commands) | server_commands(commands)
    args = parser.parse_args(argv)
    try:
        return run[args.command](args)
    except (MiaError, OSError) as error:
        print(f"mia-lab {args.command}: {error}", file=sys.stderr)
        return 1


def _demo(args: argparse.Namespace) -> int:
    from . import demo as tour

    print(f"report: {tour.run(args.out)}")
    return 0


def _card(args: argparse.Namespace) -> int:
    from .bench.card import card

    found = card(args.model, **args.engine)
    print(found.markdown if args.markdown else found)
    return int(not found.works)


def _bench(args: argparse.Namespace) -> int:
    if args.http:
        return _bench_http(args)
    from .bench import machine, peers, report
    from .bench.cases import Work
    from .bench.overhead import Pair

    works = [Work(batch, *args.tokens) for batch in args.batch]
    about, facts, rows, others = machine.about(), [], [], []
    for model in args.model:
        pair = Pair.load(model, args.engine, works, args.layers, args.alone, **args.session)
        facts.append(pair.facts())
        print(f"{report.describe(facts[-1])}\n{report.text([])}", flush=True)
        for work in works:
            for row in pair.measure(work, args.rounds, args.case, args.profile):
                rows.append(row)
                print(report.text([row]).splitlines()[-1], flush=True)
            for found in peers.measure(pair, work, args.rounds, list(peers.installed())) if args.peers else ():
                others.append(found)
                print(report.describe_peer(found), flush=True)
        pair.close()
        report.save(args.out, about, facts, rows, others)
    report.plot(args.out.with_suffix(".png"), rows)
    return 0


def _bench_http(args: argparse.Namespace) -> int:
    from .bench import http, machine, report
    from .bench.cases import Work

    http.check(args.case, [f"--{name}" for name in ("alone", "peers", "profile") if getattr(args, name)])
    works = [Work(batch, *args.tokens) for batch in args.batch]
    about, rows = machine.about(), []
    for model in args.model:
        with http.serving(model, args.engine, works, args.layers, args.session, args.case) as servers:
            print(f"{servers.name}\n{report.text([])}", flush=True)
            for row in (row for work in works for row in servers.measure(work, args.rounds)):
                rows.append(row)
                print(report.text([row]).splitlines()[-1], flush=True)
        report.save(args.out, about, [], rows)
    report.plot(args.out.with_suffix(".png"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
