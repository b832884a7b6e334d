"""``specdiff train TARGET --data ... --out DIR``: a drafter, or a dual-mode adapter, for a model of one's own.

The stages live below the engine; what they need of it (decoding states to generate text, decoding with a drafter to
judge it) is handed to them here.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specdiff.cli import codes
from specdiff.cli.common import add_target_arguments, load_model, one_target
from specdiff.drafters.base import Drafter
from specdiff.errors import InvalidInputError, UnsupportedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    from specdiff.drafters.train import cli as training
    from specdiff.drafters.train.dual import cli as dual

    parser.add_argument("model", nargs="?", metavar="TARGET", help="folder or hub id; default: the offline model")
    parser.add_argument(
        "--kind",
        choices=tuple(training.DEFAULTS),
        default="dflash",
        help="a DFlash drafter, or a dual-mode adapter that makes the model write by diffusion too (default dflash)",
    )
    training.add_arguments(parser)
    dual.add_arguments(parser)
    add_target_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train."""
    from specdiff.drafters.lookup import PromptLookup
    from specdiff.drafters.train import cli as training
    from specdiff.drafters.train.pipeline import run as run_plan

    training.settle(args, args.kind)
    if not (args.max_hours or args.max_steps):
        raise InvalidInputError("give the training a budget: --max-hours or --max-steps")
    args.target = one_target(args)
    main = join_processes(args)
    model, tokenizer = load_model(args)
    name = getattr(model.config, "_name_or_path", "") or args.target or "the offline model"
    name = Path(name).name if Path(name).is_dir() else name  # cards do not tell where a folder lies
    plan = training.plan_of(args, str(name), model)
    if args.kind == "dual":
        return run_dual(args, plan, model, tokenizer, main)
    with training.Display(shown=main) as display:
        outcome = run_plan(
            model,
            plan,
            tokenizer=tokenizer,
            generate=generator(model, plan.taps(model), plan.top),
            serve=lambda drafter, prompts, new: serve(model, drafter, prompts, new),
            baseline=PromptLookup(),
            tell=display,
        )
    if main:
        training.show(outcome, args.out)
    return codes.OK


def join_processes(args: argparse.Namespace) -> bool:
    """Before anything is put on a device: join the other processes, if there are any, and take this one's own GPU.

    Returns:
        Whether this is the process that speaks for all.

    Raises:
        InvalidInputError: one GPU is named for several processes.
    """
    import torch

    from specdiff.drafters.train.processes import processes

    device = torch.device(args.device) if args.device else None
    cpu = not torch.cuda.is_available() if device is None else device.type == "cpu"
    team = processes(cpu)
    if team.num_processes > 1 and not cpu:
        if device is not None and device.index is not None:
            raise InvalidInputError(
                f"--device {args.device} for {team.num_processes} processes: each takes its own GPU"
            )
        args.device = str(team.device)
    elif device is not None and device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # training goes to the current device
    return bool(team.is_main_process)


def run_dual(args: argparse.Namespace, plan: Any, model: Any, tokenizer: Any, main: bool) -> int:
    """Train a dual-mode adapter; ``main``: whether this process shows progress and result."""
    from specdiff.drafters.train import cli as training
    from specdiff.drafters.train.dual import cli as dual
    from specdiff.drafters.train.dual.pipeline import run as run_plan

    with training.Display(shown=main) as display:
        outcome = run_plan(
            model, dual.plan_of(args, plan), tokenizer=tokenizer, generate=generator(model), tell=display
        )
    if main:
        dual.show(outcome, args.out)
    return codes.OK


def generator(model: Any, taps: Sequence[int] = (), top: int = 32, lanes: int = 64) -> Any:
    """Continuous batched generation over the engine's target states; taps and likeliest tokens are kept on the way.

    Packed passes where the model is of their pattern: they attend over each row's own length, stock ones over the
    longest row's.
    """
    from specdiff.drafters.train.generate import Generator
    from specdiff.fast.target import FastTarget
    from specdiff.target import Target

    stock = Target(model)
    fast: FastTarget | None = None
    with contextlib.suppress(UnsupportedError):
        fast = FastTarget(model)

    def open_state(batch: int, capacity: int, taps: Sequence[int]) -> Any:
        target = fast if fast is not None and fast.refuses(capacity) is None else stock
        return target.open(batch, capacity, taps)

    ends = model.generation_config.eos_token_id
    ids = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return Generator(open_state, ids, stock.device, lanes, taps=taps, top=top)


def serve(model: Any, drafter: Drafter, prompts: Iterable[Sequence[int]], new_tokens: int) -> dict[str, Any]:
    """Greedy decoding of prompts given as ids, one by one: tau over all of them and acceptance by position, and the
    same without the answers that loop (None if all do)."""
    import torch

    from specdiff import SpecDiff
    from specdiff.bench.loops import is_loop

    wrapped = SpecDiff(model, drafter, block_size=drafter.block_size)
    rounds: list[list[int]] = []
    loops: list[bool] = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        out = wrapped.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        rounds.append(out.stats.emitted[0][1:])
        loops.append(is_loop(out.sequences[0, ids.shape[1] :].tolist()))
    straight = [emitted for emitted, loop in zip(rounds, loops, strict=True) if not loop]
    return {
        **acceptance(rounds),
        "prompts": len(rounds),
        "loops": sum(loops),
        "without_loops": acceptance(straight) if straight else None,
    }


def acceptance(answers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """tau and acceptance by position of answers, each given as the new tokens of its rounds."""
    every = [emitted for answer in answers for emitted in answer]
    count = max(len(every), 1)
    by_position = [sum(e - 1 > slot for e in every) / count for slot in range(max(every, default=1) - 1)]
    return {"tau": sum(every) / count, "by_position": by_position, "rounds": len(every)}
