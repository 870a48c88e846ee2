"""Converts a GGUF file into a Hugging Face folder: weights, configuration, tokenizer, chat template.

`transformers` reads GGUF but cannot save what it read, and parsing and dequantising take it a quarter of a minute: too
long for every start of every replica. So a file is converted once, and its folder is loaded from then on. The folder
has float32 safetensors, or refers to the file for its quantized matrices (`cluster.gguf_index`).
"""

import io
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from cluster import gguf_index

# Values of the GGUF's `tokenizer.ggml.pre` that split numbers into digits before BPE. transformers gives every Llama
# GGUF a plain ByteLevel instead, which these models were not trained with: "  1" would become other tokens.
_DIGITS_ALONE = {"smollm"}


Kept = Literal["nothing", "blocks", "float32"]
"""What a folder has of a file's weights: none, references to its quantized matrices, or all in float32."""


def convert(path: Path, folder: Path, say: Callable[[str], None], kept: Kept = "float32") -> None:
    """Writes the GGUF file, whose architecture transformers must know, into the empty `folder`. Nothing is dequantised
    but for `float32`.

    `say` is called with a line before each step. Raises whatever transformers raises for a file that it cannot read,
    and ValueError for formats that cannot be kept as they are.
    """
    if kept != "float32":
        say(f"reading the tokenizer of {path.name}")
        from transformers import GenerationConfig

        with _alone(path) as only, _parsed_once(), _bars_on_terminals_only():
            config, ends = _config(only), _end_ids(only)
            tokenizer = _tokenizer(only, config.max_position_embeddings)
            if kept == "blocks":
                say(f"reading where the matrices of {path.name} are")
                gguf_index.write(path, config, folder)
        _write(folder, config, GenerationConfig.from_model_config(config), tokenizer, ends)
        return
    say(f"reading {path.name} and dequantising it to float32")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with _alone(path) as only, _parsed_once(), _bars_on_terminals_only():
        _config(only)  # raises before the work
        ends = _end_ids(only)
        model = AutoModelForCausalLM.from_pretrained(only.parent, gguf_file=only.name, dtype=torch.float32)
        tokenizer = _tokenizer(only, model.config.max_position_embeddings)
    config = model.config
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    say(f"writing {sum(tensor.nbytes for tensor in state.values()) / 1e6:.0f} MB of float32 weights")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder, config, model.generation_config, tokenizer, ends)


def _config(path: Path) -> Any:
    """The file's configuration as transformers reads it. Raises ValueError if that lacks the file's own base of
    rotation, or its part of heads that rotates, which transformers leaves out for some architectures."""
    import gguf
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    fields = gguf.GGUFReader(str(path)).fields
    architecture = str(fields["general.architecture"].contents())
    base, read = fields.get(f"{architecture}.rope.freq_base"), (getattr(config, "rope_parameters", None) or {})
    if base is not None and not math.isclose(
        said := float(base.contents()), read.get("rope_theta", said), rel_tol=1e-6
    ):
        what = f"{path.name} has a {architecture} model that rotates with base {said:g}"
        raise ValueError(f"{what}, which is not read from such files: take the model's safetensors")
    rotated, part = fields.get(f"{architecture}.rope.dimension_count"), read.get("partial_rotary_factor")
    if rotated is not None and part is not None:
        said, head_dim = int(rotated.contents()), config.hidden_size // config.num_attention_heads
        if said != int((getattr(config, "head_dim", None) or head_dim) * part):
            what = f"{path.name} has a {architecture} model that rotates {said} dimensions of each head"
            raise ValueError(f"{what}, which is not read from such files: take the model's safetensors")
    return config


def _end_ids(path: Path) -> list[int]:
    """The tokens that end a text, a turn or a message by the file."""
    import gguf

    fields = gguf.GGUFReader(str(path)).fields
    said = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(field.contents()) for field in said if field is not None))


def _write(folder: Path, config: Any, generation_config: Any, tokenizer: Any, ends: list[int]) -> None:
    said = generation_config.eos_token_id
    known = said if isinstance(said, list) else [] if said is None else [said]
    if more := [end for end in ends if end not in known]:
        generation_config.eos_token_id = [*known, *more]
    # Left in place, they would make transformers look for the GGUF again when it loads the folder.
    for leftover in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    for part in (config, generation_config, tokenizer):
        part.save_pretrained(folder)


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """A link to the file in a folder without other files. Where there are any, as in a folder of quantized matrices,
    transformers takes the tokenizer from them, and leaves out the file's chat template and special tokens."""
    with TemporaryDirectory(prefix="shoal-gguf-") as folder:
        link = Path(folder) / path.name
        link.symlink_to(path.resolve())
        yield link


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Makes all readers of one file the same object: transformers makes three, and each would parse for seconds."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = cache(reader)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = reader  # type: ignore[misc]


def _bars_on_terminals_only() -> AbstractContextManager[object]:
    """Keeps transformers' progress bars out of log files, where they would be hundreds of lines."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


def _tokenizer(path: Path, context_length: int) -> Any:
    """The file's tokenizer as transformers reads it, with two things that transformers leaves out: the right
    pre-tokenizer, and the length of the longest text that the model takes, in tokens."""
    import gguf
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.model_max_length = context_length
    for local in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(local, None)
    field = gguf.GGUFReader(str(path)).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() in _DIGITS_ALONE:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return tokenizer
