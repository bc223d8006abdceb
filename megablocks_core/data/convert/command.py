"""``megablocks-data convert FROM TO``: its arguments and what it says."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from megablocks_core.data.convert.converting import ConvertReport, convert
from megablocks_core.data.convert.documents import BadSource
from megablocks_core.files.commands import say, tell

NAME = "megablocks-data"
DESCRIPTION = "write the documents of one format in another"
_FORMATS = "an indexed dataset's prefix, datasets:FOLDER, olmo:PATH or mds:FOLDER"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``run`` is given."""
    add = parser.add_argument
    add("source", metavar="FROM", help=_FORMATS)
    add("target", metavar="TO", help="the same; a folder must be new or empty")
    add("--column", help="of the source; input_ids, tokens or text by default")
    add("--source-dtype", metavar="DTYPE", help="of ids in OLMo's files, and in bytes of MDS")
    add("--target-dtype", metavar="DTYPE", help="to store ids in")
    add("--eos", type=int, metavar="ID", help="the id that ends documents in OLMo's files")
    add("--tokenizer", help="for texts: bytes, hf:PATH, tiktoken:NAME or sp:PATH")
    add("--append-eod", action="store_true", help="end texts with the tokenizer's own end")
    add("--shard-bytes", type=int, metavar="N", help="of a file of a target that is a folder")
    add("--compression", metavar="zstd[:LEVEL]", help="of MDS")
    add("--overwrite", action="store_true", help="replace the indexed dataset that is there")
    add("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was written; returns the exit status, 1 for a bad source."""
    try:
        report = _convert(options)
    except BadSource as error:
        say(NAME, str(error))
        return 1
    if options.json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
        return 0
    for line in _lines(options.target, report):
        tell(line)
    return 0


def _convert(options: argparse.Namespace) -> ConvertReport:
    return convert(
        options.source,
        options.target,
        column=options.column,
        source_dtype=options.source_dtype,
        target_dtype=options.target_dtype,
        eos=options.eos,
        tokenizer=options.tokenizer,
        append_eod=options.append_eod,
        shard_bytes=options.shard_bytes,
        compression=options.compression,
        overwrite=options.overwrite,
    )


def _lines(target: str, report: ConvertReport) -> list[str]:
    """What is said of a conversion."""
    files = "1 file" if report.files == 1 else f"{report.files:,} files"
    lines = [
        f"{target}: {report.documents:,} documents, {report.tokens:,} tokens of {report.dtype} "
        f"in {files}"
    ]
    for count, text in (
        (report.empty, "empty texts gave no document"),
        (report.joined, "documents had several sequences, whose bounds are lost"),
        (report.unterminated, "files end with a document without its end"),
        (report.ends_added, "documents were given an end"),
        (report.inner_ends, "ends of document stand inside documents"),
    ):
        if count:
            lines.append(f"{count:,} {text}")
    return lines
