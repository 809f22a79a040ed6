"""The one model definition: it runs every residual plan, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ladder.models.config import ModelConfig
from ladder.models.documents import Packed, within_documents
from ladder.models.errors import UserError, unknown
from ladder.models.forward_pass import Norm, Pass
from ladder.models.layers import (
    ColumnParallelLinear,
    Embedding,
    ParallelLinear,
    RMSNorm,
    vocabulary_start,
)
from ladder.models.loss import token_losses
from ladder.models.parameters import collect_specs
from ladder.models.plan import Plan
from ladder.models.ranks import Ranks
from ladder.models.reducer import Reducer
from ladder.models.runtime import Runtime
from ladder.models.sublayers import (
    FEED_FORWARDS,
    MIXERS,
    Context,
    KeyValueCache,
    Layer,
    Sublayer,
)


@dataclass(frozen=True)
class Parts:
    """The constructors of a Transformer's modules; by default those that the config names.

    embedding: tokens [B, S] -> this process's part [B, S, D] of a sum over the processes. head: a
    weight for `Operators.column`, [B, S, D] -> [B, S, V_local].
    """

    mixer: Callable[[ModelConfig, int], Sublayer]
    feed_forward: Callable[[ModelConfig, int], Sublayer]
    embedding: Callable[[ModelConfig], nn.Module]
    head: Callable[[ModelConfig], nn.Module]


def default_parts(config: ModelConfig) -> Parts:
    """The parts that the config names. Raises UserError for an unknown mixer or feed-forward."""
    for name, known in (("mixer", MIXERS), ("feed_forward", FEED_FORWARDS)):
        if getattr(config, name) not in known:
            raise unknown(name, getattr(config, name), known)
    return Parts(
        MIXERS[config.mixer],
        FEED_FORWARDS[config.feed_forward],
        lambda config: Embedding(config.vocab_size, config.hidden_size),
        lambda config: ColumnParallelLinear(config.hidden_size, config.vocab_size, bias=False),
    )


class Transformer(nn.Module):
    """A Llama-style decoder wired by `config.plan`.

    `specs` and `shapes` have each parameter's spec and full shape, by full name. Parameter names
    are those of Hugging Face's Llama.

    A new model has all T ranks in this process (T = tp_degree; above 1 they are virtual ranks);
    `use` gives it a Runtime that spreads them over processes.

    Its weights are random, drawn by torch's own generator as in other torch modules; on the device
    `meta` it has none. `ladder.parallel.sharding` draws weights from a seed, the same on any ranks.

    parts: constructors that replace those that the config names. The caller then sets the weights.
    """

    def __init__(self, config: ModelConfig, parts: Parts | None = None) -> None:
        super().__init__()
        self.config = config
        draws = parts is None
        parts = parts or default_parts(config)
        plan, size, eps = config.plan, config.hidden_size, config.norm_eps
        norms = [
            RMSNorm(size, eps, per_rank=0 if equal else config.tp_degree or 1)
            for equal in plan.equal_reads
        ]
        named: list[dict[str, RMSNorm]] = [{} for _ in range(config.num_layers)]
        for record, layer, norm in zip(plan.sublayers, plan.layers, norms, strict=False):
            name = "post_attention_layernorm" if record.kind == "mlp" else "input_layernorm"
            named[layer][name] = norm
        self.model = nn.Module()
        self.model.embed_tokens = parts.embedding(config)
        self.model.layers = nn.ModuleList(
            Layer(parts.mixer(config, layer), parts.feed_forward(config, layer), named[layer])
            for layer in range(config.num_layers)
        )
        self.model.norm = norms[-1]
        self.lm_head = parts.head(config)
        if config.tie_embeddings and isinstance(self.lm_head, ParallelLinear):
            self.lm_head.weight = self.model.embed_tokens.weight
        self.use(Runtime(Reducer(Ranks(config.tp_degree or 1, 0, config.tp_degree or 1))))
        # The shapes of the whole parameters, of which a process may hold a part.
        self.shapes: dict[str, torch.Size] = {}
        self.declare({name: each.shape for name, each in self.named_parameters()})
        if draws:
            for name, parameter in self.named_parameters():
                if not parameter.is_meta:
                    self.initialise(parameter, name)

    def declare(self, shapes: dict[str, torch.Size]) -> None:
        """Record the full shapes of new or replaced parameters, and collect all specs again."""
        self.shapes.update(shapes)
        self.specs = collect_specs(self)

    def untie(self) -> None:
        """Have the config say that the head has a weight of its own, as it now does."""
        self.config = replace(self.config, tie_embeddings=False)
        self.declare({"lm_head.weight": self.lm_head.weight.shape})

    def cut_parameters(self) -> list[str]:
        """The names of the parameters that are shards here: plain tensors, not DTensors."""
        held = self.named_parameters()  # also an adapter's, which are whole
        return [n for n, each in held if each.shape != self.shapes.get(n, each.shape)]

    @property
    def slots(self) -> Iterator[Sublayer]:
        """The sublayers in the slots of all blocks, in order: each block's mixer, feed-forward."""
        return (slot for layer in self.model.layers for slot in layer.slots)

    @property
    def adapted(self) -> bool:
        """Whether a layer or the embedding has parameters of an adapter."""
        names = (n for n, _ in self.model.named_parameters(prefix="model"))
        parts = ("model.layers.", "model.embed_tokens.")
        return any(n.startswith(parts) and n not in self.specs for n in names)

    @property
    def reducer(self) -> Reducer:
        return self.runtime.reducer

    def use(self, runtime: Runtime) -> None:
        """Set the runtime, and with its reducer the ranks that this process computes.

        Raises UserError if the plan depends on another T, or if T does not divide the model.
        """
        ranks = runtime.reducer.ranks
        self.check_degree(ranks.degree)
        rows = math.ceil(self.config.vocab_size / ranks.processes)
        if ranks.processes > 1 and (ranks.processes - 1) * rows >= self.config.vocab_size:
            raise UserError(
                f"tp={ranks.processes} leaves a rank without a row of "
                f"vocab_size={self.config.vocab_size}; use a smaller tp"
            )
        self.runtime = runtime
        for module in self.modules():
            if hasattr(module, "ranks"):
                module.ranks = ranks
        # The head's rows are split over processes and not over virtual ranks.
        self.lm_head.ranks = Ranks(ranks.processes, ranks.process, 1)

    def check_degree(self, degree: int) -> None:
        """Raise UserError unless the model can run on T = `degree` ranks."""
        own = self.config.tp_degree
        if own is not None and degree != own:
            raise UserError(
                f"plan {self.config.plan.name!r} depends on T and this model has tp_degree={own}: "
                f"it cannot run on {degree} ranks; choose tp among the divisors of {own} (the "
                f"rest are virtual ranks)"
            )
        self.config.check_divides(degree, "tp")

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
        last: Tensor | None = None,
        gather: bool = True,
        plan: Plan | None = None,
    ) -> Tensor:
        """Logits [B, S, vocab_size], or with `targets` [B, S] each token's loss, [B, S] float32.

        tokens: [B, S] int64. targets: int64, negative where the loss is 0; losses are in nats.
        positions: [B or 1, S] int64; 0 .. S - 1 by default. documents: int32 [N + 1], from
            `document_starts`: tokens attend within their document; not together with a cache.
        cache, mask: for generation; mask is [B, 1, S, keys], true where attended. Without a mask
            the tokens are prompts from position 0 on, which do not attend to the cache.
        last: [B] int64, the one position of each sequence that is computed: [B, 1, vocab_size].
        gather: False returns this process's part of the vocabulary only, [B, S, V_local].
        plan: in place of the config's, for this pass; with the same sublayers and norms.

        Raises UserError for ids outside the vocabulary, on a CPU; a GPU is not waited for: there
        the result is NaN, or a lookup fails. All ranks return the same values, and `backward` of
        the same function of them on all ranks gives that function's gradients, counted once.
        """
        if targets is not None:
            self._check_ids("targets", targets, torch.iinfo(targets.dtype).min)
        plan = plan or self.config.plan
        # The pass has no name here, so that all of it is gone when the loss takes its memory.
        logits = self._run(tokens, positions, documents, cache, mask, last, plan).logits(
            self.lm_head
        )
        if targets is not None:
            first = vocabulary_start(self.config.vocab_size, self.reducer.ranks)
            return token_losses(logits, targets, first, self.reducer, self.runtime.losses)
        return self.reducer.gather(logits, self.config.vocab_size) if gather else logits

    def hidden(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """The head's input [B, S, D] (with `last` [B, 1, D]), for the arguments of `forward`."""
        plan = self.config.plan
        return self._run(tokens, positions, documents, cache, mask, last, plan).hidden()

    def _run(
        self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None,
        cache: KeyValueCache | None, mask: Tensor | None, last: Tensor | None, plan: Plan,
    ) -> Pass:  # fmt: skip
        """Run all sublayers; returns the pass before its last read, that of the head."""
        self._check_inputs(tokens, documents, cache, mask)
        sublayers, norms = self._wire(plan)
        run = self.runtime.begin(tokens.shape, plan, norms)
        run.start(self.model.embed_tokens(tokens))
        if last is not None:
            run.select_last(last)
        context = self._context(run, tokens, positions, documents, cache, mask, last)
        for n, sublayer in enumerate(sublayers):
            run.write(n, sublayer(run.read(n), context.using(run.operators(n))))
        return run

    def _wire(self, plan: Plan) -> tuple[list[Callable], list[Norm]]:
        """The sublayers of a plan's records, and the norms of its reads."""
        sublayers, norms = [], []
        layers = list(self.model.layers)
        for record, layer in zip(plan.sublayers, plan.layers, strict=True):
            sublayers.append(layers[layer].sublayer(record.kind))
            norms.append(layers[layer].norm(record.kind))
        return sublayers, [*norms, self.model.norm]

    def _context(
        self, run: Pass, tokens: Tensor, positions: Tensor | None, documents: Tensor | None,
        cache: KeyValueCache | None, mask: Tensor | None, last: Tensor | None,
    ) -> Context:  # fmt: skip
        runtime, held = self.runtime, run.ranks.held
        dtype = run.residual.dtype
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        tables = runtime.rotary(self.config, positions, dtype)
        if held > 1 and tables.shape[1] > 1:
            tables = tables.repeat(1, held, 1, 1, 1)
        seen: Tensor | Packed | None = mask
        if documents is not None:
            seen = within_documents(documents, tokens.shape, held, dtype, self.config.head_dim)
        elif mask is not None and held > 1:
            seen = mask.repeat(held, 1, 1, 1)
        return Context(tables, run.operators(0), seen, cache, last, runtime.call)

    def _check_inputs(
        self, tokens: Tensor, documents: Tensor | None, cache: KeyValueCache | None,
        mask: Tensor | None,
    ) -> None:  # fmt: skip
        if tokens.dim() != 2:
            raise UserError(
                f"tokens of the shape {list(tokens.shape)} must be [B, S], sequences and their "
                f"tokens; of one sequence pass tokens[None]"
            )
        assert mask is None or cache is not None, "a mask needs a cache"
        assert documents is None or cache is None, "a cache holds one document of each sequence"
        assert documents is None or documents.dim() == 1, "documents are the starts of each"
        size, what = tokens.shape[1], "sequence"
        if size > self.config.max_seq_len and documents is not None:
            # Only of such rows: a GPU must be waited for.
            size, what = int(documents.diff().max()), "document"
        if size > self.config.max_seq_len:
            raise UserError(
                f"a {what} of {size} tokens is longer than the model's "
                f"max_seq_len={self.config.max_seq_len}; shorten it"
            )
        self._check_ids("tokens", tokens, 0)

    def _check_ids(self, name: str, ids: Tensor, least: int) -> None:
        """Raise UserError for an id outside the vocabulary; on a CPU, where the check is cheap.

        Not while torch.compile traces, when there are no values.
        """
        if ids.device.type != "cpu" or type(ids) is not Tensor or torch.compiler.is_compiling():
            return
        if not ids.numel():
            return
        low, high = ids.aminmax()
        if low < least or high >= self.config.vocab_size:
            raise UserError(
                f"{name} hold {int(low if low < least else high)}, which is outside vocab_size="
                f"{self.config.vocab_size}; are they another tokenizer's?"
            )

    @torch.no_grad()
    def initialise(
        self, parameter: Tensor, name: str, generator: torch.Generator | None = None
    ) -> None:
        """Fill the full-sized `parameter` of this name, as its spec says.

        Norms are 1, biases 0, and matrices normal with a standard deviation of 0.02, or
        0.02 / sqrt(2 num_layers) for a matrix that writes to the residual.
        """
        self.specs[name].init.fill(parameter, self.config.num_layers, generator)


def meta_model(config: ModelConfig) -> Transformer:
    """The model without storage, on the device `meta`."""
    with torch.device("meta"):
        return Transformer(config)


def tensor_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """The full shapes of the model's parameters, by name."""
    return meta_model(config).shapes
