"""The ``specdiff`` command. A subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``.

To add one, write the module and give it a line in :data:`COMMANDS`; it is imported only when it is called.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from specdiff.cli import codes

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("specdiff.cli.demo", "the default pair on a few prompts, plain and speculative side by side"),
    "generate": ("specdiff.cli.generate", "continue a prompt"),
    "chat": ("specdiff.cli.chat", "talk to a model"),
    "diffuse": ("specdiff.cli.diffuse", "write with a diffusion language model, the canvas shown live"),
    "check": ("specdiff.cli.check", "say whether a model can be served, and if not why"),
    "audit": ("specdiff.cli.audit", "check on your own pair that nothing is lost"),
    "bench": ("specdiff.bench.cli", "measure speed here, where it comes from, and whether drafting pays"),
    "tune": ("specdiff.cli.tune", "measure what passes cost here, and which block lengths pay"),
    "train": ("specdiff.cli.train", "train a drafter for a model"),
    "export": ("specdiff.cli.export", "write a drafter for other programs"),
    "serve": ("specdiff.cli.serve", "start vLLM, SGLang or llama.cpp with a drafter, or print how"),
    "env": ("specdiff.cli.env", "report versions, devices, caches"),
}
"""Command name: (module, one line of help)."""

_EPILOG = """\
exit codes: 0 done; 1 a check failed or something went wrong; 2 wrong usage; 3 this model, drafter or option is not
supported; 130 interrupted; 141 the reader of a pipe went away. Set SPECDIFF_DEBUG=1 to see tracebacks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; those of the process when None.

    Returns:
        The exit code (see :mod:`specdiff.cli.codes`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        parser = _parser(chosen)
        args = parser.parse_args(arguments)
        args.words = arguments
        if args.command is None:
            parser.print_help(sys.stderr)
            return codes.USAGE
        logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(name)s: %(message)s")
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return codes.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        return codes.PIPE
    except Exception as error:
        known = codes.code_of(error)
        if known is None or os.environ.get("SPECDIFF_DEBUG"):
            raise
        print(f"specdiff: {_first_paragraph(error)}", file=sys.stderr)
        return known


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """All commands by name; only the chosen one's module is imported."""
    from specdiff import __version__

    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="specdiff",
        description="Lossless speculative decoding of Hugging Face causal LMs with block-diffusion drafters.",
        epilog=_EPILOG,
        formatter_class=shape,
    )
    parser.add_argument("--version", action="version", version=f"specdiff {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=_EPILOG,
            formatter_class=shape,
        )
        if name == chosen:
            loaded = importlib.import_module(module)
            command.add_argument("--verbose", action="store_true", help="show what specdiff logs")
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    return parser


def _first_paragraph(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.split("\n\n")[0]
