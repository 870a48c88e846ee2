"""The tokenizer of a model that thinks and calls tools."""

from collections.abc import Callable

import pytest
import tokenizers

from router.chat.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from tests.router.endpoints.thinking import THINKER


@pytest.fixture
def thinker(byte_level_tokenizer_maker: Callable[[], tokenizers.Tokenizer]) -> Tokenizer:
    return Tokenizer(byte_level_tokenizer_maker(), ChatTemplate(THINKER, {}))
