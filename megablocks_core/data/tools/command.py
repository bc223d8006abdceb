"""Look at datasets, check, compare, merge and split them, and read what a run is given.

    megablocks-data inspect PREFIX... | --recipe FILE
    megablocks-data verify PREFIX...
    megablocks-data check PREFIX... [--against PREFIX...]
    megablocks-data show PREFIX --document N | --recipe FILE --step S
    megablocks-data merge OUT PREFIX...
    megablocks-data split PREFIX --out OUT --fractions 0.9,0.1
    megablocks-data plot PREFIX... | --recipe FILE --out FILE.svg
    megablocks-data convert FROM TO

Exit status: 0 for success, and of ``check`` that nothing was found; 1 for a fault or a finding;
2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from megablocks_core.data.convert import command as convert
from megablocks_core.data.tokenize.encoders import open_encoder
from megablocks_core.data.tools.checking import MEMORY, PAIRS, check
from megablocks_core.data.tools.documents import DamagedDataset
from megablocks_core.data.tools.inspecting import inspect
from megablocks_core.data.tools.merging import merge
from megablocks_core.data.tools.mixing import inspect_recipe
from megablocks_core.data.tools.plotting import plot_lengths, plot_recipe
from megablocks_core.data.tools.recipe import open_recipe
from megablocks_core.data.tools.showing import show, show_step
from megablocks_core.data.tools.splitting import DOCUMENT, WAYS, split
from megablocks_core.data.tools.tables import (
    as_json,
    check_lines,
    inspection_lines,
    part_lines,
    recipe_lines,
    sample_lines,
    table,
)
from megablocks_core.data.tools.verifying import verify
from megablocks_core.files.commands import run_command, say, tell
from megablocks_core.files.progress import Progress

NAME = "megablocks-data"
SHOWN = 2000  # tokens of a document


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``megablocks-data``; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    options.command_line = [NAME, *given]
    return run_command(NAME, lambda: _run(options), faults=(OSError, RuntimeError))


def _run(options: argparse.Namespace) -> int:
    try:
        return options.run(options)
    except DamagedDataset as error:
        say(NAME, str(error))
        return 1
    except IndexError as error:  # a document or a step that is not there
        raise ValueError(str(error)) from error


def _inspect(options: argparse.Namespace) -> int:
    if options.recipe is not None:
        if options.prefixes:
            raise ValueError("PREFIX and --recipe must not be given together")
        used = inspect_recipe(open_recipe(options.recipe))
        _print(options, as_json(used), recipe_lines(used))
        return 0
    _refuse_none(options.prefixes)
    size = _vocab_size(options)
    found = []
    with _progress("inspect", options.prefixes) as progress:
        for prefix in options.prefixes:
            read = not options.index_only
            found.append(inspect(prefix, vocab_size=size, read_ids=read, progress=progress))
    lines = [line for one in found for line in inspection_lines(one)]
    _print(options, {"datasets": as_json(found)}, lines)
    return 0


def _verify(options: argparse.Namespace) -> int:
    size = _vocab_size(options)
    found = []
    with _progress("verify", options.prefixes) as progress:
        for prefix in options.prefixes:
            found.append(verify(prefix, vocab_size=size, progress=progress))
    lines = []
    for one in found:
        whole = "whole" if one.hashed else "whole by its index; no manifest has hashes of it"
        lines += one.faults or [f"{one.prefix}: {whole}"]
    _print(options, {"datasets": as_json(found)}, lines)
    return int(any(one.faults for one in found))


def _check(options: argparse.Namespace) -> int:
    with _progress("check", [*options.prefixes, *options.against]) as progress:
        found = check(
            options.prefixes,
            against=options.against,
            memory=options.memory << 20,
            pairs=options.pairs,
            folder=options.folder,
            progress=progress,
        )
    _print(options, {**as_json(found), "found": found.found}, check_lines(found))
    return int(found.found)


def _show(options: argparse.Namespace) -> int:
    most = options.most
    if options.recipe is not None:
        if options.prefix is not None or options.document is not None or options.step is None:
            raise ValueError("show must have --recipe and --step, or PREFIX and --document")
        recipe = open_recipe(options.recipe)
        samples = show_step(recipe, options.step, tokenizer=options.tokenizer, most=most)
        _print(options, {"samples": as_json(samples)}, sample_lines(samples))
        return 0
    if options.prefix is None or options.document is None or options.step is not None:
        raise ValueError("show must have --recipe and --step, or PREFIX and --document")
    part = show(options.prefix, options.document, tokenizer=options.tokenizer, most=most)
    _print(options, as_json(part), part_lines(part))
    return 0


def _merge(options: argparse.Namespace) -> int:
    with _progress("merge", options.prefixes) as progress:
        merged = merge(
            options.prefixes,
            options.out,
            overwrite=options.overwrite,
            command_line=options.command_line,
            progress=progress,
        )
    widened = ", which some parts were converted to" if merged.widened else ""
    line = (
        f"{merged.prefix}: {merged.documents:,} documents, {merged.tokens:,} tokens of "
        f"{merged.dtype}{widened}"
    )
    _print(options, as_json(merged), [line])
    return 0


def _split(options: argparse.Namespace) -> int:
    with _progress("split", [options.prefix]) as progress:
        written = split(
            options.prefix,
            options.out,
            fractions=options.fractions,
            seed=options.seed,
            names=options.names.split(",") if options.names is not None else None,
            by=options.by,
            overwrite=options.overwrite,
            command_line=options.command_line,
            progress=progress,
        )
    rows = [(one.prefix, f"{one.documents:,}", f"{one.tokens:,}") for one in written]
    _print(options, {"splits": as_json(written)}, table(("split", "documents", "tokens"), rows))
    return 0


def _plot(options: argparse.Namespace) -> int:
    if (options.recipe is None) == (not options.prefixes):
        raise ValueError("plot must have PREFIX or --recipe, and not both")
    if options.recipe is not None:
        plot_recipe(open_recipe(options.recipe), options.out)
    else:
        plot_lengths(options.prefixes, options.out)
    tell(options.out)
    return 0


def _print(options: argparse.Namespace, value: Any, lines: Iterable[str]) -> None:
    if options.json:
        print(json.dumps(value, indent=1, allow_nan=False))
        return
    for line in lines:
        tell(line)


def _vocab_size(options: argparse.Namespace) -> int | None:
    if options.tokenizer is None:
        return options.vocab_size
    if options.vocab_size is not None:
        raise ValueError("--vocab-size and --tokenizer must not be given together")
    return open_encoder(options.tokenizer).vocab_size


def _refuse_none(prefixes: Sequence[str]) -> None:
    if not prefixes:
        raise ValueError("at least one PREFIX must be given, or --recipe")


@contextmanager
def _progress(what: str, prefixes: Sequence[str]) -> Iterator[Progress]:
    """Of all tokens of some datasets; the line goes before anything else is said."""
    total = 0
    for prefix in prefixes:
        with suppress(OSError):
            total += os.path.getsize(prefix + ".bin")
    progress = Progress(what, total)
    try:
        yield progress
    finally:
        progress.close()


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=NAME, description=about)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_looking(commands)
    _add_writing(commands)
    return parser


def _add_looking(commands: Any) -> None:
    one = commands.add_parser("inspect", help="count documents and tokens; show their lengths")
    one.add_argument("prefixes", nargs="*", metavar="PREFIX", help="a dataset's files, or URL")
    one.add_argument("--recipe", metavar="FILE", help="show what each source of it gives")
    one.add_argument("--index-only", action="store_true", help="do not read the tokens for ids")
    _add_vocabulary(one)
    _finish(one, _inspect)

    one = commands.add_parser("verify", help="compare every byte and entry with what is recorded")
    one.add_argument("prefixes", nargs="+", metavar="PREFIX", help="a dataset's files, or URL")
    _add_vocabulary(one)
    _finish(one, _verify)

    one = commands.add_parser("check", help="find documents that are there twice")
    one.add_argument("prefixes", nargs="+", metavar="PREFIX", help="a dataset's files, or URL")
    one.add_argument(
        "--against", nargs="+", default=[], metavar="PREFIX", help="what they must not overlap"
    )
    one.add_argument(
        "--memory", type=int, default=MEMORY >> 20, metavar="MIB", help="to use (%(default)s)"
    )
    one.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help="to name (%(default)s)")
    one.add_argument("--folder", metavar="FOLDER", help="for 24 bytes a document, while it runs")
    _finish(one, _check)

    one = commands.add_parser("show", help="print a document, or the documents of a step")
    one.add_argument("prefix", nargs="?", metavar="PREFIX", help="a dataset's files, or URL")
    one.add_argument("--document", type=int, metavar="N", help="its number, from 0 on")
    one.add_argument("--recipe", metavar="FILE", help="of the run")
    one.add_argument("--step", type=int, metavar="S", help="its number, from 0 on")
    one.add_argument("--tokenizer", help="bytes, hf:PATH, tiktoken:NAME or sp:PATH; for the text")
    one.add_argument(
        "--most", type=int, default=SHOWN, metavar="N", help="tokens of each (%(default)s)"
    )
    _finish(one, _show)

    one = commands.add_parser("plot", help="draw lengths, or a recipe's mixture and epochs")
    one.add_argument("prefixes", nargs="*", metavar="PREFIX", help="a dataset's files, or URL")
    one.add_argument("--recipe", metavar="FILE", help="of a run")
    one.add_argument("--out", required=True, metavar="FILE.svg", help="the picture")
    _finish(one, _plot)


def _add_writing(commands: Any) -> None:
    one = commands.add_parser("merge", help="write several datasets as one")
    one.add_argument("out", metavar="OUT", help="the new dataset's prefix")
    one.add_argument("prefixes", nargs="+", metavar="PREFIX", help="a part")
    one.add_argument("--overwrite", action="store_true", help="replace the dataset that is there")
    _finish(one, _merge)

    one = commands.add_parser("convert", help=convert.DESCRIPTION)
    convert.add_arguments(one)
    one.set_defaults(run=convert.run)

    one = commands.add_parser("split", help="write each document to one of several datasets")
    one.add_argument("prefix", metavar="PREFIX", help="a dataset's files, or URL")
    one.add_argument("--out", required=True, help="what the new prefixes begin with")
    one.add_argument("--fractions", required=True, metavar="A,B", help="of each, such as 0.9,0.1")
    one.add_argument("--names", metavar="A,B", help="of each, such as train,valid; by default 0,1")
    one.add_argument("--seed", type=int, default=0, help="of the hash (%(default)s)")
    one.add_argument(
        "--by", default=DOCUMENT, choices=WAYS, help="each document's hash, or consecutive ranges"
    )
    one.add_argument("--overwrite", action="store_true", help="replace the datasets that are there")
    _finish(one, _split)


def _add_vocabulary(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below")
    parser.add_argument("--tokenizer", help="ids must be of it")


def _finish(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


if __name__ == "__main__":
    sys.exit(main())
