"""Models for the tests of several rooms: the real one, with what `transformers` makes of it, computed once a session;
and one of a few hundred kilobytes.
"""

import gc
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.kept import kept

# Before anything imports Triton, whose own functions are otherwise compiled, not interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run, so that a failure is somebody's change: `--hypothesis-profile=search` finds new ones.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("fixed")


# Every case, where otherwise some stand for all: `make nightly`.
NIGHTLY = bool(os.environ.get("SHOAL_NIGHTLY"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Libraries, test modules and tests are millions of objects that stay: they are not walked as they come, nor by any
    collection of the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run. Kernels of Triton run on the GPU or, without one, in the interpreter."""
    marked = {name: [item for item in items if item.get_closest_marker(name)] for name in ("gpu", "interpreter")}
    if not any(marked.values()):
        return
    import torch

    name, why = ("interpreter", "there is a GPU") if torch.cuda.is_available() else ("gpu", "needs a GPU")
    for item in marked[name]:
        item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


# ---------------------------------------------------------------- the real one

NAME = "SmolLM2-135M-Instruct"
NEW_TOKENS = 16

SYSTEM = "You are a careful assistant who answers in one short sentence and never makes anything up. "
SHORT = [
    "The",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    '{"name": "Ada", "born": 1815, "',
    "<html>\n  <head>\n    <title>",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 17 times 3?\nA:",
    "Ein Satz auf Deutsch: Die Katze",
    "Le chat noir est assis sur",
    "日本の首都は",
    "Привет, как",
    "😀😃😄 means",
    "naïve café — “quoted” …",
    "   leading spaces and\ttabs",
    "\n\n\n",
    "A list:\n- apples\n- pears\n-",
    "To be, or not to be, that is",
    "The mitochondria is the powerhouse of",
    "Dear Sir or Madam,\n\nI am writing to",
    SYSTEM + "What is the tallest mountain?",
    SYSTEM + "Who wrote Hamlet?",
]
CHATS = [
    [{"role": "user", "content": "Hello! Who are you?"}],
    [{"role": "user", "content": "Explain in two sentences why the sky is blue, as if to a child."}],
    [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Wie heißt die Hauptstadt von Österreich? 🇦🇹"}],
    [
        {"role": "user", "content": "Give me a word that rhymes with cat."},
        {"role": "assistant", "content": "Hat."},
        {"role": "user", "content": "Another one, please."},
    ],
]
PROSE = (
    "The lighthouse keeper had not spoken to anyone for nineteen days when the boat came. He saw it first as a speck "
    "between two waves, then as a hull, then as three people who waved. He counted the eggs, put the kettle on, and "
    "went down the hundred and six steps to the landing, holding the rail, since the night had left ice on the iron. "
)
CODE = '''
class Stack:
    """Last in, first out."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
'''


@dataclass(frozen=True)
class Reference:
    """Prompts of 1 to 600 tokens, and what transformers says to each, greedily, in float32. First come 24 short ones,
    then one for each of `chats`."""

    folder: Path
    chats = CHATS
    first_chat = len(SHORT)

    @cached_property
    def prompts(self) -> list[list[int]]:
        chats_and_texts = [CHATS, SHORT, PROSE * 3, PROSE * 3 + "The first of the three was", CODE, (PROSE + CODE) * 6]
        read = [(self.folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")]
        return kept([chats_and_texts, read], lambda: self._encoded(*chats_and_texts))

    def _encoded(self, conversations: list[Any], short: list[str], *longer: str) -> list[list[int]]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        chats = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in conversations]
        encoded = [tokenizer.encode(text)[:600] for text in [*short, *chats, *longer]]
        assert min(map(len, encoded)) == 1 and max(map(len, encoded)) == 600
        assert max(map(len, encoded[: len(SHORT)])) < 40
        return encoded

    @cached_property
    def said(self) -> list[list[int]]:
        """At most NEW_TOKENS each; the last may be the end of the turn."""
        weights = (self.folder / "model.safetensors").stat()
        return kept([self.prompts, NEW_TOKENS, weights.st_size, weights.st_mtime_ns], self._generated)

    def _generated(self) -> list[list[int]]:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        end, said = model.generation_config.eos_token_id, []
        # The short ones together, since each step reads all weights, whatever it computes.
        for batch in [self.prompts[: len(SHORT)], *([prompt] for prompt in self.prompts[len(SHORT) :])]:
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
            for out in model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS):
                tokens = out[longest:].tolist()  # behind an end there is padding
                said.append(tokens[: tokens.index(end) + 1] if end in tokens else tokens)
        assert len({tuple(tokens) for tokens in said}) > 24, "the reference is not worth comparing with"
        return said


@pytest.fixture(scope="session")
def reference() -> Reference:
    base = os.environ.get("SHOAL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"
    folder = Path(base) / "models" / NAME
    assert (folder / "model.safetensors").exists(), f"{folder} is not there: run `shoal pull --dequantize {NAME}` first"
    return Reference(folder)


# ---------------------------------------------------------------- a tiny one

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "dtype": "float32",
}
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte tokenizer, in a folder as the hub has it."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def other_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_model`, with other weights."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "other-llama", seed=8)


def make_tiny_llama(folder: Path, seed: int = 7) -> Path:
    """Writes a random Llama with a byte tokenizer, without torch."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    save_file(_weights(np.random.default_rng(seed)), folder / "model.safetensors", {"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _weights(random: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def normal(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.3).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(CONFIG["vocab_size"], hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": normal(CONFIG["vocab_size"], hidden),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float32)
    return weights


def _tokenizer() -> Tokenizer:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return tokenizer
