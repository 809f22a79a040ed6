"""The costs of a model's layers: parameters, FLOPs, bytes read, stored and communicated.

Only matrices are counted: norms and biases are a thousandth. `tp` is the number of processes of the
model. The functions return the part of one process, unless they say otherwise. Bytes are those of
bfloat16, with two exceptions. `weights` (bf16 or a name in EIGHT_BITS) says how the matrices of
layers and the head are stored; in 8 bits their scales count, too. `cache` says how keys and values
are stored. The embedding and activations are always in bfloat16.
"""

from __future__ import annotations

import math

from ladder.models.config import ModelConfig
from ladder.models.eight_bits import BLOCK, SCALE_BYTES

BF16, FP32 = 2, 4  # bytes
PRODUCTS = {"attention": ("qkv", "output"), "mlp": ("gate-up", "down")}  # of the usual slots
MULTIPROCESSORS = 132  # of an H100 and an H200
# For sessions of the engine and their memory.
CAPACITY_STEP = 256  # graphs are kept for cache lengths that are multiples of this
GRAPHED_PROMPT_TOKENS = 16384  # a longer prefill keeps the GPU busy without a graph
WORKSPACES = 3 * 2**30  # NCCL's buffers, cuBLAS' workspaces, CUDA's own memory, captured graphs
HEADROOM = 0.92  # the share of the free memory that is used


def sublayer_parameters(config: ModelConfig, kind: str) -> int:
    """The parameters of a whole sublayer's matrices: attention, mlp, or attention+mlp."""
    if config.has_usual_slots:
        shapes = product_shapes(config)
        return sum(math.prod(shapes[part]) for each in kind.split("+") for part in PRODUCTS[each])
    import torch  # late: it takes a second, and the usual slots do not need it

    from ladder.models.sublayers import FEED_FORWARDS, MIXERS

    slots = {"attention": MIXERS[config.mixer], "mlp": FEED_FORWARDS[config.feed_forward]}
    with torch.device("meta"):
        made = [slots[part](config, 0) for part in kind.split("+")]
    return sum(each.numel() for part in made for each in part.parameters() if each.dim() == 2)


def layer_parameters(config: ModelConfig) -> int:
    """The parameters of a whole layer's matrices."""
    return sublayer_parameters(config, "attention+mlp")


def product_shapes(config: ModelConfig, tp: int = 1) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each product of a layer, and of the head, on one of `tp` ranks.

    Each rank has at least one KV head, even if other ranks have the same one.
    """
    hidden, inner = config.hidden_size, config.intermediate_size // tp
    queries = config.num_heads // tp
    heads = queries + 2 * max(1, config.num_kv_heads // tp)
    return {
        "qkv": (heads * config.head_dim, hidden),
        "output": (hidden, queries * config.head_dim),
        "gate-up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (-(-config.vocab_size // tp), hidden),
    }


def process_parameters(config: ModelConfig, tp: int) -> int:
    """All parameters of the first of `tp` processes, with norms and biases; tied ones count once.
    For the plan `standard` and the usual slots."""
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size // tp
    queries = config.num_heads // tp
    kept = config.num_kv_heads // (1 if config.num_kv_heads % tp else tp)  # all, or its own
    packed = (queries + 2 * kept) * dim
    matrices = hidden * (packed + queries * dim + 3 * inner)
    biases = packed * (config.attention_bias or config.qkv_bias) + hidden * config.attention_bias
    biases += (2 * inner + hidden) * config.mlp_bias
    norms = 2 * hidden + 2 * dim * config.qk_norm
    vocabulary = -(-config.vocab_size // tp) * hidden * (1 if config.tie_embeddings else 2)
    return config.num_layers * (matrices + biases + norms) + hidden + vocabulary


def vocabulary_parameters(config: ModelConfig) -> int:
    """The parameters of the whole embedding; the head, tied or not, has as many."""
    return config.vocab_size * config.hidden_size


def training_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Model FLOPs of training on one token, forward and backward, of the whole model.

    6 x parameters without the input embedding, and 6 x layers x sequence x attention width for
    causal attention, counted once (half of the square). Recomputation under activation
    checkpointing does not count. With masked documents less is computed, but the whole window is
    counted.
    """
    parameters = config.num_layers * layer_parameters(config) + vocabulary_parameters(config)
    width = config.num_heads * config.head_dim
    return 6.0 * parameters + 6.0 * config.num_layers * seq_len * width


def prefill_flops(config: ModelConfig, tp: int, batch: int, prompt: int) -> float:
    """FLOPs of prefill: matrix products, causal attention, and the logits of each last token.

    In the last layer only keys and values are needed for all tokens; the rest is computed for the
    last token only.
    """
    tokens, whole = batch * prompt, config.num_layers - 1
    layer, width = layer_parameters(config), config.num_heads * config.head_dim
    kept = 2 * config.hidden_size * config.num_kv_heads * config.head_dim
    products = 2 * ((whole * layer + kept) * tokens + (layer - kept) * batch)
    # two products of [P, head_dim] x [head_dim, P]: their lower half; in the last layer one row
    attention = whole * 2 * width * tokens * prompt + 4 * width * batch * prompt
    head = 2 * vocabulary_parameters(config) * batch
    return (products + attention + head) / tp


def layer_weight_bytes(config: ModelConfig, tp: int, weights: str = "bf16") -> float:
    """Bytes of all layers' weights, without embedding and head."""
    elements = layer_parameters(config) / tp
    return config.num_layers * stored_bytes(elements, _layer_rows(config, tp), weights)


def stored_bytes(elements: float, rows: float, weights: str) -> float:
    """Bytes of matrices with `elements` elements in `rows` rows, with their scales. The share of a
    block at the end of a row counts, not a whole block."""
    if weights == "bf16":
        return BF16 * elements
    scales = elements / BLOCK if weights == "fp8-block" else rows
    return elements + scales * SCALE_BYTES[weights]


def _layer_rows(config: ModelConfig, tp: int) -> float:
    """The output rows of a layer's matrices on one process; all rows of those split by inputs."""
    heads = config.num_heads + 2 * config.num_kv_heads
    return (heads * config.head_dim + 2 * config.intermediate_size) / tp + 2 * config.hidden_size


def head_bytes(config: ModelConfig, tp: int, weights: str = "bf16") -> float:
    """Bytes of the head."""
    return stored_bytes(vocabulary_parameters(config), config.vocab_size, weights) / tp


def cache_bytes(config: ModelConfig, tp: int, tokens: float, cache: str = "bf16") -> float:
    """Bytes of the keys and values of `tokens` tokens, in all layers.

    cache: bf16, or fp8 with a scale's exponent for each head and token.

    If T exceeds the number of KV heads, each rank, including virtual ones, has a head of its own.
    """
    held = max(1, (config.tp_degree or tp) // tp)  # virtual ranks
    heads = held * max(1.0, config.num_kv_heads / (tp * held))
    return config.num_layers * heads * head_bytes_of_token(config, cache) * tokens


def head_bytes_of_token(config: ModelConfig, cache: str) -> int:
    """Bytes of a token's key and value in one head. cache: see `cache_bytes`."""
    return 2 * (BF16 * config.head_dim if cache == "bf16" else config.head_dim + 1)


def decode_bytes(
    config: ModelConfig, tp: int, batch: int, context: float, weights: str = "bf16",
    cache: str = "bf16",
) -> float:  # fmt: skip
    """Bytes to read for one decode step of `batch` sequences of `context` tokens each."""
    matrices = layer_weight_bytes(config, tp, weights) + head_bytes(config, tp, weights)
    return matrices + cache_bytes(config, tp, batch * context, cache)


def reduce_bytes(config: ModelConfig, tokens: int, itemsize: int = BF16) -> int:
    """Bytes of a sublayer's output, which an all-reduce sums."""
    return tokens * config.hidden_size * itemsize


def inference_bytes(config: ModelConfig, tp: int, batch: int, prompt: int, length: int) -> float:
    """A conservative estimate of the memory of inference. length: tokens per sequence in the cache.

    It counts the weights, the largest matrix unsharded (it is made whole and then sliced), the
    cache, the activations of a prefill, and logits.
    """
    held = max(1, (config.tp_degree or tp) // tp)  # virtual ranks
    copies = 1 if config.tie_embeddings else 2
    vocabulary = vocabulary_parameters(config)
    largest = max(vocabulary, config.hidden_size * config.intermediate_size)
    inner = (4 * config.intermediate_size + 6 * config.num_heads * config.head_dim) / tp
    activations = batch * prompt * (8 * config.hidden_size * held + inner)
    logits = 6 * batch * config.vocab_size
    rest = BF16 * (copies * vocabulary / tp + largest + activations + logits)
    return layer_weight_bytes(config, tp) + cache_bytes(config, tp, batch * length) + rest
