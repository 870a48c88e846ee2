"""Writers of GGUF files of tiny random models."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĠĠ", "he"]
HIDDEN, LAYERS, HEADS, KV_HEADS = 64, 2, 4, 2
Q4_1 = gguf.GGMLQuantizationType.Q4_1


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path, kind: gguf.GGMLQuantizationType = Q4_1, hidden: int = HIDDEN, turn_end: int | None = None
) -> None:
    """A random Llama with tied embeddings, in `kind` where quantisation is possible, and SmolLM's pre-tokenizer."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ Ġ", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if turn_end is not None:
        writer.add_eot_token_id(turn_end)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    def add(name: str, *shape: int) -> None:
        values = rng.normal(0, 0.2, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, 1 + values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(TOKENS), hidden)
    add("output_norm.weight", hidden)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", hidden)
        add(f"blk.{layer}.attn_q.weight", hidden, hidden)
        add(f"blk.{layer}.attn_k.weight", hidden * KV_HEADS // HEADS, hidden)
        add(f"blk.{layer}.attn_v.weight", hidden * KV_HEADS // HEADS, hidden)
        add(f"blk.{layer}.attn_output.weight", hidden, hidden)
        add(f"blk.{layer}.ffn_norm.weight", hidden)
        add(f"blk.{layer}.ffn_gate.weight", 2 * hidden, hidden)
        add(f"blk.{layer}.ffn_up.weight", 2 * hidden, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, 2 * hidden)
    finish(writer)


def write_lfm2(path: Path) -> None:
    """A random LFM2 of two layers, of which the second has attention."""
    hidden, rng, kind = 64, np.random.default_rng(0), gguf.GGMLQuantizationType.Q4_0
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv([0, 2])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_shortconv_l_cache(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("lfm2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ Ġ", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    norms = {"token_embd_norm": hidden, "blk.1.attn_q_norm": 16, "blk.1.attn_k_norm": 16}
    matrices = {"token_embd": (len(TOKENS), hidden), "blk.0.shortconv.in_proj": (3 * hidden, hidden)}
    matrices |= dict.fromkeys(("blk.0.shortconv.out_proj", "blk.1.attn_q", "blk.1.attn_output"), (hidden, hidden))
    matrices |= dict.fromkeys(("blk.1.attn_k", "blk.1.attn_v"), (hidden // 2, hidden))
    for layer in ("blk.0", "blk.1"):
        norms |= {f"{layer}.attn_norm": hidden, f"{layer}.ffn_norm": hidden}
        matrices |= {f"{layer}.ffn_gate": (2 * hidden, hidden), f"{layer}.ffn_up": (2 * hidden, hidden)}
        matrices[f"{layer}.ffn_down"] = (hidden, 2 * hidden)
    for name, size in norms.items():
        writer.add_tensor(f"{name}.weight", rng.normal(1, 0.2, size).astype(np.float32))
    writer.add_tensor("blk.0.shortconv.conv.weight", rng.normal(0, 0.2, (hidden, 3)).astype(np.float32))
    for name, shape in matrices.items():
        values = gguf.quants.quantize(rng.normal(0, 0.2, shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=kind)
    finish(writer)
