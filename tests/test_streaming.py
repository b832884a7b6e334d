"""Streams: token by token, with errors and early ends reaching the other side."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TextIteratorStreamer, TextStreamer

from specdiff.errors import InvalidInputError
from specdiff.streaming import Feed, astream, stream

PROMPT = torch.tensor([[1, 2]])


class Recorder:
    def __init__(self) -> None:
        self.steps: list = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.steps.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


class Letters:
    """Just enough of a tokenizer: id n is the n-th letter."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def decode(self, ids, **kwargs) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        if self.fails_at in ids:
            raise UnicodeError("no such letter")
        return "".join(chr(ord("a") + i) for i in ids)


class Model:
    """Emits the given tokens; an exception among them is raised there."""

    def __init__(self, *tokens) -> None:
        self.tokens = tokens
        self.emitted = 0
        self.pace = 0.0
        self.kwargs: dict = {}

    def generate(self, ids=PROMPT, *, streamer, **kwargs):
        self.kwargs = kwargs
        with Feed(streamer, ids.shape[0], pad_token_id=0) as feed:
            feed.prompt(ids)
            for token in self.tokens:
                if isinstance(token, BaseException):
                    raise token
                for row in range(ids.shape[0]):
                    feed.push(row, [token + row])
                self.emitted += 1
                time.sleep(self.pace)
        return "result"


def streams() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "specdiff-stream"]


def gone(seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while streams() and time.monotonic() < end:
        time.sleep(0.005)
    return not streams()


# -- the feed --------------------------------------------------------------------------------------------------------


def test_one_row_streams_the_prompt_and_each_token():
    recorder = Recorder()
    with Feed(recorder, 1) as feed:
        feed.prompt(PROMPT)
        feed.push(0, [5, 6])
        assert recorder.steps == [[[1, 2]], [5], [6]]
        feed.push(0, [7], finished=True)
    assert recorder.steps[-1] == [7] and recorder.ended == 1
    feed.end()
    assert recorder.ended == 1


def test_rows_wait_for_each_other_and_finished_ones_show_padding():
    recorder = Recorder()
    with Feed(recorder, 2, pad_token_id=9) as feed:
        feed.push(0, [1, 2, 3])
        assert recorder.steps == []
        feed.push(1, [4], finished=True)
        assert recorder.steps == [[1, 4], [2, 9], [3, 9]]
        feed.push(0, [5], finished=True)
    assert recorder.steps[-1] == [5, 9]


@given(st.data())
def test_feed_gives_the_columns_of_the_padded_batch(data):
    rows = data.draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=4))
    recorder = Recorder()
    left = [list(row) for row in rows]
    with Feed(recorder, len(rows), pad_token_id=0) as feed:
        while any(left):
            row = data.draw(st.sampled_from([r for r, tokens in enumerate(left) if tokens]))
            count = data.draw(st.integers(1, len(left[row])))
            chunk, left[row] = left[row][:count], left[row][count:]
            feed.push(row, chunk, finished=not left[row])
    longest = max(map(len, rows))
    assert recorder.steps == [[row[i] if i < len(row) else 0 for row in rows] for i in range(longest)]


def test_no_streamer_no_work():
    with Feed(None, 2) as feed:
        assert not feed.active
        feed.prompt(PROMPT)
        feed.push(0, [1])


def test_text_streamer_refuses_batches_as_in_transformers():
    with pytest.raises(ValueError, match="batch size 1"), Feed(TextStreamer(Letters()), 2) as feed:
        feed.prompt(PROMPT.expand(2, 2))


def test_end_comes_after_an_error_too_and_the_first_error_is_reported():
    recorder = Recorder()
    with pytest.raises(KeyError), Feed(recorder, 1):
        raise KeyError
    assert recorder.ended == 1


def test_b42_a_failing_decoder_does_not_leave_the_reader_waiting():
    streamer = TextIteratorStreamer(Letters(fails_at=3), skip_prompt=True, timeout=5)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            Model(0, 1, 3, 2).generate(streamer=streamer)
        except UnicodeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert "".join(streamer) == "ab"
    thread.join(2)
    assert len(caught) == 1 and not thread.is_alive()


# -- readers ---------------------------------------------------------------------------------------------------------


def test_text_and_token_streams():
    reader = stream(Model(0, 1, 2), tokenizer=Letters())
    assert "".join(reader) == "abc" and reader.result == "result"
    assert list(reader) == [] and gone()
    assert list(stream(Model(4, 5))) == [4, 5]
    assert list(stream(Model(4, 5), skip_prompt=False)) == [1, 2, 4, 5]
    assert list(stream(Model(4, 5), PROMPT.expand(3, 2), skip_prompt=False)) == [[1] * 3, [2] * 3, [4, 5, 6], [5, 6, 7]]


def test_arguments_pass_through():
    model = Model(1)
    list(stream(model, PROMPT, max_new_tokens=3, seed=1))
    assert model.kwargs == {"max_new_tokens": 3, "seed": 1}
    tokenizer = Letters()
    list(stream(model, tokenizer=tokenizer, stop_strings="x"))
    assert model.kwargs == {"stop_strings": "x", "tokenizer": tokenizer}
    with pytest.raises(InvalidInputError, match="streamer"):
        stream(model, streamer=Recorder())


@pytest.mark.parametrize(
    ("tokens", "tokenizer", "first", "error"),
    [
        ((0, 1, ZeroDivisionError("here"), 2), Letters(), "ab", ZeroDivisionError),
        ((ValueError("illegal option"),), Letters(), "", ValueError),
        ((0, 1, 3, 2), Letters(fails_at=3), "ab", UnicodeError),
    ],
    ids=["processor", "option", "decode"],
)
def test_b42_the_reader_gets_the_first_tokens_then_the_original_exception(tokens, tokenizer, first, error):
    reader = stream(Model(*tokens), tokenizer=tokenizer)
    seen = []
    with pytest.raises(error) as caught:
        for piece in reader:
            seen.append(piece)
    assert "".join(seen) == first and gone()
    wanted = next((t for t in tokens if isinstance(t, BaseException)), None)
    assert wanted is None or caught.value is wanted
    assert list(reader) == []
    assert "".join(stream(Model(0, 1), tokenizer=Letters())) == "ab"


@pytest.mark.parametrize("how", ["close", "with", "forget"])
def test_leaving_early_ends_the_generation_at_the_next_token(how):
    model = Model(*[1] * 1000)
    model.pace = 0.005
    reader = stream(model)
    if how == "with":
        with reader:
            next(reader)
    else:
        next(reader)
        if how == "close":
            reader.close()
            reader.close()
            assert not streams() and list(reader) == []
        else:
            del reader
            gc.collect()
    assert gone() and model.emitted < 500


def test_closing_a_text_stream_early():
    model = Model(*[1] * 1000)
    model.pace = 0.005
    with stream(model, tokenizer=Letters()) as reader:
        assert next(reader) == "b"
    assert gone() and model.emitted < 500


def test_async_stream():
    async def main() -> None:
        reader = astream(Model(0, 1, 2), tokenizer=Letters())
        assert "".join([piece async for piece in reader]) == "abc" and reader.result == "result"
        seen = []
        with pytest.raises(ZeroDivisionError):
            async for token in astream(Model(4, 5, ZeroDivisionError())):
                seen.append(token)
        assert seen == [4, 5]
        model = Model(*[1] * 1000)
        model.pace = 0.005
        async with astream(model) as reader:
            async for _ in reader:
                break
        assert [item async for item in reader] == [] and not streams() and model.emitted < 500

    asyncio.run(asyncio.wait_for(main(), 20))
    assert gone()


def test_async_reader_keeps_its_loop_free():
    async def main() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.002)
                ticks += 1

        task = asyncio.create_task(tick())
        model = Model(*range(10))
        model.pace = 0.01
        assert [t async for t in astream(model)] == list(range(10))
        task.cancel()
        return ticks

    assert asyncio.run(asyncio.wait_for(main(), 20)) > 5


def test_a_dead_event_loop_ends_the_thread():
    model = Model(*[1] * 1000)
    model.pace = 0.005

    async def main() -> None:
        reader = astream(model)
        await reader.__anext__()

    asyncio.run(main())
    assert gone() and model.emitted < 500
