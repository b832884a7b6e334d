"""``specdiff serve DRAFTER --engine vllm|sglang|llamacpp``: another engine with our drafter."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from specdiff.arguments import at_least
from specdiff.cli import codes
from specdiff.errors import FormatError, InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    from specdiff.drafters.config import DFlashConfig

logger = logging.getLogger(__name__)

READS = {
    "vllm": ("zlab", "dflash2", "speculators", "muse", "dspark"),
    "sglang": ("zlab", "dflash2", "dspark"),
    "llamacpp": ("zlab", "dspark"),
}
"""Layouts that each engine loads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("drafter", metavar="DRAFTER", help="folder, hub id or zoo name, in a layout the engine reads")
    parser.add_argument("--engine", choices=sorted(READS), required=True)
    parser.add_argument("--print", action="store_true", dest="show", help="print the command instead of running it")
    parser.add_argument(
        "--target", metavar="MODEL", help="folder or hub id; default: the offline SmolLM2-135M-Instruct"
    )
    parser.add_argument("--block-size", type=at_least(1), metavar="K", help="drafted tokens per pass; default: all")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=at_least(1), default=8000, help="default: %(default)s")
    parser.add_argument("--extra", default="", metavar="OPTIONS", help="more options for the engine, as one string")


def run(args: argparse.Namespace) -> int:
    """Print the commands, or run them."""
    target = args.target if args.target is not None else default_target()
    folder, layout, config = look_at(args.drafter, target)
    steps = commands(args.engine, layout, config, folder, target, args.block_size, args.host, args.port)
    steps[-1] += shlex.split(args.extra)
    if args.show:
        print("\n".join(shlex.join(step) for step in steps))
        return codes.OK
    if len(steps) > 1:
        raise UnsupportedError(
            f"{args.engine} wants files of its own first: run what --print shows, in the folder of {args.engine}"
        )
    if shutil.which(steps[0][0]) is None:
        raise UnsupportedError(
            f"{steps[0][0]} is not installed here: install it, or use --print and run the command there"
        )
    os.execvp(steps[0][0], steps[0])


def default_target() -> str:
    """Folder of the offline default target."""
    from specdiff.hub import ensure_default

    return str(ensure_default())


def look_at(drafter: str, target: str) -> tuple[str, str, DFlashConfig]:
    """Where a drafter lies, the name of its layout, and its settings. No weight is read, but the names of its tensors
    are looked at, on the hub too; where they cannot be had, that is said.

    Raises:
        FormatError: the drafter is of no layout that specdiff reads.
        UnsupportedError: it has what only specdiff runs.
    """
    from specdiff.drafters.formats import layout_of
    from specdiff.drafters.formats.files import CONFIG, read_values
    from specdiff.drafters.formats.layout import TargetShape
    from specdiff.drafters.loading import locate

    where = locate(drafter)
    if isinstance(where, Path):
        folder, name = where, str(where.resolve())
    else:
        from huggingface_hub import hf_hub_download

        folder, name = Path(hf_hub_download(where, CONFIG)).parent, where
    values = read_values(folder)
    layout = layout_of(values)
    shape = None
    if layout.name in ("speculators", "muse"):
        from transformers import AutoConfig

        text = AutoConfig.from_pretrained(target).get_text_config()
        shape = TargetShape(text.num_hidden_layers, text.vocab_size)
    config = layout.settings(values, shape)
    if values.get("specdiff") or (not layout.own_weights and "draft_ids" in names_of(where, folder)):
        raise UnsupportedError(
            f"{drafter} has options that only specdiff runs; write a plain one with specdiff export {drafter} --to zlab"
        )
    return name, layout.name, config


def names_of(where: Path | str, folder: Path) -> set[str]:
    """Names of a drafter's tensors, in ``folder`` or, where that snapshot of a repository lacks them, on the hub.

    Empty, with a warning, where neither has them.
    """
    from specdiff.drafters.formats.files import tensor_names

    names: set[str] = set()
    why = "no safetensors are there"
    try:
        names = tensor_names(folder)
    except FormatError:
        if isinstance(where, Path):
            raise
    if not names and isinstance(where, str):
        from huggingface_hub import errors, get_safetensors_metadata

        try:
            names = set(get_safetensors_metadata(where).weight_map)
        except errors.NotASafetensorsRepoError:
            pass
        except (OSError, errors.HTTPError, errors.SafetensorsParsingError) as error:
            why = str(error).strip().split("\n")[0] or type(error).__name__
    if not names:
        logger.warning("not checked: whether the tensors of %s hold what only specdiff runs (%s)", where, why)
    return names


def commands(
    engine: str,
    layout: str,
    config: DFlashConfig,
    drafter: str,
    target: str,
    block_size: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> list[list[str]]:
    """What to run, in order; the last one serves.

    vLLM and llama.cpp count drafted tokens K, SGLang the tokens of a verify pass, K + 1.

    Args:
        engine: a name of :data:`READS`.
        layout: of the drafter.
        config: of the drafter.
        drafter: its folder or hub id.
        target: folder or hub id.
        block_size: K, at most what the drafter was made for (default).
        host: where to listen.
        port: where to listen.

    Raises:
        UnsupportedError: the engine does not read this layout.
        InvalidInputError: a block size that the drafter does not have.
    """
    if layout not in READS[engine]:
        readable = " or ".join(name for name in READS[engine] if name in ("zlab", "speculators"))
        raise UnsupportedError(
            f"{engine} does not read the {layout} layout; specdiff export DRAFTER OUT --to {readable}"
        )
    count = config.block_size if block_size is None else block_size
    if count > config.block_size:
        raise InvalidInputError(
            f"--block-size {count}: this drafter drafts at most {config.block_size} tokens per pass"
        )
    listen = ["--host", host, "--port", str(port)]
    sequential = config.transition_rank > 0
    if engine == "vllm":
        method = "dspark" if sequential else "dflash"
        speculation = {"method": method, "model": drafter, "num_speculative_tokens": count}
        return [["vllm", "serve", target, "--speculative-config", json.dumps(speculation), *listen]]
    if engine == "sglang":
        command = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm"]
        command += ["DSPARK" if sequential else "DFLASH", "--speculative-draft-model-path", drafter]
        if not sequential:
            command += ["--speculative-num-draft-tokens", str(count + 1)]
        elif block_size is not None:
            raise InvalidInputError("--block-size: SGLang takes a DSpark drafter's block size from its files")
        return [[*command, *listen]]
    convert = ["python", "convert_hf_to_gguf.py"]
    return [
        [*convert, target, "--outfile", "target.gguf"],
        [*convert, drafter, "--target-model-dir", target, "--outtype", "bf16", "--outfile", "drafter.gguf"],
        ["llama-server", "-m", "target.gguf", "-md", "drafter.gguf", "--spec-type",
         "draft-dspark" if sequential else "draft-dflash", "--spec-draft-n-max", str(count), *listen],
    ]  # fmt: skip
