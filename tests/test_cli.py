"""The commands: in-process where that is enough, through pipes and on a terminal where it is not."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from terminal import PATIENCE, Terminal
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from specdiff.cli import COMMANDS, main
from specdiff.cli.text import Detokenizer, TextWriter
from specdiff.cli.totals import Totals
from specdiff.errors import FormatError, NumericalError
from specdiff.verify import Proposal, Sampled


@pytest.fixture
def tiny(tiny_folder) -> list[str]:
    """Options that name the tiny target and the drafter that needs no weights."""
    return [
        "--target",
        str(tiny_folder),
        "--drafter",
        "lookup",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]


def run_main(arguments: list[str]) -> int:
    """``main``, with argparse's own exits as codes."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def spawn(arguments: list[str], stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specdiff", *arguments],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def piped(monkeypatch, capsys):
    """``main`` with a piped standard input, in this process."""

    def call(arguments: list[str], stdin: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = run_main(arguments)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


def reference(folder, messages: list[dict[str, str]], new: int, **options) -> str:
    """What transformers itself answers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=new, **{"do_sample": False, **options})
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


# -- the command itself ------------------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys):
    assert run_main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in COMMANDS)
    assert "exit codes" in shown


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name, capsys):
    assert run_main([name, "--help"]) == 0
    assert f"usage: specdiff {name}" in capsys.readouterr().out


def test_no_command_and_unknown_command_are_wrong_usage(capsys):
    assert run_main([]) == 2
    assert run_main(["no-such-command"]) == 2
    assert "no-such-command" in capsys.readouterr().err


def test_errors_become_exit_codes(monkeypatch, capsys):
    import specdiff.cli.env as env

    cases = [
        (KeyboardInterrupt(), 130),
        (FormatError("bad shape"), 3),
        (NumericalError("row 0 is NaN"), 1),
        (OSError("disk"), 1),
    ]
    for error, code in cases:

        def fail(args, error=error):
            raise error

        monkeypatch.setattr(env, "run", fail)
        assert run_main(["env"]) == code
    assert "row 0 is NaN" in capsys.readouterr().err
    monkeypatch.setattr(env, "run", lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run_main(["env"])


# -- generate ----------------------------------------------------------------------------------------------------------


def test_generate_prints_the_models_own_text(tiny, tiny_folder, capsys):
    assert run_main(["generate", "hello", "--max-new-tokens", "24", *tiny]) == 0
    captured = capsys.readouterr()
    assert captured.out == reference(tiny_folder, [{"role": "user", "content": "hello"}], 24) + "\n"
    assert captured.err == ""


def test_generate_raw_continues_the_text_itself(tiny, tiny_folder, capsys):
    assert run_main(["generate", "ab", "--raw", "--max-new-tokens", "8", *tiny]) == 0
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    ids = tokenizer("ab", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert capsys.readouterr().out == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) + "\n"


def test_generate_json_and_stats_agree(tiny, capsys):
    assert run_main(["generate", "hello", "--max-new-tokens", "20", "--json", "--stats", *tiny]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert len(record["token_ids"]) == 20 == sum(record["stats"]["emitted"][0]) == record["stats"]["new_tokens"][0]
    assert record["finish_reason"] == "length" and record["drafter"] == "lookup"
    assert captured.err.startswith("20 tokens in ") and "tau" in captured.err


def test_generate_several_prompts_are_a_batch_equal_to_each_alone(tiny, capsys):
    prompts = ["hello", "a longer one, padded less"]
    assert run_main(["generate", *prompts, "--max-new-tokens", "12", "--json", *tiny]) == 0
    together = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    for prompt, ids in zip(prompts, together, strict=True):
        assert run_main(["generate", prompt, "--max-new-tokens", "12", "--json", *tiny]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == ids
    assert run_main(["generate", *prompts, "--max-new-tokens", "4", *tiny]) == 0
    assert capsys.readouterr().out.startswith("> hello\n")


def test_generate_sampled_repeats_with_its_seed(tiny, capsys):
    def sampled(seed: str) -> list[int]:
        options = ["--temperature", "2", "--seed", seed, "--max-new-tokens", "16", "--json"]
        assert run_main(["generate", "hello", *options, *tiny]) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    assert sampled("1") == sampled("1") != sampled("2")


@pytest.mark.parametrize(
    "options",
    [
        ["--temperature", "0", "--top-k", "3"],
        ["--temperature", "-1"],
        ["--top-p", "1.5"],
        ["--rule", "block"],
        ["--rule", "greedy", "--temperature", "1"],
        ["--max-new-tokens", "0"],
        ["--drafter", "none", "--block-size", "4"],
        ["--dtype", "int8"],
        ["--device", "nonsense"],
        ["--seed", "x"],
    ],
)
def test_generate_wrong_usage(options, tiny, capsys):
    assert run_main(["generate", "hello", *tiny, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err


def test_generate_empty_prompt_is_wrong_usage(tiny, piped):
    assert piped(["generate", *tiny], stdin="  \n").returncode == 2


def test_generate_reads_a_pipe(tiny, tiny_folder):
    done = spawn(["generate", "--max-new-tokens", "12", *tiny], stdin="hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout == reference(tiny_folder, [{"role": "user", "content": "hello"}], 12) + "\n"
    assert done.stderr == ""


def test_reader_that_goes_away_is_no_fault(tiny):
    command = f'"{sys.executable}" -m specdiff generate hello --max-new-tokens 500000 {" ".join(tiny)} | head -c 20'
    shell = ["bash", "-c", command + "; exit ${PIPESTATUS[0]}"]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 141
    assert done.stderr == ""


def test_unknown_target_fails_with_one_line(capsys):
    assert run_main(["generate", "x", "--target", "no/such-model", "--offline"]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_in_generate_is_130(tiny):
    terminal = Terminal(["generate", "hello", "--max-new-tokens", "500000", *tiny])
    terminal.wait_for_more()
    terminal.key(3)
    assert terminal.close() == 130
    assert "Traceback" not in terminal.shown


def test_b35_ids_beyond_the_tokenizer_do_not_crash(tiny_folder, tmp_path, capsys, piped):
    """Target's vocabulary padded past the tokenizer's, the extra ids likely."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model.resize_token_embeddings(len(tokenizer) + 60, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[len(tokenizer) :] *= 30
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = ["--target", str(tmp_path), "--drafter", "lookup", "--dtype", "float32", "--max-new-tokens", "40"]
    assert run_main(["generate", "hello", "--json", "--temperature", "3", "--seed", "0", *options]) == 0
    ids = json.loads(capsys.readouterr().out)["token_ids"]
    assert any(token >= len(tokenizer) for token in ids), "the case is not made"
    assert run_main(["generate", "hello", "--temperature", "3", "--seed", "0", *options]) == 0
    chat = piped(["chat", "--temperature", "3", "--seed", "0", *options], stdin="hello\nagain\n")
    assert chat.returncode == 0, chat.stderr


# -- check, env --------------------------------------------------------------------------------------------------------


def test_check_says_yes(tiny_folder, capsys):
    assert run_main(["check", str(tiny_folder)]) == 0
    assert "can be served" in capsys.readouterr().out
    assert run_main(["check", str(tiny_folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["served"] and report["class"] == "LlamaForCausalLM" and report["cache"] == {"DynamicLayer": 2}


def test_check_run_compares_with_generate(tiny_folder, capsys):
    options = ["--run", "--drafter", "lookup", "--dtype", "float32"]
    assert run_main(["check", str(tiny_folder), *options]) == 0
    assert "equal to generate's own" in capsys.readouterr().out


def test_check_says_no_and_why(tmp_path, capsys):
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert run_main(["check", str(tmp_path)]) == 3
    shown = capsys.readouterr().out
    assert "cannot be served: " in shown and len(shown.split("cannot be served: ")[1]) > 20
    assert run_main(["check", str(tmp_path), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["served"] is False


def test_env(capsys):
    assert run_main(["env"]) == 0
    assert "transformers" in capsys.readouterr().out
    assert run_main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert set(report) == {"versions", "machine", "torch", "files"}


# -- chat --------------------------------------------------------------------------------------------------------------


def test_chat_through_a_pipe_keeps_the_conversation(tiny, tiny_folder, piped):
    done = piped(["chat", "--max-new-tokens", "10", *tiny], stdin="hello\n\nand then?\n")
    assert done.returncode == 0, done.stderr
    messages = [{"role": "user", "content": "hello"}]
    first = reference(tiny_folder, messages, 10)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    assert done.stdout == f"{first}\n{reference(tiny_folder, messages, 10)}\n"
    reports = done.stderr.splitlines()
    assert len(reports) == 2 and all("tokens/s" in line and "tau" in line for line in reports)


def test_chat_reset_forgets(tiny, piped):
    done = piped(["chat", "--max-new-tokens", "10", *tiny], stdin="hello\n/reset\nhello\n")
    first, second = done.stdout.split("(conversation forgotten)\n")
    assert done.returncode == 0 and first == second


def test_chat_commands(tiny, piped):
    typed = "/help\nhello\n/stats\n/seed\n/seed 5\n/seed x\n/colors\n/nonsense\n/quit\nnever answered\n"
    done = piped(["chat", "--max-new-tokens", "8", "--temperature", "1", *tiny], stdin=typed)
    assert done.returncode == 0, done.stderr
    for text in (
        "/reset", "answers          1", "tau  ", "(seed not set)", "(seed 5)", "not 'x'",
        "(colours on)", "no command /nonsense",
    ):  # fmt: skip
        assert text in done.stdout, text
    count = re.search(r"new tokens +(\d+)", done.stdout)
    assert count and 1 <= int(count[1]) <= 8  # unseeded at temperature 1: it may end early
    assert len(done.stderr.splitlines()) == 1, "nothing is answered after /quit"


def test_chat_seed_repeats_an_answer(tiny, piped):
    typed = "/seed 3\nhello\n/reset\nhello\n/reset\n/seed 4\nhello\n"
    done = piped(["chat", "--max-new-tokens", "12", "--temperature", "2", *tiny], stdin=typed)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.removeprefix("(seed 3)\n").split("(conversation forgotten)\n")
    assert first == second != third.removeprefix("(seed 4)\n")


def test_chat_full_context_is_said(tiny_folder, tmp_path, piped):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model.config.max_position_embeddings = 40
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    options = ["--target", str(tmp_path), "--drafter", "lookup", "--max-new-tokens", "100"]
    done = piped(["chat", *options], stdin="hello\nmore\n/reset\nhello\n")
    assert done.returncode == 0, done.stderr
    assert "/reset starts a new one" in done.stdout and len(done.stderr.splitlines()) == 2


@pytest.fixture
def chat(tiny):
    """A chat on a terminal, waiting for its first line."""
    opened = []

    def start(*options: str) -> Terminal:
        terminal = Terminal(["chat", *tiny, *options])
        opened.append(terminal)
        terminal.expect("> ")
        return terminal

    yield start
    for terminal in opened:
        if terminal._process.poll() is None:
            terminal._process.kill()


@pytest.mark.slow
def test_chat_on_a_terminal_streams_and_reports(chat):
    terminal = chat("--max-new-tokens", "30")
    terminal.type("hello")
    report = terminal.expect("> ")
    assert re.search(r"\[30 tokens in .* tokens/s, tau [0-9.]+", report)
    assert "\x1b[32m" not in report and "\x1b[33m" not in report
    terminal.key(4)
    assert terminal.close() == 0


def test_chat_ctrl_c_stops_the_answer_and_keeps_the_conversation(chat):
    terminal = chat("--max-new-tokens", "500000")
    terminal.type("hello")
    terminal.expect("hello\r\n")
    terminal.wait_for_more()
    terminal.key(3)
    report = terminal.expect("> ")
    assert "[stopped, " in report
    stopped = int(re.search(r"\[stopped, (\d+) tokens", report)[1])
    assert 0 < stopped < 500_000
    terminal.type("/stats")
    assert f"new tokens       {stopped}" in terminal.expect("> ")
    terminal.type("more")
    terminal.expect("more\r\n")
    terminal.wait_for_more()
    terminal.key(3)
    terminal.expect("[stopped, ")
    terminal.expect("> ")
    terminal.type("/quit")
    assert terminal.close() == 0
    assert "Traceback" not in terminal.shown


@pytest.mark.slow
def test_chat_ctrl_c_at_the_prompt_does_not_leave(chat):
    terminal = chat()
    terminal.key(3)
    terminal.expect("Ctrl-D or /quit leaves)")
    terminal.expect("> ")
    terminal.type("/quit")
    assert terminal.close() == 0


def test_chat_colours_show_the_same_text(tiny, tiny_folder, piped, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = piped(["chat", "--max-new-tokens", "60", "--colors", *tiny], stdin="hello\n")
    assert done.returncode == 0, done.stderr
    assert "\x1b[32m" in done.stdout and "\x1b[33m" in done.stdout, "some drafts are right, some wrong"
    expected = reference(tiny_folder, [{"role": "user", "content": "hello"}], 60)
    assert re.sub(r"\x1b\[(0|32|33)m", "", done.stdout) == expected + "\n"


# -- demo, audit -------------------------------------------------------------------------------------------------------


def test_demo_says_equal_and_both_ratios_in_order(tiny, capsys):
    assert run_main(["demo", "--max-new-tokens", "16", *tiny]) == 0
    shown = capsys.readouterr().out
    assert "The texts are equal" in shown
    over_plain = re.search(r"over its own plain decoding: ([0-9.]+) times", shown)
    over_generate = re.search(r"over Hugging Face generate: +([0-9.]+) times", shown)
    assert over_plain and over_generate and over_plain.start() < over_generate.start()


def test_demo_json(tiny, capsys):
    assert run_main(["demo", "--prompt", "hello", "--max-new-tokens", "12", "--json", *tiny]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] is True and report["tokens"] == [12]
    seconds = report["seconds"]
    assert report["ratio_over_plain"] == pytest.approx(sum(seconds["plain"]) / sum(seconds["specdiff"]))
    assert report["ratio_over_generate"] == pytest.approx(sum(seconds["generate"]) / sum(seconds["specdiff"]))


@pytest.mark.slow
def test_demo_on_a_terminal_shows_two_columns(tiny):
    terminal = Terminal(["demo", "--prompt", "hello", "--max-new-tokens", "40", *tiny], COLUMNS="100", LINES="40")
    terminal.expect("specdiff, plain")
    terminal.expect("specdiff, speculative")
    terminal.expect("The texts are equal")
    assert terminal.close() == 0


def test_demo_fails_when_a_text_differs(tiny, capsys, monkeypatch):
    from specdiff.cli.demo import Stage

    real = Stage._new_ids

    def wrong(method, out, width):
        ids = real(method, out, width)
        return ids if method != "specdiff" else [(ids[0] + 1) % 200, *ids[1:]]

    monkeypatch.setattr(Stage, "_new_ids", staticmethod(wrong))
    assert run_main(["demo", "--prompt", "hello", "--max-new-tokens", "8", *tiny]) == 1
    shown = capsys.readouterr().out
    assert "The texts are equal" not in shown and "from token 0 on" in shown


def test_audit_enumeration_alone_needs_no_model(capsys):
    assert run_main(["audit", "--only", "enumeration"]) == 0
    shown = capsys.readouterr().out
    assert "audit passed" in shown and "(biased)" in shown and "(exact)" in shown


def test_audit_of_a_pair(tiny, capsys):
    options = ["--only", "greedy", "sampling", "--per-set", "1", "--max-new-tokens", "12", "--draws", "400", *tiny]
    assert run_main(["audit", *options]) == 0
    shown = capsys.readouterr().out
    assert "batch 1" in shown and "batch 4" in shown
    for rule in ("token", "block", "coupled"):
        assert re.search(rf"ok +{rule} +400 draws over [1-9]", shown)
    assert "would be found with probability 0.9" in shown


class Liar:
    """Proposes the target's likeliest token and states that it was drawn from a flat law: accepted too often."""

    block_size, taps = 1, ()

    def __init__(self, target) -> None:
        self.target, self.known = target, {}

    def start(self, request):
        session = copy.copy(self)
        session.request, session.rows = request, [[] for _ in range(request.batch_size)]
        return session

    def likeliest(self, context: tuple[int, ...]) -> int:
        if context not in self.known:
            with torch.no_grad():
                self.known[context] = int(self.target(torch.tensor([context])).logits[0, -1].argmax())
        return self.known[context]

    def propose(self, anchor, limits, noise):
        contexts = [(*row, int(token)) for row, token in zip(self.rows, anchor, strict=True)]
        tokens = torch.tensor([[self.likeliest(context)] for context in contexts])
        flat = torch.zeros(len(contexts), 1, self.request.vocab_size)
        return Proposal(tokens, limits.clamp(max=1), Sampled(), logits=flat)

    def commit(self, tokens, counts, taps):
        for row, ids, count in zip(self.rows, tokens.tolist(), counts.tolist(), strict=True):
            row += ids[:count]

    def select(self, rows):
        self.rows = [self.rows[row] for row in rows.tolist()]

    def rollback(self, lengths):
        raise AssertionError("not called outside a conversation")

    def close(self):
        self.rows = []


@pytest.mark.parametrize("rule", ["token", "block"])
def test_audit_finds_a_drafter_that_lies_about_its_law(rule, tiny, capsys, monkeypatch):
    monkeypatch.setattr("specdiff.hub.load_drafter", lambda name, target=None, **options: Liar(target))
    options = ["--only", "sampling", "--rules", rule, "--draws", "300", "--json"]
    assert run_main(["audit", *options, *tiny]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False and report["sampling"][0]["rule"] == rule


# -- parts -------------------------------------------------------------------------------------------------------------


def test_text_writer_marks_rounds(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    a, b, c, d, e, f = tokenizer("abcdef").input_ids
    seen: list[tuple[str, bool | None]] = []
    writer = TextWriter(tokenizer, lambda text, mark: seen.append((text, mark)), marked=True)
    put = lambda *ids: [writer.put(torch.tensor([token])) for token in ids]  # noqa: E731
    writer.put(torch.tensor([[1, 2]]))
    put(a)
    writer.round_begins()
    put(b, c)
    writer.round_begins()
    put(d, e, f)
    writer.end()
    assert seen == [("a", False), ("b", True), ("c", False)]
    writer.finish([1, 2, 3], accepted=4)  # the last round was cut inside its drafts
    assert seen[3:] == [("d", True), ("e", True), ("f", True)]


def test_detokenizer_waits_for_whole_characters(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    text = "aé€🙂b"
    pieces = Detokenizer(tokenizer)
    got = [pieces.push(token) for token in tokenizer(text).input_ids]
    assert "".join(got) + pieces.rest() == text
    assert all("\ufffd" not in piece for piece in got)


def test_detokenizer_does_not_wait_for_ever_on_broken_bytes(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    broken = tokenizer("é").input_ids[:1] * 40  # the first byte of a two-byte character, again and again
    pieces = Detokenizer(tokenizer)
    got = [pieces.push(token) for token in broken]
    assert sum(bool(piece) for piece in got) >= 4
    assert "".join(got) + pieces.rest() == "\ufffd" * 40


def test_totals_add_up():
    from specdiff.stats import GenerationStats

    totals = Totals()
    for proposed, accepted, emitted in ((4, 2, 3), (2, 2, 3)):
        stats = GenerationStats(row_rounds=[0], emitted=[[1]], seconds={"prefill": 0.5})
        stats.count(0, proposed, accepted, emitted)
        totals.add(stats, 1.0)
    assert (totals.calls, totals.tokens, totals.later, totals.passes) == (2, 8, 6, 2)
    assert totals.tau == 3.0 and totals.decoding == 1.0
    assert totals.proposed_by_position == [2, 2, 1, 1] and totals.accepted_by_position == [2, 2, 0, 0]
    assert "4 of 6 drafted (67%)" in totals.table()
