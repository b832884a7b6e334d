"""Other runners on the same weights and prompts, as arms of the benchmark; one that cannot run is refused by name.

=============  ====================================================================================================
hf_dflash      transformers' own DFlash decoding, with a drafter exported for it
dflash         the ``dflash`` package, with a drafter in its layout
llama_cpp      llama.cpp through ``llama-cpp-python``, plain, on a GGUF file at that file's own precision
llama_lookup   the same with its prompt lookup
=============  ====================================================================================================

All take one prompt at a time. Their drafters see the same target object; llama.cpp reads its own file.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel, StoppingCriteriaList

from specdiff.bench.arms import Arm, Run, Watch, end_tokens, sampling_arguments, until_end
from specdiff.bench.models import pad_token_of
from specdiff.errors import SpecDiffError, UnsupportedError
from specdiff.tuning.measure import synchronise

HF_DFLASH, DFLASH, LLAMA, LLAMA_LOOKUP = "hf_dflash", "dflash", "llama_cpp", "llama_lookup"
PEERS = {
    HF_DFLASH: "transformers' DFlash decoding",
    DFLASH: "the dflash package",
    LLAMA: "llama.cpp, plain",
    LLAMA_LOOKUP: "llama.cpp, prompt lookup",
}
"""What reports call them."""


@dataclass(frozen=True)
class PeerFiles:
    """What peers read.

    Attributes:
        drafter: folder of a drafter exported for transformers' DFlash decoding (``specdiff export``).
        dflash: folder of a drafter in the layout of the ``dflash`` package.
        gguf: the target as a GGUF file.
    """

    drafter: str | None = None
    dflash: str | None = None
    gguf: str | None = None


def peer_arms(
    model: PreTrainedModel, temperature: float, batch_size: int, files: PeerFiles, threads: int | None = None
) -> tuple[dict[str, Arm], dict[str, str]]:
    """The peers that run here, and why the others do not.

    Args:
        model: the target.
        temperature: 0 is greedy.
        batch_size: prompts per call.
        files: what they read.
        threads: CPU threads for llama.cpp; torch's when None.
    """
    makers = {
        HF_DFLASH: lambda: transformers_dflash(model, temperature, _given(files.drafter, "--peer-drafter")),
        DFLASH: lambda: dflash_package(model, temperature, _given(files.dflash, "--peer-dflash")),
        LLAMA: lambda: llama_cpp(model, temperature, _given(files.gguf, "--peer-gguf"), threads),
        LLAMA_LOOKUP: lambda: llama_cpp(model, temperature, _given(files.gguf, "--peer-gguf"), threads, lookup=True),
    }
    arms: dict[str, Arm] = {}
    refused: dict[str, str] = {}
    for name, make in makers.items():
        if batch_size > 1:
            refused[name] = "takes one prompt at a time"
            continue
        try:
            arms[name] = make()
        except SpecDiffError as error:
            refused[name] = str(error)
    return arms, refused


def _given(path: str | None, option: str) -> Path:
    if path is None:
        raise UnsupportedError(f"needs a file: give {option}")
    if not Path(path).exists():
        raise UnsupportedError(f"{option}: {path} does not exist")
    return Path(path)


def transformers_dflash(model: PreTrainedModel, temperature: float, folder: Path) -> Arm:
    """``generate(assistant_model=, speculation_type="dflash")`` of transformers.

    Raises:
        UnsupportedError: this transformers has no DFlash decoding, or ``folder`` is no drafter that it loads.
    """
    from transformers import GenerationConfig

    if not hasattr(GenerationConfig(), "speculation_type"):
        raise UnsupportedError("this version of transformers has no DFlash decoding")
    try:
        drafter = AutoModel.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
        for name in ("target_layer_ids", "block_size", "mask_token_id"):
            getattr(drafter.config, name)
        taken = inspect.signature(drafter.forward).parameters
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        raise UnsupportedError(f"transformers does not load {folder} as a DFlash drafter: {_line(error)}") from error
    if "context_hidden_states" not in taken:
        raise UnsupportedError(f"{folder} holds a {type(drafter).__name__}, which reads no target states")
    ends = end_tokens(model)

    def call(prompts: Sequence[Tensor], max_new_tokens: int, seed: int) -> Run:
        ids = prompts[0][None].to(model.device)
        watch = Watch(model.device)
        torch.manual_seed(seed)
        synchronise(model.device)
        began = time.perf_counter()
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_token_of(model),
            assistant_model=drafter,
            speculation_type="dflash",
            stopping_criteria=StoppingCriteriaList([watch]),
            **sampling_arguments(temperature),
        )
        synchronise(model.device)
        ended = time.perf_counter()
        row = until_end(out[0, ids.shape[1] :].tolist(), ends)
        first = min(len(row), watch.first_length - ids.shape[1])
        return Run([row], watch.first_at - began, ended - watch.first_at, first, watch.calls - 1)

    return call


def dflash_package(model: PreTrainedModel, temperature: float, folder: Path) -> Arm:
    """``dflash_generate`` of the ``dflash`` package.

    Its own timer synchronises a CUDA device, so it cannot time anything else: the call for one token is the time to
    the first one, and is taken off.

    Raises:
        UnsupportedError: the package is not installed or does not load ``folder``.
    """
    if importlib.util.find_spec("dflash") is None:
        raise UnsupportedError("not installed: pip install --no-deps dflash (it pins other versions of its libraries)")
    try:
        from dflash.model import DFlashDraftModel, dflash_generate
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"the installed dflash does not import here: {_line(error)}") from error
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "specdiff" in config:
            raise UnsupportedError(f"{folder} uses options of specdiff that the dflash package does not know")
        drafter = DFlashDraftModel.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UnsupportedError(f"the dflash package does not load {folder}: {_line(error)}") from error
    ends = sorted(end_tokens(model))

    def once(ids: Tensor, count: int, seed: int) -> tuple[list[int], float, int]:
        counted = _Counted(model)
        torch.manual_seed(seed)
        synchronise(model.device)
        began = time.perf_counter()
        with torch.inference_mode():
            out = dflash_generate(drafter, counted, ids, count, ends or None, temperature)
        synchronise(model.device)
        return out[0, ids.shape[1] :].tolist(), time.perf_counter() - began, counted.count

    def call(prompts: Sequence[Tensor], max_new_tokens: int, seed: int) -> Run:
        ids = prompts[0][None].to(model.device)
        _, first, _ = once(ids, 1, seed)
        row, seconds, passes = once(ids, max_new_tokens, seed)
        return Run([until_end(row, set(ends))], first, max(seconds - first, 1e-9), 1, passes - 1)

    return call


class _Counted:
    """The target seen through, its forward passes counted. The target itself gets no hook."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.count = model, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def llama_cpp(
    model: PreTrainedModel, temperature: float, gguf: Path, threads: int | None, *, lookup: bool = False
) -> Arm:
    """llama.cpp on a GGUF file, at that file's precision.

    Raises:
        UnsupportedError: ``llama-cpp-python`` is not installed, or does not read the file or its vocabulary differs.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise UnsupportedError("not installed: pip install llama-cpp-python")
    import llama_cpp as library
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    try:
        runner = library.Llama(
            model_path=str(gguf),
            n_ctx=4096,
            n_threads=threads or torch.get_num_threads(),
            logits_all=lookup,
            verbose=False,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=10) if lookup else None,
        )
    except (ValueError, OSError, AssertionError) as error:
        raise UnsupportedError(f"llama.cpp does not read {gguf}: {_line(error)}") from error
    if runner.n_vocab() != model.config.get_text_config().vocab_size:
        raise UnsupportedError(f"{gguf} has {runner.n_vocab()} tokens, the target has another number")
    ends = end_tokens(model)

    def call(prompts: Sequence[Tensor], max_new_tokens: int, seed: int) -> Run:
        runner.reset()
        runner.set_seed(seed)
        row: list[int] = []
        began = time.perf_counter()
        first_at = began
        for token in runner.generate(prompts[0].tolist(), temp=temperature, top_k=0, top_p=1.0, min_p=0.0,
                                     repeat_penalty=1.0):  # fmt: skip
            row.append(int(token))
            if len(row) == 1:
                first_at = time.perf_counter()
            if row[-1] in ends or len(row) == max_new_tokens:
                break
        return Run([row], first_at - began, time.perf_counter() - first_at, 1, 0 if lookup else len(row) - 1)

    return call


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
