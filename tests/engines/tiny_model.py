"""Makes the model the engine tests run: two layers of random numbers that answer in words, as GGUF and as a HF folder.

    tiny_model.py SMOLLM2.gguf FOLDER        needs numpy and gguf

The tokenizer is SmolLM2's, so that a token has as many bytes as with real models. Only 64 whole words can be answered:
an answer that comes back as text is the same tokens again, and what the next prompt holds of it can be counted exactly.
Attention is made sharp, so that a block of wrong KV changes the answer.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 2, 64, 128, 4, 2, 32
CONTEXT, WORDS = 8192, 64
SPECIAL = {"bos": 1, "eos": 2, "unk": 0, "pad": 2}
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% if m['tool_calls'] %}{% for c in m['tool_calls'] %}"
    "{{ '\\ncalls ' + c['function']['name'] + ' ' + (c['function']['arguments'] | tojson) }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def weights(vocabulary, words):
    """Named as in a HF checkpoint."""
    rng = np.random.default_rng(7)

    def some(rows, columns, scale):
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    head = np.zeros((vocabulary, HIDDEN), np.float32)
    head[words] = some(len(words), HIDDEN, 1)
    tensors = {"model.embed_tokens.weight": some(vocabulary, HIDDEN, 1), "model.norm.weight": ones, "lm_head.weight": head}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": ones,
            at + "self_attn.q_proj.weight": some(HEADS * HEAD, HIDDEN, 0.25),
            at + "self_attn.k_proj.weight": some(KV_HEADS * HEAD, HIDDEN, 0.25),
            at + "self_attn.v_proj.weight": some(KV_HEADS * HEAD, HIDDEN, 0.25),
            at + "self_attn.o_proj.weight": some(HIDDEN, HEADS * HEAD, 0.25),
            at + "post_attention_layernorm.weight": ones,
            at + "mlp.gate_proj.weight": some(INNER, HIDDEN, 0.1),
            at + "mlp.up_proj.weight": some(INNER, HIDDEN, 0.1),
            at + "mlp.down_proj.weight": some(HIDDEN, INNER, 0.1),
        }
    return tensors


def hugging_face(folder, tensors, tokens, types, merges):
    folder.mkdir(parents=True, exist_ok=True)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    head = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(tokens), "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "hidden_act": "silu", "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "torch_dtype": "float32", "use_cache": True, "bos_token_id": SPECIAL["bos"],
        "eos_token_id": SPECIAL["eos"], "pad_token_id": SPECIAL["pad"],
    }  # fmt: skip
    special = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, (token, kind) in enumerate(zip(tokens, types))
        if kind == gguf.TokenType.CONTROL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = [{"type": "Digits", "individual_digits": True}, byte_level]
    bpe = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [pair.split(" ") for pair in merges],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split}, "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True}, "model": bpe,
    }  # fmt: skip
    names = {f"{name}_token": tokens[i] for name, i in SPECIAL.items()}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False}
    ids = {f"{name}_token_id": SPECIAL[name] for name in ("bos", "eos", "pad")}
    files = {
        "config": config, "generation_config": ids, "tokenizer": tokenizer,
        "tokenizer_config": about | names | {"chat_template": TEMPLATE},
    }  # fmt: skip
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def interleaved(tensor, heads):
    """Rows of a q or k projection as GGUF has them: its rotary pairs are neighbours, HF's are half a head apart."""
    return tensor.reshape(heads, 2, HEAD // 2, HIDDEN).swapaxes(1, 2).reshape(tensor.shape)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def as_gguf(file, tensors, tokens, types, merges):
    to = gguf.GGUFWriter(file, "llama")
    to.add_name("tiny")
    to.add_context_length(CONTEXT)
    to.add_embedding_length(HIDDEN)
    to.add_block_count(LAYERS)
    to.add_feed_forward_length(INNER)
    to.add_head_count(HEADS)
    to.add_head_count_kv(KV_HEADS)
    to.add_key_length(HEAD)
    to.add_value_length(HEAD)
    to.add_layer_norm_rms_eps(1e-5)
    to.add_rope_dimension_count(HEAD)
    to.add_rope_freq_base(10000.0)
    to.add_vocab_size(len(tokens))
    to.add_file_type(gguf.LlamaFileType.ALL_F32)
    to.add_tokenizer_model("gpt2")
    to.add_tokenizer_pre("smollm")
    to.add_token_list(tokens)
    to.add_token_types(types)
    to.add_token_merges(merges)
    to.add_bos_token_id(SPECIAL["bos"])
    to.add_eos_token_id(SPECIAL["eos"])
    to.add_unk_token_id(SPECIAL["unk"])
    to.add_pad_token_id(SPECIAL["pad"])
    to.add_add_bos_token(False)
    to.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        inner = name.removesuffix(".weight")
        if inner in OUTER_NAMES:
            to.add_tensor(f"{OUTER_NAMES[inner]}.weight", tensor)
            continue
        _, _, layer, part = inner.split(".", 3)
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
        to.add_tensor(f"blk.{layer}.{GGUF_NAMES[part]}.weight", interleaved(tensor, heads) if heads else tensor)
    to.write_header_to_file()
    to.write_kv_data_to_file()
    to.write_tensors_to_file()
    to.close()


def main(source, folder):
    fields = gguf.GGUFReader(source).fields
    tokens, types, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    whole = [i for i, token in enumerate(tokens) if token.startswith("Ġ") and token[1:].isalpha() and token[1:].isascii() and len(token) > 4]
    words = np.random.default_rng(3).choice(whole[:4000], WORDS, replace=False)
    tensors = weights(len(tokens), words)
    Path(folder).mkdir(parents=True, exist_ok=True)
    hugging_face(Path(folder) / "tiny", tensors, tokens, types, merges)
    as_gguf(str(Path(folder) / "tiny.gguf"), tensors, tokens, types, merges)


main(*sys.argv[1:])
