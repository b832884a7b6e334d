"""``specdiff chat``: a conversation, streaming, on a terminal or through a pipe."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from specdiff.cli import codes
from specdiff.cli.common import add_pair_arguments, add_sampling_arguments, encode, load_pair, sampling_options
from specdiff.cli.generate import summary
from specdiff.cli.text import Mark, TextWriter
from specdiff.cli.totals import Totals
from specdiff.errors import InvalidInputError, NumericalError

HELP = """\
/help           this text
/reset          forget the conversation
/stats          speed, tau and acceptance over all answers so far
/seed [N]       show or set the seed of sampling
/colors         colours on or off: green drafted and accepted, yellow the target's own token
/quit           leave (also Ctrl-D)
Ctrl-C stops an answer; what it has said so far stays in the conversation."""

GREEN, YELLOW, DIM, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("--system", metavar="TEXT", help="system prompt; default: the chat template's own")
    parser.add_argument(
        "--colors", action="store_true", help="colour drafted and accepted tokens green, the target's own yellow"
    )
    add_pair_arguments(parser)
    add_sampling_arguments(parser, max_new_tokens=512)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    options = sampling_options(args)
    pair = load_pair(args)
    if not pair.tokenizer.chat_template:
        raise InvalidInputError("this model's tokenizer has no chat template; use specdiff generate")
    chat = Chat(pair, options, args)
    try:
        return chat.loop()
    finally:
        chat.close()


class Chat:
    """One conversation.

    Args:
        pair: target and drafter.
        options: ``generate`` arguments for the sampling options.
        args: the command's arguments.
    """

    def __init__(self, pair: Any, options: dict[str, Any], args: argparse.Namespace) -> None:
        self.pair, self.options = pair, options
        self.max_new: int = args.max_new_tokens
        self.system = [{"role": "system", "content": args.system}] if args.system else []
        self.messages = list(self.system)
        self.totals = Totals()
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.codes = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
        self.colors: bool = args.colors
        self.wrapped = pair.wrapped
        self.session = self.wrapped.session()

    def close(self) -> None:
        """Release the caches."""
        self.session.close()

    def loop(self) -> int:
        """Read, answer, repeat; returns the exit code."""
        if self.terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() its line editing and history
            print(f"{self._name()}, drafter {self.pair.name}. /help lists commands, Ctrl-D leaves.")
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                print("\n(Ctrl-D or /quit leaves)")
                continue
            if line is None or line.strip() == "/quit":
                return codes.OK
            if line.strip().startswith("/"):
                self._command(line.strip())
            elif line.strip():
                self._answer(line)

    def _name(self) -> str:
        return os.path.basename(str(self.pair.model.config._name_or_path)) or type(self.pair.model).__name__

    def _read(self) -> str | None:
        if self.terminal:
            try:
                return input("> ")
            except EOFError:
                print()
                return None
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    # -- commands ----------------------------------------------------------------------------------------------------

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            print(HELP)
        elif name == "/reset":
            self.messages = list(self.system)
            print("(conversation forgotten)")
        elif name == "/stats":
            print(self.totals.table())
        elif name == "/seed":
            self._seed(rest.strip())
        elif name == "/colors":
            self.colors = not self.colors
            print(f"(colours {'on' if self.colors else 'off'})")
        else:
            print(f"(no command {name}; /help lists them)")
        sys.stdout.flush()

    def _seed(self, text: str) -> None:
        if text:
            if not text.isascii() or not text.isdigit() or int(text) >= 2**63:
                print(f"(a seed is a whole number from 0 to 2**63 - 1, not {text!r})")
                return
            self.options["seed"] = int(text)
        seed = self.options.get("seed")
        note = "" if self.options["do_sample"] else "; decoding is greedy, start with --temperature to sample"
        print(f"(seed {'not set' if seed is None else seed}{note})")

    # -- one answer --------------------------------------------------------------------------------------------------

    def _answer(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = encode(self.pair.tokenizer, asked).to(self.wrapped.device)
        room = self._room(ids.shape[1])
        if room < 1:
            print("(the conversation fills the model's context; /reset starts a new one)")
            return
        marked = self.colors and self.codes and self.pair.drafter is not None
        writer = TextWriter(self.pair.tokenizer, self._write, marked=marked)
        began = time.perf_counter()
        with _stoppable() as stop:
            try:
                out = self.session.generate(
                    ids,
                    max_new_tokens=min(self.max_new, room),
                    pad_token_id=self.pair.tokenizer.pad_token_id,
                    streamer=writer,
                    stopping_criteria=stop.criteria(),
                    return_dict_in_generate=True,
                    **self._call_options(),
                )
            except NumericalError as error:
                print(f"\n(no answer: {error})")
                return
            except KeyboardInterrupt:  # a second Ctrl-C, or one before the first token
                print("\n(no answer: interrupted; the question is taken back)")
                return
        seconds = time.perf_counter() - began
        stats = out.stats
        if marked:
            writer.finish(stats.emitted[0], stats.accepted)
        print(flush=True)
        reply = out.sequences[0, ids.shape[1] : ids.shape[1] + stats.new_tokens[0]]
        answer = self.pair.tokenizer.decode(reply.tolist(), skip_special_tokens=True)
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        self.totals.add(stats, seconds)
        self._report(("stopped, " if stop.asked else "") + summary(stats, seconds))

    def _call_options(self) -> dict[str, Any]:
        if self.options["do_sample"]:
            return self.options
        return {name: value for name, value in self.options.items() if name != "seed"}

    def _room(self, used: int) -> int:
        limit = getattr(self.pair.model.config.get_text_config(), "max_position_embeddings", None)
        return self.max_new if limit is None else limit - used

    def _write(self, piece: str, mark: Mark) -> None:
        if mark is not None:
            piece = f"{GREEN if mark else YELLOW}{piece}{PLAIN}"
        print(piece, end="", flush=True)

    def _report(self, line: str) -> None:
        """After each answer: beside it on a terminal, on standard error otherwise."""
        if self.terminal:
            print(f"{DIM}[{line}]{PLAIN}", flush=True)
        else:
            print(f"[{line}]", file=sys.stderr, flush=True)


class _Stop:
    """Whether the answer was asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def criteria(self) -> Any:
        """A stopping criterion that ends the answer at its next token."""
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        outer = self

        class Asked(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                return torch.full((input_ids.shape[0],), outer.asked, dtype=torch.bool, device=input_ids.device)

        return StoppingCriteriaList([Asked()])


@contextlib.contextmanager
def _stoppable() -> Iterator[_Stop]:
    """Ctrl-C asks the answer to stop at its next token; a second one interrupts at once."""
    stop = _Stop()

    def handle(number: int, frame: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
