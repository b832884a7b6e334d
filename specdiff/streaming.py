"""Streaming: feeding transformers streamers token by token, and reading a stream with its errors.

:class:`Feed` is what the decode loop drives. :func:`stream` and :func:`astream` are for readers: the generation runs in
a thread of its own, its exceptions are raised where the stream is read, and closing the stream ends the thread at the
next token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from specdiff.errors import InvalidInputError

logger = logging.getLogger(__name__)


class Feed:
    """Gives the tokens of a batch to a streamer as plain decoding does: the prompt, then one ``put(Long[B])`` per step.

    Rows of a speculative batch advance unevenly; tokens are held until every unfinished row has one for the step.
    Finished rows show ``pad_token_id``, as in plain decoding. Use it as a context manager: ``end`` is always called.

    Args:
        streamer: anything with ``put`` and ``end``, or None for no streaming.
        batch_size: rows of the request; may be told later by :meth:`open`.
        pad_token_id: shown for finished rows; needed for more than one row.
    """

    def __init__(self, streamer: BaseStreamer | None, batch_size: int = 1, pad_token_id: int | None = None) -> None:
        self.streamer = streamer
        self._ended = False
        self.open(batch_size, pad_token_id)

    def open(self, batch_size: int, pad_token_id: int | None = None) -> None:
        """Say how many rows will come, and what shows for finished ones."""
        self._pad = pad_token_id if pad_token_id is not None else 0
        self._waiting: list[list[int]] = [[] for _ in range(batch_size)]
        self._finished = [False] * batch_size

    @property
    def active(self) -> bool:
        """False if there is no streamer, so that callers may skip the work."""
        return self.streamer is not None

    def prompt(self, ids: Tensor) -> None:
        """Show the prompt: ``Long[B, L]``. Only when ``generate`` of transformers has not done so itself."""
        if self.streamer is not None:
            self.streamer.put(ids.cpu())

    def round_begins(self) -> None:
        """Tell a streamer that wants to know (it has ``round_begins``) that a new round starts."""
        told = getattr(self.streamer, "round_begins", None)
        if told is not None:
            told()

    def push(self, row: int, tokens: Sequence[int], *, finished: bool = False) -> None:
        """Take new tokens of one row, in order; ``finished``: this row gets no more."""
        if self.streamer is None:
            return
        self._waiting[row].extend(tokens)
        self._finished[row] = self._finished[row] or finished
        self._flush()

    def _flush(self) -> None:
        assert self.streamer is not None
        while any(self._waiting) and all(w or f for w, f in zip(self._waiting, self._finished, strict=True)):
            step = [w.pop(0) if w else self._pad for w in self._waiting]
            self.streamer.put(torch.tensor(step))

    def end(self) -> None:
        """Tell the streamer that nothing follows. Further calls do nothing."""
        if self.streamer is not None and not self._ended:
            self._ended = True
            self.streamer.end()

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        else:
            self.abandon()

    def abandon(self) -> None:
        """End the stream after an error: that error is the one to report, and a reader must not wait for ever."""
        try:
            self.end()
        except Exception:
            logger.debug("the streamer's end() failed after an error", exc_info=True)
            release = getattr(self.streamer, "on_finalized_text", None)
            if release is not None:
                with contextlib.suppress(Exception):
                    release("", stream_end=True)


class _Cancelled(BaseException):
    """Unwinds the generation when the reader has gone. Not an Exception, so that no handler in between keeps it."""


class _Emitter:
    """Hands items from the generating thread to the reader; raises :class:`_Cancelled` once the reader has gone."""

    def __init__(self, deliver: Callable[[Any], None]) -> None:
        self._deliver = deliver
        self.cancelled = threading.Event()

    def __call__(self, item: Any) -> None:
        if self.cancelled.is_set():
            raise _Cancelled
        self._deliver(item)


class _TextEmitter(TextStreamer):
    """TextStreamer that hands its finished pieces of text on instead of printing them."""

    def __init__(self, tokenizer: Any, emit: _Emitter, skip_prompt: bool, **decode_kwargs: Any) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, **decode_kwargs)
        self._emit = emit

    def put(self, value: Tensor) -> None:
        if self._emit.cancelled.is_set():
            raise _Cancelled
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._emit(text)


class _TokenEmitter(BaseStreamer):
    """Hands token ids on: an int per step for one row, a list of ints for more."""

    def __init__(self, emit: _Emitter, skip_prompt: bool) -> None:
        self._emit = emit
        self._skip = skip_prompt
        self._prompt = True

    def put(self, value: Tensor) -> None:
        if self._prompt:
            self._prompt = False
            if not self._skip:
                for step in value.reshape(value.shape[0] if value.dim() > 1 else 1, -1).T.tolist():
                    self._emit(step[0] if len(step) == 1 else step)
                return
            if self._emit.cancelled.is_set():
                raise _Cancelled
            return
        ids = value.tolist()
        self._emit(ids[0] if len(ids) == 1 else ids)

    def end(self) -> None:
        self._prompt = True


class _Done:
    """The last item of a stream: the result, or the error that ended it."""

    def __init__(self, result: Any = None, error: BaseException | None = None) -> None:
        self.result = result
        self.error = error


class _Worker:
    """Runs one generation in a daemon thread."""

    def __init__(
        self,
        generate: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deliver: Callable[[Any], None],
        tokenizer: Any,
        skip_prompt: bool,
        decode_kwargs: dict[str, Any] | None,
    ) -> None:
        if kwargs.get("streamer") is not None:
            raise InvalidInputError(
                "stream() brings its own streamer; leave streamer= out, or call generate(streamer=)"
            )
        self._deliver = deliver
        self.emit = _Emitter(deliver)
        kwargs = dict(kwargs)
        if tokenizer is None:
            streamer: BaseStreamer = _TokenEmitter(self.emit, skip_prompt)
        else:
            options = {"skip_special_tokens": True, **(decode_kwargs or {})}
            streamer = _TextEmitter(tokenizer, self.emit, skip_prompt, **options)
            if kwargs.get("stop_strings") is not None:
                kwargs.setdefault("tokenizer", tokenizer)
        self._call = lambda: generate(*args, streamer=streamer, **kwargs)
        self.thread = threading.Thread(target=self._run, name="specdiff-stream", daemon=True)

    def _run(self) -> None:
        try:
            done = _Done(result=self._call())
        except _Cancelled:
            done = _Done()
        except BaseException as error:  # whatever it is belongs to the reader
            done = _Done(error=error)
        self._deliver(done)


class TextStream(Iterator[Any]):
    """Iterator over a running generation. Also a context manager; leaving it ends the generation.

    Attributes:
        result: what ``generate`` returned, once the iterator is exhausted; None before and after an early close.
    """

    def __init__(self, make: Callable[[Callable[[Any], None]], _Worker]) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False
        self.result: Any = None
        self._worker = make(self._queue.put)
        self._worker.thread.start()

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        item = self._queue.get()
        if not isinstance(item, _Done):
            return item
        self._closed = True
        self._worker.thread.join()
        if item.error is not None:
            raise item.error
        self.result = item.result
        raise StopIteration

    def close(self) -> None:
        """End the generation at its next token and wait for its thread. Does nothing once the stream has ended."""
        if not self._closed:
            self._closed = True
            self._worker.emit.cancelled.set()
            self._worker.thread.join()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.emit.cancelled.set()


class AsyncTextStream(AsyncIterator[Any]):
    """Asynchronous twin of :class:`TextStream`; made inside a running event loop, closed by ``await aclose()``.

    Attributes:
        result: what ``generate`` returned, once the iterator is exhausted.
    """

    def __init__(self, make: Callable[[Callable[[Any], None]], _Worker]) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._closed = False
        self.result: Any = None
        loop, put = asyncio.get_running_loop(), self._queue.put_nowait

        def deliver(item: Any) -> None:  # holds no reference to the stream, which may be dropped while this runs
            try:
                loop.call_soon_threadsafe(put, item)
            except RuntimeError:  # the event loop is closed: nobody reads any more
                if not isinstance(item, _Done):
                    raise _Cancelled from None

        self._worker = make(deliver)
        self._worker.thread.start()

    def __aiter__(self) -> AsyncTextStream:
        return self

    async def __anext__(self) -> Any:
        if self._closed:
            raise StopAsyncIteration
        item = await self._queue.get()
        if not isinstance(item, _Done):
            return item
        self._closed = True
        if item.error is not None:
            raise item.error
        self.result = item.result
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the generation at its next token and wait for its thread."""
        if not self._closed:
            self._closed = True
            self._worker.emit.cancelled.set()
            await asyncio.to_thread(self._worker.thread.join)

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.emit.cancelled.set()


def stream(
    model: Any,
    *args: Any,
    tokenizer: Any = None,
    skip_prompt: bool = True,
    decode_kwargs: dict[str, Any] | None = None,
    **generate_kwargs: Any,
) -> TextStream:
    """Generate in a thread and iterate over what comes out.

    Args:
        model: a ``SpecDiff`` or anything else whose ``generate`` takes ``streamer=``.
        *args: positional arguments of ``generate``.
        tokenizer: yields pieces of text if given (one row only, as transformers' ``TextStreamer``), else token ids: an
            int per step for one row, a list of ints for more.
        skip_prompt: leave the prompt out.
        decode_kwargs: for ``tokenizer.decode``; special tokens are skipped by default.
        **generate_kwargs: keyword arguments of ``generate``.

    Returns:
        An iterator with ``close()`` and, at the end, ``result``. It raises the generation's own exception after the
        tokens that came before it.
    """
    return TextStream(
        lambda deliver: _Worker(model.generate, args, generate_kwargs, deliver, tokenizer, skip_prompt, decode_kwargs)
    )


def astream(
    model: Any,
    *args: Any,
    tokenizer: Any = None,
    skip_prompt: bool = True,
    decode_kwargs: dict[str, Any] | None = None,
    **generate_kwargs: Any,
) -> AsyncTextStream:
    """As :func:`stream`, for ``async for``. Call it inside a coroutine."""
    return AsyncTextStream(
        lambda deliver: _Worker(model.generate, args, generate_kwargs, deliver, tokenizer, skip_prompt, decode_kwargs)
    )
