"""Text to tokens: what is too long is refused early, and nothing blocks the event loop."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

from router.chat_template import TemplateError
from router.tokenizer import PromptTooLong, Tokenizer


def test_special_tokens_are_added_only_if_asked(byte_level_tokenizer_maker: object) -> None:
    backend = byte_level_tokenizer_maker()  # type: ignore[operator]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=12)
    tokenizer = Tokenizer(backend)
    plain = tokenizer.encode("Hello Paris a b c d", add_special_tokens=False)
    assert tokenizer.encode("Hello Paris a b c d") == [0, *plain]
    assert len(plain) > 4 and tokenizer.decode(plain) == "Hello Paris a b c d"


def test_a_text_far_over_the_context_is_refused_by_its_beginning(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptTooLong) as error:
        tokenizer.encode("xyz " * 100_000, context_length=100)
    assert 200 < error.value.tokens <= 1600


def test_a_long_text_of_few_tokens_is_not_refused(real_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(real_folder)
    blanks = " " * 4000  # 64 and more to a token
    assert len(tokenizer.encode(blanks, context_length=100)) < 100
    assert tokenizer.decode(tokenizer.encode(blanks, context_length=100)) == blanks


def test_a_body_of_8_mib_does_not_hold_up_others(real_folder: Path) -> None:
    """The event loop goes on while a thread tokenises; were the interpreter's lock held, it could not turn once."""
    tokenizer = Tokenizer.from_folder(real_folder)
    text = "lorem ipsum dolor sit amet " * 40_000

    async def turns() -> int:
        with ThreadPoolExecutor(1) as pool:
            work = asyncio.get_running_loop().run_in_executor(pool, tokenizer.encode, text)
            count = 0
            while not work.done():
                await asyncio.sleep(0.001)
                count += 1
            return count

    assert asyncio.run(turns()) > 5


def test_names_of_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(tokenizer.token_id("Ġquick")) == " quick"
    assert tokenizer.token_text(tokenizer.token_id("ð")) == "bytes:\\xf0"
    assert tokenizer.token_text(tokenizer.token_id("<|im_end|>")) == "<|im_end|>"
    assert tokenizer.token_text(10**6) == ""
    with pytest.raises(KeyError):
        tokenizer.token_id("no such token")


def test_a_model_without_a_template_has_no_chat(byte_level_tokenizer: tokenizers.Tokenizer) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer(byte_level_tokenizer).render_chat([])


def test_what_a_folder_says_of_its_tokenizer(byte_level_tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """Special tokens are texts, however they are written there; paths of the machine that made it stay there."""
    byte_level_tokenizer.save(str(tmp_path / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False}
    config = {
        "tokenizer_class": "T",
        "eos_token": eos,
        "bos_token": "<b>",
        "model_max_length": 10**30,
        "name_or_path": "/home/someone",
        "added_tokens_decoder": {"2": eos},
        "chat_template": "{{ messages }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    info = Tokenizer.from_folder(tmp_path).info
    assert (info["tokenizer_class"], info["eos_token"], info["bos_token"]) == ("T", "<|im_end|>", "<b>")
    assert info["pad_token"] is info["unk_token"] is None and info["chat_template"] == "{{ messages }}"
    assert info["added_tokens_decoder"] == {"2": "<|im_end|>"} and info["model_max_length"] == 10**30
    assert "name_or_path" not in info


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
