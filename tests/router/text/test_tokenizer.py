"""Text to tokens: what is too long is refused early, and nothing blocks the event loop."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

from router.chat.chat_template import ChatTemplate, TemplateError
from router.formats.families import HARMONY, named
from router.text.tokenizer import PromptTooLong, Tokenizer
from router.text.turn_ends import unended_turn


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


def test_tokens_that_only_the_configuration_has(byte_level_tokenizer_maker: object, tmp_path: Path) -> None:
    """Fine-tunes have theirs there. As in transformers, they are added, and those with a name are special."""
    backend = byte_level_tokenizer_maker()  # type: ignore[operator]
    size = backend.get_vocab_size()
    backend.add_tokens(["<|turn|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    added = {
        str(size): {"content": "<|turn|>", "special": True},
        str(size + 1): {"content": "<|new|>", "special": True, "lstrip": False, "of_later_versions": 1},
        str(size + 2): {"content": "<word>", "special": False},
        str(size + 9): {"content": "<|nowhere|>", "special": True},
    }
    config = {
        "added_tokens_decoder": added, "eos_token": "<|turn|>",
        "additional_special_tokens": ["<tool é>", "of no vocabulary"],
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|im_start|>"}}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<|turn|><|new|><word>") == [size, size + 1, size + 2]
    assert tokenizer.vocab_size == size + 3
    assert {size, size + 1} <= tokenizer.special_ids and size + 2 not in tokenizer.special_ids
    assert tokenizer.decode([*tokenizer.encode("a<tool é>b"), size]) == "ab"
    assert (tokenizer.info["eos_token"], tokenizer.info["bos_token"]) == ("<|turn|>", "<|im_start|>")


TURNS = "{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ end }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("end", "ends", "written"),
    [
        ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"], None),
        ("<|im_end|>", ["<|endoftext|>"], "<|im_end|>"),
        ("<|im_end|>", [], None),  # nothing is known
        ("\n### ", ["<|im_end|>"], "### \nuser"),
        ("</answer><|im_end|>", ["<|im_end|>"], None),
        (" <|im_end|>", ["<|im_end|>"], None),
        ("{{ raise_exception('never') }}", ["<|im_end|>"], None),
    ],
)
def test_a_template_that_ends_turns_otherwise(
    end: str, ends: list[str], written: str | None, byte_level_tokenizer_maker: object
) -> None:
    backend = byte_level_tokenizer_maker()  # type: ignore[operator]
    tokenizer = Tokenizer(backend, ChatTemplate(TURNS.replace("{{ end }}", end), {}))
    format = tokenizer.output_format("auto", "hunyuan_a13b")
    assert unended_turn(tokenizer, format, [tokenizer.token_id(each) for each in ends]) == written
    assert unended_turn(tokenizer, named(HARMONY, None), [0]) is None
