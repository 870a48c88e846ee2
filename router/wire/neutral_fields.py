"""Top-level fields of other servers that ask for nothing: a body that has one with such a value is read without it.

A field that is in neither table is an error, as is one with another value: it would change the answer. null never is.
"""

from typing import Any

import msgspec

# Ids and facts about a request. No answer depends on them, whatever they say.
HINTS = frozenset("chat_id custom_labels input_type keep_alive request_id rid session_id usage user".split())

NOTHING: tuple[Any, ...] = ([], {}, "")
# The values that change nothing: the documented defaults of vLLM, SGLang and OpenAI, then of what else clients send.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # vLLM
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": NOTHING,
    "bad_words": NOTHING,
    "best_of": (1,),
    "chat_template": NOTHING,
    "chat_template_kwargs": NOTHING,
    "continue_final_message": (False,),
    "documents": NOTHING,
    "early_stopping": (False,),
    "echo": (False,),
    "ec_transfer_params": NOTHING,
    "embed_dtype": ("float32",),
    "encoding_format": ("float",),
    "endianness": ("native", "little"),
    "include_reasoning": (True,),
    "kv_transfer_params": NOTHING,
    "length_penalty": (1,),
    "logits_processors": NOTHING,
    "logprob_token_ids": NOTHING,
    "media_io_kwargs": NOTHING,
    "mm_processor_kwargs": NOTHING,
    "padding": ("do_not_pad",),
    "priority": (0,),
    "prompt_logprobs": (0,),
    "repetition_detection": NOTHING,
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "softmax": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "use_activation": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": NOTHING,
    "watermarking": (False,),
    # SGLang
    "apply_softmax": (False,),
    "custom_logit_processor": NOTHING,
    "custom_params": NOTHING,
    "images_config": NOTHING,
    "item_first": (False,),
    "lora_path": NOTHING,
    "no_stop_trim": (False,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_pooled_hidden_states": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True,),
    "session_params": NOTHING,
    "stop_regex": NOTHING,
    "stream_reasoning": (True,),
    "use_audio_in_video": (False,),
    # OpenAI
    "background": (False,),
    "frequency_penalty": (0,),
    "functions": NOTHING,
    "include": NOTHING,
    "logprobs": (False, 0),
    "max_tool_calls": (),
    "metadata": NOTHING,
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "stop": NOTHING,
    "store": (False,),
    "stream": (False,),
    "tools": NOTHING,
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    # llama.cpp, Ollama, OpenRouter, and clients of several servers
    "cache_prompt": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "format": NOTHING,
    "id_slot": (-1,),
    "images": NOTHING,
    "mirostat": (0,),
    "models": NOTHING,
    "options": NOTHING,
    "plugins": NOTHING,
    "provider": NOTHING,
    "raw": (False,),
    "template": NOTHING,
    "tfs_z": (1,),
    "top_a": (0,),
    "transforms": NOTHING,
    "typical_p": (1,),
    "xtc_probability": (0,),
}


def without_neutral(body: Any, kind: type[msgspec.Struct]) -> Any:
    """The body, decoded, without the fields that `kind` does not know and that ask for nothing. A field that asks for
    something stays, so that it is refused by name; and so does what is no object."""
    if not isinstance(body, dict):
        return body
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return {name: value for name, value in body.items() if name in known or not _is_neutral(name, value)}


def _is_neutral(name: str, value: Any) -> bool:
    return name in HINTS or value is None or any(_same(value, neutral) for neutral in NEUTRAL.get(name, ()))


def _same(said: Any, neutral: Any) -> bool:
    """Whether two values are equal, where false is not 0."""
    return bool(isinstance(said, bool) == isinstance(neutral, bool) and said == neutral)
