"""Look at checkpoints, check, compare, convert, average and delete them.

    megablocks-ckpt inspect PATH [--json]
    megablocks-ckpt verify PATH...
    megablocks-ckpt diff A B
    megablocks-ckpt convert SRC DST [--config config.json]
    megablocks-ckpt average PATH... --out OUT
    megablocks-ckpt prune ROOT [--keep-last N] [--keep-every N] [--leftovers] [--dry-run]

Exit status: 0 for success; 1 for a fault that was found; 2 for wrong usage. ``diff``: 0 if both
hold the same, 1 if they differ, 2 for trouble.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from megablocks_core.ckpt.format.verifying import verify
from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.places.places import below, root_of
from megablocks_core.ckpt.saving.retention import check_keep, outdated, prune
from megablocks_core.ckpt.tools.averaging import average
from megablocks_core.ckpt.tools.converting import convert
from megablocks_core.ckpt.tools.differing import diff
from megablocks_core.ckpt.tools.inspecting import inspect, inspect_text
from megablocks_core.ckpt.tools.opening import open_checkpoint
from megablocks_core.files.commands import run_command, say, tell
from megablocks_core.files.progress import Progress

_NAME = "megablocks-ckpt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``megablocks-ckpt``; return its exit status."""
    options = _parser().parse_args(arguments)
    return run_command(
        _NAME,
        lambda: options.run(options),
        faults=(CheckpointError, OSError),
        fault_status=2 if options.run is _diff else 1,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Look at checkpoints, check, compare, convert, average and delete them.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("inspect", help="say what is in a checkpoint; reads no tensor")
    one.add_argument("path", metavar="PATH", help="a checkpoint's folder; torch DCP's too")
    one.add_argument("--json", action="store_true", help="for programs")
    one.set_defaults(run=_inspect)

    one = commands.add_parser("verify", help="read every block and compare it with its hash")
    one.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint's folder")
    one.set_defaults(run=_verify)

    one = commands.add_parser("diff", help="compare names, shapes, dtypes, values and JSON")
    one.add_argument("paths", nargs=2, metavar="PATH", help="a checkpoint; torch DCP's too")
    one.set_defaults(run=_diff)

    one = commands.add_parser(
        "convert", help="torch DCP to this library's form or back; Megatron's weights to ours"
    )
    one.add_argument("source", metavar="SRC", help="a checkpoint of any of the three")
    one.add_argument("target", metavar="DST", help="a new or empty folder")
    one.add_argument("--config", help="the model's config.json, for Megatron's weights")
    one.set_defaults(run=_convert)

    one = commands.add_parser("average", help="write the mean of the weights")
    one.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint's folder")
    one.add_argument("--out", required=True, help="a new or empty folder")
    one.set_defaults(run=_average)

    one = commands.add_parser("prune", help="delete old checkpoints; the newest always stays")
    one.add_argument("root", metavar="ROOT", help="the folder of the checkpoints' folders")
    one.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N")
    one.add_argument(
        "--keep-every", type=int, metavar="N", help="keep those whose number N divides, too"
    )
    one.add_argument(
        "--leftovers", action="store_true", help="delete what killed saves left; none may go on"
    )
    one.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    one.set_defaults(run=_prune)
    return parser


def _inspect(options: argparse.Namespace) -> int:
    found = inspect(options.path)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for line in inspect_text(found):
            tell(line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    status = 0
    for path in options.paths:
        progress, fault = Progress("verify"), ""
        try:
            verify(path, progress=progress.show)
        except (CheckpointError, OSError) as error:
            fault = str(error)
        finally:
            progress.close()
        if fault:
            say(_NAME, fault)
            status = 1
        else:
            tell(f"{path}: whole")
    return status


def _diff(options: argparse.Namespace) -> int:
    one, other = (open_checkpoint(path) for path in options.paths)
    common = one.tensors.keys() & other.tensors.keys()
    progress = Progress("diff", sum(one.tensors[name].nbytes for name in common))
    status = 0
    try:
        for line in diff(one, other, progress=progress):
            progress.close()
            tell(line)
            status = 1
    finally:
        progress.close()
    return status


def _convert(options: argparse.Namespace) -> int:
    for line in convert(options.source, options.target, config=options.config):
        say(_NAME, line)
    print(options.target)
    return 0


def _average(options: argparse.Namespace) -> int:
    average(options.paths, options.out)
    print(options.out)
    return 0


def _prune(options: argparse.Namespace) -> int:
    keep = options.keep_last, options.keep_every
    if keep == (None, None) and not options.leftovers:
        raise ValueError("prune must have --keep-last, --keep-every or --leftovers")
    if options.dry_run:
        check_keep(*keep)
        root = root_of(options.root)
        names = root.leftovers() if options.leftovers else []
        paths = [below(options.root, name) for name in names + outdated(root, *keep)]
    else:
        paths = prune(
            options.root,
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            leftovers=options.leftovers,
        )
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
