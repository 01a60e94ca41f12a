"""A tiny Llama made on the spot, so that the demo and the tests serve a real model without a download.

Its weights are random but of a scale at which the output depends on every earlier token's KV: with vLLM's
`--load-format dummy` it does not, and comparing outputs would prove nothing about the KV that moved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

LAYERS: Final = 4
HIDDEN: Final = 256
HEADS: Final = 4
HEAD_SIZE: Final = 64
INTERMEDIATE: Final = 512
VOCABULARY: Final = 258
"""256 bytes and the two special tokens."""
MAX_MODEL_LEN: Final = 4096
BYTES_PER_TOKEN: Final = LAYERS * 2 * HEADS * HEAD_SIZE * 4
"""KV bytes of one token in float32."""

BEGIN, END = "<s>", "</s>"


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Write the model into `folder` (made if missing) and return it; the same seed gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder / "model.safetensors", seed)
    _write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2))
    return folder


_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "head_dim": HEAD_SIZE,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "mlp_bias": False,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
}


def _shapes() -> Iterator[tuple[str, tuple[int, int], float]]:
    """Yield every matrix: its name, its shape (out × in), and its standard deviation."""
    attention, mlp = 2 / math.sqrt(HIDDEN), 1 / math.sqrt(HIDDEN)
    width = HEADS * HEAD_SIZE
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), 0.5
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{prefix}self_attn.{name}.weight", (width, HIDDEN), attention
        yield f"{prefix}self_attn.o_proj.weight", (HIDDEN, width), 2 / math.sqrt(width)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}mlp.{name}.weight", (INTERMEDIATE, HIDDEN), mlp
        yield f"{prefix}mlp.down_proj.weight", (HIDDEN, INTERMEDIATE), 1 / math.sqrt(INTERMEDIATE)
    yield "lm_head.weight", (VOCABULARY, HIDDEN), 4 / math.sqrt(HIDDEN)


def _write_weights(path: Path, seed: int) -> None:
    import numpy as np  # noqa: PLC0415 - vLLM brings these; the console must start without them
    from safetensors.numpy import save_file  # noqa: PLC0415

    random = np.random.default_rng(seed)
    weights = {
        name: (random.standard_normal(shape) * std).astype(np.float32) for name, shape, std in _shapes()
    }
    norms = [f"model.layers.{layer}.{name}_layernorm.weight" for layer in range(LAYERS) for name in _NORMS]
    for name in [*norms, "model.norm.weight"]:
        weights[name] = np.ones(HIDDEN, dtype=np.float32)
    save_file(weights, path, metadata={"format": "pt"})


_NORMS: Final = ("input", "post_attention")


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the 256 bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (BEGIN, END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "model_max_length": MAX_MODEL_LEN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
