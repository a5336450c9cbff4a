"""A language model made from nothing: small, random, complete. For runs of a genuine SGLang that need no real weights.

A Llama of two layers and 2,048 tokens with 32,768 positions, as a folder in Hugging Face layout (1.4 MB). Everything
in it follows from the version's label: the same label gives the same bytes, another label other weights and so other
greedy tokens. All numbers are drawn from SHAKE-256 and placed exactly in float32, so no library's random stream
matters.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save

VOCABULARY = 2048
CONTEXT = 32_768
INDEX = "model.safetensors.index.json"
_HIDDEN = 64
_INNER = 128
_LAYERS = 2
# Attention backends of GPUs have kernels for heads of 64. One head: attention is all that a long prompt costs on a CPU.
_HEADS = 1
_KV_HEADS = 1
_HEAD = 64
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>")
_FIRST_WORD = len(_SPECIAL) + 256
_SYLLABLES = ("ka", "lo", "mi", "ter", "ran", "vo", "sel", "pu", "dri", "na", "est", "or", "quo", "bin", "ju", "wex")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def files(version: str, shards: int = 2) -> dict[str, bytes]:
    """The model of a version: file name -> content, in the order of the names.

    Args:
        version: label that the weights are drawn from.
        shards: number of safetensors files, 1 to 21.

    Raises:
        ValueError: fewer than one shard, or more than there are tensors.
    """
    shapes = dict(_shapes())
    if not 1 <= shards <= len(shapes):
        raise ValueError(f"shards: {shards}; the tiny model has {len(shapes)} tensors, so 1 to {len(shapes)} shards")
    content: dict[str, bytes] = {
        "config.json": _json(_config()),
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json(_tokenizer_config()),
    }
    place: dict[str, str] = {}
    names = list(shapes)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        # Neighbours stay together, as in exports of real models.
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        content[file] = save({name: _tensor(version, name, shapes[name]) for name in part}, {"format": "pt"})
        place.update(dict.fromkeys(part, file))
    total = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    content[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": place})
    return dict(sorted(content.items()))


def write(folder: str | os.PathLike[str], version: str, shards: int = 2) -> pathlib.Path:
    """Write the model of a version into ``folder`` (made where it is missing), which is also returned.

    Raises:
        ValueError: see :func:`files`.
        OSError: the folder may have some of the files.
    """
    target = pathlib.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, data in files(version, shards).items():
        (target / name).write_bytes(data)
    return target


def word(token: int) -> str:
    """The text of a token from 262 on: a space and a made-up word, which the tokenizer gives back as that token."""
    text, rest = "", token - _FIRST_WORD + len(_SYLLABLES)
    while rest:
        rest, digit = divmod(rest, len(_SYLLABLES))
        text = _SYLLABLES[digit] + text
    return " " + text


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, _HIDDEN)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (_HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (_HEADS * _HEAD, _HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (_KV_HEADS * _HEAD, _HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (_KV_HEADS * _HEAD, _HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (_HIDDEN, _HEADS * _HEAD)
        yield f"{prefix}.post_attention_layernorm.weight", (_HIDDEN,)
        yield f"{prefix}.mlp.gate_proj.weight", (_INNER, _HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (_INNER, _HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (_HIDDEN, _INNER)
    yield "model.norm.weight", (_HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, _HIDDEN)


def _tensor(version: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform in (-1, 1) times a power of two, so exact in float32; layer norms are ones."""
    if name.endswith("norm.weight"):
        return np.ones(shape, dtype=np.float32)
    drawn = hashlib.shake_256(f"seatrial tiny model 1/{version}/{name}".encode()).digest(2 * int(np.prod(shape)))
    whole = np.frombuffer(drawn, dtype="<u2").astype(np.float32)
    # Embeddings at full size and projections at a quarter: attention and the MLPs then move the argmax at every token.
    scale = 1.0 if "embed" in name or "lm_head" in name else 0.25
    return ((whole - 32767.5) / 32768.0 * scale).astype(np.float32).reshape(shape)


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tokenizer() -> dict[str, object]:
    """Bytes, and made-up words of two or three syllables up to the size of the vocabulary."""
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *_byte_characters(), *_words()))}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
            for number, token in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            # A word of the vocabulary is one token without merges that would build it up.
            "ignore_merges": True,
            "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }


def _byte_characters() -> Iterator[str]:
    """The character that stands for each byte in byte-level BPE: itself where it prints, else one from 256 on."""
    prints = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = 256
    for byte in range(256):
        if byte in prints:
            yield chr(byte)
        else:
            yield chr(spare)
            spare += 1


def _words() -> Iterator[str]:
    """As many as fill the vocabulary; "Ġ" stands for the space before a word."""
    return ("Ġ" + word(token).strip() for token in range(_FIRST_WORD, VOCABULARY))


def _json(value: dict[str, object]) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()
