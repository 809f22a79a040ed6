"""What a model's layers cost: parameters, FLOPs, bytes read, kept and communicated.

Matrices alone are counted: norms and biases are a thousandth. `tp` is the number of processes that
share the model; what a function counts is one process's part, unless it says otherwise. Bytes are
those of bfloat16.
"""

from __future__ import annotations

from ladder.models.config import ModelConfig

BF16 = 2  # bytes


def sublayer_parameters(config: ModelConfig, kind: str) -> int:
    """Of the matrices of a whole sublayer: attention, mlp, or attention+mlp."""
    width = config.num_heads * config.head_dim
    matrices = {
        "attention": config.hidden_size * 2 * (width + config.num_kv_heads * config.head_dim),
        "mlp": 3 * config.hidden_size * config.intermediate_size,
    }
    return sum(matrices[part] for part in kind.split("+"))


def layer_parameters(config: ModelConfig) -> int:
    """Of the matrices of a whole layer."""
    return sublayer_parameters(config, "attention+mlp")


def vocabulary_parameters(config: ModelConfig) -> int:
    """Of the whole embedding; the head, tied or not, has as many."""
    return config.vocab_size * config.hidden_size


def training_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of training on one token, forward and backward, of the whole model's own work.

    6 x parameters without the input embedding, and 6 x layers x sequence x attention width for
    causal attention, counted once (half of the square). What is computed again under activation
    checkpointing does not count. Where documents are masked apart, less is computed: this counts
    the whole window all the same.
    """
    parameters = config.num_layers * layer_parameters(config) + vocabulary_parameters(config)
    width = config.num_heads * config.head_dim
    return 6.0 * parameters + 6.0 * config.num_layers * seq_len * width


def prefill_flops(config: ModelConfig, tp: int, batch: int, prompt: int) -> float:
    """FLOPs to read prompts: matrix products, causal attention, the logits of each last token.

    Of the last layer the cache wants all keys and values; the rest is wanted for the last token
    alone.
    """
    tokens, whole = batch * prompt, config.num_layers - 1
    layer, width = layer_parameters(config), config.num_heads * config.head_dim
    kept = 2 * config.hidden_size * config.num_kv_heads * config.head_dim
    products = 2 * ((whole * layer + kept) * tokens + (layer - kept) * batch)
    # two products of [P, head_dim] x [head_dim, P], the lower half of them; of one token its row
    attention = whole * 2 * width * tokens * prompt + 4 * width * batch * prompt
    head = 2 * vocabulary_parameters(config) * batch
    return (products + attention + head) / tp


def layer_weight_bytes(config: ModelConfig, tp: int) -> float:
    """Bytes of all layers' weights, without embedding and head."""
    return BF16 * config.num_layers * layer_parameters(config) / tp


def cache_bytes(config: ModelConfig, tp: int, tokens: float) -> float:
    """Bytes of the keys and values of so many tokens, in all layers.

    Where T exceeds the KV heads, each rank, virtual ones too, has one of its own.
    """
    held = max(1, (config.tp_degree or tp) // tp)  # virtual ranks
    heads = held * max(1.0, config.num_kv_heads / (tp * held))
    return BF16 * config.num_layers * 2 * heads * config.head_dim * tokens


def decode_bytes(config: ModelConfig, tp: int, batch: int, context: float) -> float:
    """Bytes to read for one decode step of `batch` sequences of `context` tokens each."""
    head = BF16 * vocabulary_parameters(config) / tp
    return layer_weight_bytes(config, tp) + head + cache_bytes(config, tp, batch * context)


def reduce_bytes(config: ModelConfig, tokens: int, itemsize: int = BF16) -> int:
    """Bytes of a sublayer's output, which an all-reduce sums."""
    return tokens * config.hidden_size * itemsize


def inference_bytes(config: ModelConfig, tp: int, batch: int, prompt: int, length: int) -> float:
    """Memory of inference, estimated on the safe side; length: of the cache, tokens a sequence.

    Weights, the largest matrix whole (it is made whole and cut), the cache, the activations of a
    prefill, and logits.
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
