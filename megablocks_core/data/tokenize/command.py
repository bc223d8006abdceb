"""Tokenise text files, JSON lines and Parquet into an indexed dataset.

    megablocks-tokenize INPUT... --out PREFIX --tokenizer bytes|hf:PATH|tiktoken:NAME|sp:PATH

Exit status: 0 for success; 1 for a bad line, a file that cannot be read or a full disk; 2 for
wrong usage. After a kill or a full disk, the same command goes on.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from megablocks_core.data.tokenize.fast_engine import AUTO, ENGINES
from megablocks_core.data.tokenize.reading import BadText
from megablocks_core.data.tokenize.tokenizing import (
    MAX_BYTES,
    POLICIES,
    REPORT,
    STOP,
    TokenizeReport,
    tokenize,
)
from megablocks_core.files.commands import run_command, say

NAME = "megablocks-tokenize"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``megablocks-tokenize``; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    return run_command(NAME, lambda: _run(options, given), faults=(OSError, RuntimeError))


def _run(options: argparse.Namespace, given: list[str]) -> int:
    append_eod = options.eod if options.eod is not None else options.append_eod
    if isinstance(append_eod, str) and append_eod.isdecimal():
        append_eod = int(append_eod)
    try:
        report = tokenize(
            options.inputs,
            options.out,
            tokenizer=options.tokenizer,
            engine=options.engine,
            workers=options.workers,
            append_eod=append_eod,
            key=options.key,
            on_bad=options.on_bad,
            max_bytes=options.max_bytes,
            suffixes=options.suffix,
            overwrite=options.overwrite,
            command_line=[NAME, *given],
        )
    except BadText as error:
        say(NAME, str(error))
        return 1
    for line in _lines(options.out, options.on_bad, report):
        print(line)
    return 0


def _lines(prefix: str, on_bad: str, report: TokenizeReport) -> list[str]:
    """What is said of a run."""
    lines = [
        f"{prefix}: {report.documents:,} documents, {report.tokens:,} tokens of {report.dtype} "
        f"from {report.text_bytes:,} bytes of text, by {report.engine}"
    ]
    if report.resumed:
        lines.append(f"went on after {report.resumed:,} units of work")
    if report.empty:
        lines.append(f"{report.empty:,} empty texts gave no document")
    if report.inner_ends:
        lines.append(f"{report.inner_ends:,} ends of document stood in the texts")
    lines += [f"left out: {count:,} x {reason}" for reason, count in report.bad.items()]
    if report.bad and on_bad == REPORT:
        lines.append(f"their places: {shlex.quote(prefix + '.bad.jsonl')}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="files and folders; .jsonl, .parquet or text")
    add("--out", required=True, metavar="PREFIX", help="of the dataset's files")
    add("--tokenizer", required=True, help="bytes, hf:PATH, tiktoken:NAME or sp:PATH")
    add("--engine", default=AUTO, choices=ENGINES, help="of Hugging Face's tokenizers")
    add("--workers", type=int, metavar="N", help="side by side; one a core by default")
    add("--append-eod", action="store_true", help="end documents with the tokenizer's own end")
    add("--eod", metavar="TOKEN", help="end documents with this token or id")
    add("--key", default="text", help="of the text in JSON, or its column in Parquet")
    add("--on-bad", default=STOP, choices=POLICIES, help="what to do about lines without text")
    add("--max-bytes", type=int, default=MAX_BYTES, metavar="N", help="a longer text is bad")
    add("--suffix", action="append", default=[], help="take such files of folders only")
    add("--overwrite", action="store_true", help="replace the dataset that is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
