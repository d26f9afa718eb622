"""`vlarl merge`: an adapter and its base become one checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vlarl.cli import arguments as args
from vlarl.config.paths import brief
from vlarl.config.run_checkpoints import locate_checkpoint, refuse_unknown


def merge(arguments: Sequence[str]) -> int:
    """Merge an adapter into its base, print the error, and push the result to the hub if requested."""
    parser = args.Parser(
        "merge", "Fold a LoRA adapter into its base and write a checkpoint in the original layout, checked on a probe."
    )
    add = parser.add_argument
    add("adapter", metavar="ADAPTER", help="adapter folder, or a run's name or folder")
    add("out", metavar="OUT", help="new folder for the merged checkpoint")
    add("--base", metavar="B", help="base model of the adapter; by default the one that the adapter names")
    add("--dtype", choices=("float32", "bfloat16"), help="precision of the written weights; by default the base's")
    add("--device", default="cpu", metavar="D", help="device of the computation, in float32: cpu, cuda, cuda:1…")
    add("--max-shard-gb", type=args.positive, default=5, metavar="N", help="largest size of a weights file, in GB")
    add("--push-to-hub", metavar="ORG/NAME", help="upload the folder to this model repository")
    add("--private", action="store_true", help="make that repository private")
    args.add_root(parser)
    given = parser.parse_args(arguments)
    located = locate_checkpoint(given.adapter, given.root)
    refuse_unknown(located.path, given.root)
    if located.note:
        print(located.note, file=sys.stderr, flush=True)

    from vlarl.devices import choose_device
    from vlarl.export.card import Source, model_card
    from vlarl.export.hub import check_destination, push_folder
    from vlarl.export.merge import merge as run_merge

    if given.push_to_hub:
        check_destination(given.push_to_hub)
    result = run_merge(
        located.path,
        given.out,
        base=given.base,
        dtype=given.dtype,
        device=choose_device(given.device),
        max_shard_bytes=given.max_shard_gb * 10**9,
    )
    print(f"merged:      {brief(result.out)} ({result.dtype})")
    print(f"base:        {result.base}")
    print(f"logits:      within {result.logit_error:.1e} of the adapter model's, in float32")
    if result.rounding_error:
        print(f"rounding:    {result.dtype} changes them by up to {result.rounding_error:.1e}")
        print(f"adapter:     {result.fraction_kept:.1%} of it remains in {result.dtype} weights")
    if result.warning is not None:
        print(f"warning: {result.warning}", file=sys.stderr)
    if given.push_to_hub:
        card = model_card(Source.of(result.out), given.push_to_hub)
        print(f"hub:         {push_folder(result.out, given.push_to_hub, given.private, card)}")
    return 0
