"""`vlarl push`: upload a checkpoint or an adapter, with its model card, to the Hugging Face hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from vlarl.cli import arguments as args
from vlarl.config.run_checkpoints import locate_checkpoint, refuse_unknown
from vlarl.config.training_data import local_folder
from vlarl.errors import UsageError


def push(arguments: Sequence[str]) -> int:
    """Upload a checkpoint with a model card; or print what would be uploaded."""
    parser = args.Parser(
        "push",
        "Upload a checkpoint or an adapter to the Hugging Face hub, with a model card: base, algorithm, tasks, success "
        "before and after with intervals, options, and how to load it. A README.md in the folder replaces the card.",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="checkpoint or adapter folder, or a run by its name or folder")
    add("repository", metavar="ORG/NAME", help="model repository; it is created if it does not exist")
    add("--private", action="store_true", help="make a new repository private")
    add("--dry-run", action="store_true", help="print the files, their size and the card; upload nothing")
    args.add_root(parser)
    given = parser.parse_args(arguments)
    folder = _folder(given.checkpoint, given.root)

    from vlarl.evaluation.record import find_records, results_root
    from vlarl.evaluation.run import fingerprint
    from vlarl.export.card import Source, model_card
    from vlarl.export.hub import CARD, check_destination, check_folder, check_name, push_folder, pushed_files

    check_name(given.repository)
    check_folder(folder)
    if not given.dry_run:
        check_destination(given.repository)
    own = fingerprint(folder)
    records = [
        record
        for record in find_records(results_root(str(folder)))
        if record.settings.fingerprint == own and record.result.complete and record.settings.replay_of is None
    ]
    source = Source.of(folder, records)
    card = None if (folder / CARD).is_file() else model_card(source, given.repository)
    for warning in source.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if given.dry_run:
        files = pushed_files(folder)
        for path in files:
            print(f"{_size(path.stat().st_size):>10}  {path.relative_to(folder)}")
        print(f"{_size(sum(path.stat().st_size for path in files)):>10}  in total, to {given.repository}; not uploaded")
        print(f"\n{card or (folder / CARD).read_text(encoding='utf-8')}")
        return 0
    print(f"pushed: {push_folder(folder, given.repository, given.private, card)}")
    return 0


def _folder(checkpoint: str, root: str) -> Path:
    located = locate_checkpoint(checkpoint, root)
    refuse_unknown(located.path, root)
    if located.note:
        print(located.note, file=sys.stderr)
    found = located.path
    if found.startswith(("builtin:", "init:")):
        raise UsageError(f"{found} is part of vlarl: there is nothing to push. Name a checkpoint of your own run.")
    folder = local_folder(found)
    if folder is None:
        raise UsageError(
            f"there is no checkpoint {checkpoint} here: name its folder, such as runs/<name>/checkpoints/final, or the "
            "run. `vlarl status` lists the runs."
        )
    return folder


def _size(num_bytes: int) -> str:
    """`15.1 MB`."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
