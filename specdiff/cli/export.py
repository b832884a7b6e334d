"""``specdiff export DRAFTER --to LAYOUT OUT``: a drafter for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from specdiff.cli import codes
from specdiff.cli.common import add_target_arguments, load_model, target_options
from specdiff.errors import InvalidInputError

LAYOUTS = ("zlab", "speculators", "muse", "dflash2", "dspark")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("drafter", metavar="DRAFTER", help="folder, hub id or zoo name")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument(
        "--to",
        choices=LAYOUTS,
        required=True,
        help="zlab: vLLM, SGLang, llama.cpp's converter; speculators: vLLM; muse: transformers' own runner; "
        "dflash2, dspark: drafters with those heads",
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="FEATURE", help="leave out what the layout cannot hold"
    )
    parser.add_argument("--mask-token-id", type=int, metavar="ID", help="with --without direct-path: fills the block")
    parser.add_argument(
        "--weights", choices=("float32", "bfloat16", "float16"), help="dtype on disk; default: as they are"
    )
    parser.add_argument("--transformers", metavar="VERSION", help="with --to muse: the version that will run it")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    add_target_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Export."""
    import torch

    from specdiff.drafters.formats.export import export

    refuse_idle(args)
    if args.out.exists() and not args.out.is_dir():
        raise InvalidInputError(f"{args.out} is not a folder")
    if args.out.is_dir() and any(args.out.iterdir()) and not args.force:
        raise InvalidInputError(f"{args.out} is not empty: name another folder, or give --force")
    target = load_model(args)[0] if needs_target(args) else None
    drafter = load_unbound(args, target)
    exported = export(
        drafter,
        args.out,
        args.to,
        target=target,
        leave_out=args.without,
        mask_token_id=args.mask_token_id,
        dtype=getattr(torch, args.weights) if args.weights else None,
        transformers=args.transformers,
    )
    print(f"{args.out}: {args.to}, {exported.block_size} drafted tokens per pass")
    return codes.OK


def refuse_idle(args: argparse.Namespace) -> None:
    """Options of a target that is not loaded.

    Raises:
        InvalidInputError: names them.
    """
    names = ("dtype", "device", "threads", "revision", "trust_remote_code")
    idle = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    if idle and not needs_target(args):
        raise InvalidInputError(f"{', '.join(idle)} are about the target, and none is loaded here: name it by --target")


def needs_target(args: argparse.Namespace) -> bool:
    """Whether to load the target: when it is named, or when the drafter is one of the zoo's, whose target is known."""
    from specdiff.drafters.loading import zoo

    return args.target is not None or args.drafter in zoo()


def load_unbound(args: argparse.Namespace, target: Any) -> Any:
    """The drafter that the arguments name, not bound to anything."""
    from specdiff.drafters.loading import locate
    from specdiff.drafters.saving import load

    keep = ("cache_dir", "local_files_only", "token")
    options = {name: value for name, value in target_options(args).items() if name in keep}
    return load(locate(args.drafter), target=target, dtype=None, **options)
