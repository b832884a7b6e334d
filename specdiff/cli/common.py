"""What several commands share: which pair, which sampling, how a prompt becomes ids."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdiff.arguments import at_least, share
from specdiff.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

    from specdiff.drafters.base import Drafter

logger = logging.getLogger(__name__)


def inside(text: str) -> float:
    """An argparse type: a number in (0, 1)."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text}")
    return value


def one_target(args: argparse.Namespace) -> str | None:
    """The model of a command that takes it in its own place as well as by ``--target``."""
    if args.model is not None and args.target is not None and args.model != args.target:
        raise InvalidInputError(f"two models are named, {args.model} and --target {args.target}: leave one out")
    model: str | None = args.model if args.model is not None else args.target
    return model


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Options about the target alone."""
    group = parser.add_argument_group("target")
    group.add_argument("--target", metavar="MODEL", help="folder or hub id; default: the offline SmolLM2-135M-Instruct")
    group.add_argument(
        "--dtype", help="float32, bfloat16, float16, auto; default: float32 for the offline model, else auto"
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, ...; default: cuda if there is one, else cpu")
    group.add_argument("--threads", type=at_least(1), help="CPU threads of torch")
    group.add_argument("--revision", help="branch, tag or commit on the hub")
    group.add_argument("--cache-dir", help="cache folder of the hub's files")
    group.add_argument("--token", help="hub access token (default: the one you are logged in with)")
    group.add_argument("--offline", action="store_true", help="never ask the hub, use local files only")
    group.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Options about target and drafter."""
    add_target_arguments(parser)
    group = parser.add_argument_group("drafter")
    group.add_argument(
        "--drafter",
        metavar="NAME",
        help="folder, hub id, zoo name, 'lookup' (prompt lookup) or 'none' (plain decoding); "
        "default: the offline model's own drafter, 'lookup' for any other target",
    )
    group.add_argument(
        "--block-size",
        type=at_least(1),
        metavar="K",
        help="drafted tokens per round; default: what pays, round by round",
    )
    group.add_argument("--fast", choices=("auto", "on", "off"), default="auto", help="the fast path; default: auto")


def add_sampling_arguments(parser: argparse.ArgumentParser, max_new_tokens: int = 256) -> None:
    """Options about how tokens are chosen."""
    group = parser.add_argument_group("decoding (greedy unless one of the sampling options is given)")
    group.add_argument(
        "--max-new-tokens", type=at_least(1), default=max_new_tokens, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--temperature", type=at_least(0, float), metavar="T", help="sample at this temperature; 0 is greedy"
    )
    group.add_argument("--top-k", type=at_least(0), metavar="K", help="sample from the K likeliest tokens")
    group.add_argument(
        "--top-p", type=share, metavar="P", help="sample from the likeliest tokens that hold P of the mass"
    )
    group.add_argument(
        "--min-p", type=share, metavar="P", help="drop tokens below P times the likeliest one's probability"
    )
    group.add_argument("--seed", type=at_least(0), help="repeat a sampled run")
    group.add_argument(
        "--rule", choices=("auto", "greedy", "token", "block", "coupled"), default="auto", help="acceptance rule"
    )


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """``generate`` arguments for the sampling options.

    Raises:
        InvalidInputError: options that contradict each other.
    """
    filters = {name: getattr(args, name) for name in ("top_k", "top_p", "min_p") if getattr(args, name) is not None}
    if args.temperature == 0 and filters:
        raise InvalidInputError("--temperature 0 is greedy decoding; leave out --top-k, --top-p and --min-p")
    sample = bool(filters) or bool(args.temperature)
    if not sample:
        if args.rule not in ("auto", "greedy"):
            raise InvalidInputError(f"--rule {args.rule} is for sampling; give --temperature as well")
        if args.seed is not None:
            raise InvalidInputError("--seed is for sampling; give --temperature as well")
        return {"do_sample": False}
    if args.rule == "greedy":
        raise InvalidInputError("--rule greedy contradicts the sampling options")
    options: dict[str, Any] = {"do_sample": True, "temperature": args.temperature or 1.0, "top_k": 0, **filters}
    options["rule"] = args.rule
    if args.seed is not None:
        options["seed"] = args.seed
    return options


@dataclass
class Pair:
    """A loaded target with its drafter.

    Attributes:
        wrapped: the ``SpecDiff``.
        model: the target.
        tokenizer: its tokenizer.
        drafter: the drafter, None for plain decoding.
        name: what to call the drafter.
    """

    wrapped: Any
    model: Any
    tokenizer: Any
    drafter: Drafter | None
    name: str


def quiet_libraries() -> None:
    """No bars or hints of the libraries below in a command's output."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()


def target_options(args: argparse.Namespace) -> dict[str, Any]:
    """``from_pretrained`` arguments for the options about the target."""
    options: dict[str, Any] = {}
    if args.dtype is not None:
        options["dtype"] = _dtype(args.dtype)
    for name in ("revision", "cache_dir", "token"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    if args.offline:
        options["local_files_only"] = True
    if args.trust_remote_code:
        options["trust_remote_code"] = True
    return options


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The target and its tokenizer, on their device."""
    from specdiff.hub import load_target

    device = ready_device(args)
    model, tokenizer = load_target(args.target, **target_options(args))
    return model.to(device), tokenizer


def ready_device(args: argparse.Namespace) -> Any:
    """Before a model is loaded: quiet libraries, as many threads as asked for, and the device it goes to."""
    import torch

    quiet_libraries()
    if args.threads:
        torch.set_num_threads(args.threads)
    return _device(args.device)


_DRAFTER_OPTIONS = ("cache_dir", "local_files_only", "token")


def load_pair(args: argparse.Namespace) -> Pair:
    """Load what the options name and wrap it."""
    from specdiff import SpecDiff
    from specdiff.hub import DEFAULT_DRAFTER, load_drafter

    if args.drafter == "none" and args.block_size:
        raise InvalidInputError("--block-size needs a drafter")
    model, tokenizer = load_model(args)
    name = args.drafter
    if name is None:
        name = DEFAULT_DRAFTER if args.target is None else "lookup"
        if name == "lookup":
            logger.warning("no --drafter given for %s: drafting by prompt lookup", args.target)
    options = {key: value for key, value in target_options(args).items() if key in _DRAFTER_OPTIONS}
    drafter = None if name == "none" else load_drafter(name, target=model, **options)
    wrapped = SpecDiff(model, drafter, tokenizer=tokenizer, block_size=args.block_size, fast=args.fast)
    return Pair(wrapped, model, tokenizer, drafter, name)


def encode(tokenizer: Any, prompt: str | list[dict[str, str]], *, raw: bool = False) -> Tensor:
    """``Long[1, P]`` ids of a prompt: a text or messages, through the chat template where there is one.

    Raises:
        InvalidInputError: the prompt is empty, or messages are given and the tokenizer has no chat template.
    """
    from specdiff.bench import prompts

    return prompts.encode(tokenizer, prompt, raw=raw)[None]


def _dtype(name: str) -> Any:
    import torch

    if name == "auto":
        return name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidInputError(
            f"--dtype {name} is no floating-point type of torch; try float32, bfloat16, float16, auto"
        )
    return found


def _device(name: str | None) -> Any:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInputError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
