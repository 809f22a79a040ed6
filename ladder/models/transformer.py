"""The one model definition: it runs every residual plan, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ladder.models.config import ModelConfig
from ladder.models.documents import Packed, within_documents
from ladder.models.errors import UserError
from ladder.models.layers import (
    ColumnParallelLinear,
    Embedding,
    KeyValueCache,
    Layer,
    RMSNorm,
    rotary_tables,
    vocabulary_start,
)
from ladder.models.loss import Passes, token_losses
from ladder.models.parameters import collect_specs
from ladder.models.reducer import Pending, Ranks, Reducer, places


class Transformer(nn.Module):
    """A Llama-style decoder wired by `config.plan`.

    Its parameters are described by `specs`, and their whole shapes by `shapes`, both by full name.

    Built with all T ranks in this process (T = tp_degree: virtual ranks where it is above 1); a
    Reducer handed to `use` spreads them. Parameter names are Hugging Face Llama's.

    compute_dtype: what activations and matrices are computed in; None: as the parameters are.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.rotary = rotary_tables  # one that looks them up may be handed over
        self.passes = Passes()  # of the loss
        # This process's part of each parameter's rows, and of how many: see ladder.parallel.data.
        self.data_shard = 0, 1
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
        self.model.embed_tokens = Embedding(config.vocab_size, size)
        self.model.layers = nn.ModuleList(
            Layer(config, layer, named[layer]) for layer in range(config.num_layers)
        )
        self.model.norm = norms[-1]
        self.lm_head = ColumnParallelLinear(size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.use(Reducer(Ranks(config.tp_degree or 1, 0, config.tp_degree or 1)))
        # Of the whole parameters: a process may hold a part of each.
        self.shapes = {name: each.shape for name, each in self.named_parameters()}
        self.specs = collect_specs(self)

    def cut_parameters(self) -> list[str]:
        """The names of the parameters that are shards here: plain tensors, not DTensors."""
        return [n for n, each in self.named_parameters() if each.shape != self.shapes[n]]

    @property
    def adapted(self) -> bool:
        """Whether a layer holds parameters that it was not built with: those of an adapter."""
        held = self.model.layers.named_parameters(prefix="model.layers")
        return any(name not in self.specs for name, _ in held)

    def use(self, reducer: Reducer) -> None:
        """Compute `reducer.ranks`, and communicate by `reducer`.

        Raises UserError where the plan depends on T and the ranks are not that many, or where T
        does not divide the model.
        """
        self.check_degree(reducer.ranks.degree)
        if (
            reducer.ranks.processes > 1
            and (reducer.ranks.processes - 1)
            * math.ceil(self.config.vocab_size / reducer.ranks.processes)
            >= self.config.vocab_size
        ):
            raise UserError(
                f"tp={reducer.ranks.processes} leaves a rank without a row of "
                f"vocab_size={self.config.vocab_size}; use a smaller tp"
            )
        self.reducer = reducer
        for module in self.modules():
            if hasattr(module, "ranks"):
                module.ranks = reducer.ranks
        self.lm_head.ranks = Ranks(reducer.ranks.processes, reducer.ranks.process, 1)

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
    ) -> Tensor:
        """Logits [B, S, vocab_size], or with `targets` the loss of each token.

        tokens: [B, S] int64. targets: [B, S] int64, negative where no loss is wanted; then the
            result is the cross-entropy in nats, [B, S] float32, 0 at those places.
        positions: [B or 1, S] int64; 0 .. S - 1 by default.
        documents: int32 [N + 1], from `document_starts`: tokens attend within their own document
            alone. Not together with a cache. Positions go on over all of them.
        cache, mask: for generation; mask is [B, 1, S, keys], true where attended. Without a mask
            the tokens are prompts from position 0 on, which see themselves and not the cache.
        last: [B] int64, the one place of each sequence whose logits are wanted: [B, 1, vocab_size].
            After the last attention nothing else is computed.
        gather: False returns this process's part of the vocabulary alone, [B, S, V_local].

        Raises UserError for a token or target that is no number of the vocabulary, on a CPU. A GPU
        is not waited for: there the result is NaN, or a lookup fails on the device.
        Every rank returns the same values. Calling `backward` on the same function of them on
        every rank gives that function's gradients, counted once.
        """
        if targets is not None:
            self._check_ids("targets", targets, torch.iinfo(targets.dtype).min)
        normed, reducer = self.hidden(
            tokens, positions=positions, documents=documents, cache=cache, mask=mask, last=last
        )
        logits = self.lm_head(normed)
        if targets is not None:
            first = vocabulary_start(self.config.vocab_size, reducer.ranks)
            return token_losses(logits, targets, first, reducer, self.passes)
        return reducer.gather(logits, self.config.vocab_size) if gather else logits

    def hidden(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
        last: Tensor | None = None,
    ) -> tuple[Tensor, Reducer]:
        """What the head reads, [B, S, D] (with `last` [B, 1, D]), and what gathers its logits.

        The arguments are `forward`'s.
        """
        assert tokens.dim() == 2, tokens.shape
        assert mask is None or cache is not None, "a mask is for what a cache holds"
        assert documents is None or cache is None, "a cache holds one document of each sequence"
        assert documents is None or documents.dim() == 1, "documents are where each one begins"
        if tokens.shape[1] > self.config.max_seq_len:
            raise UserError(
                f"a sequence of {tokens.shape[1]} tokens is longer than the model's "
                f"max_seq_len={self.config.max_seq_len}; shorten it"
            )
        self._check_ids("tokens", tokens, 0)
        reducer, plan = self.reducer.pick(tokens.shape), self.config.plan
        ranks = reducer.ranks
        embedded = reducer.start_stream(self.model.embed_tokens(tokens))
        stream = embedded if self.compute_dtype is None else embedded.to(self.compute_dtype)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        tables = self.rotary(self.config, positions, stream.dtype)
        if ranks.held > 1:
            stream = stream.expand(ranks.held, *stream.shape)
            if tables.shape[1] > 1:
                tables = tables.repeat(1, ranks.held, 1, 1, 1)
            mask = None if mask is None else mask.repeat(ranks.held, 1, 1, 1)
        seen: Tensor | Packed | None = mask
        if documents is not None:
            seen = within_documents(
                documents, tokens.shape, ranks.held, stream.dtype, self.config.head_dim
            )

        pending: dict[int, Pending] = {}

        def begin(read: int, norm: Callable) -> Any:
            arrivals = [(each, pending[each.output]) for each in plan.landings[read]]
            for output in plan.done[read]:  # so that its memory is free once it has landed
                del pending[output]
            return reducer.begin_landing(stream, arrivals, norm)

        norms: list[Callable] = [self._norm(n) for n in range(len(plan.sublayers))]
        # Held streams that are equal at the end are normed once, below.
        once = ranks.held > 1 and plan.equal_reads[-1]
        norms.append((lambda x: x) if once else self.model.norm)
        begun = begin(0, norms[0])
        for n, record in enumerate(plan.sublayers):
            stream, normed = reducer.finish_landing(begun)
            begun = None
            narrows = last is not None and n == plan.last_attention
            early = plan.early[n + 1] and not narrows
            if early:  # beneath this sublayer
                begun = begin(n + 1, norms[n + 1])
            partial = self._partial(n, normed, tables, seen, cache, last if narrows else None)
            if narrows:
                assert last is not None
                stream, pending, reducer = reducer.narrow(stream, pending, last)
            pending[n] = reducer.output(
                partial, stream, record, plan.own_needed[n], plan.blocking[n]
            )
            del partial
            if not early:
                begun = begin(n + 1, norms[n + 1])

        normed = reducer.finish_landing(begun)[1]
        del begun
        if plan.final_mean:  # the streams still differ: normed on each rank, then the mean
            normed = reducer.sum(reducer.sum_held(normed)) / ranks.degree
        elif ranks.held > 1:  # one copy will do
            normed = self.model.norm(normed[0]) if plan.equal_reads[-1] else normed[0]
        return normed, reducer

    def _check_ids(self, name: str, ids: Tensor, least: int) -> None:
        """Raise UserError for one beyond the vocabulary; on a CPU, where looking costs nothing.

        Not while a compiler traces, which has no numbers to look at.
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

    def _partial(
        self, n: int, normed: Any, tables: Tensor, seen: Any, cache: KeyValueCache | None,
        last: Tensor | None,
    ) -> Any:  # fmt: skip
        """What sublayer n makes of what it reads, on this process's ranks.

        last: as in `forward`, where nothing but those places is wanted of an attention.
        """
        layer = self.model.layers[self.config.plan.layers[n]]
        kind = self.config.plan.sublayers[n].kind
        if kind == "mlp":
            return layer.mlp(normed)
        attended = layer.self_attn(normed, tables, seen, cache)
        if last is not None:
            attended, normed = places(attended, last), places(normed, last)
        return attended if kind == "attention" else attended + layer.mlp(normed)

    def _norm(self, n: int) -> RMSNorm:
        """The norm of sublayer n."""
        plan = self.config.plan
        layer = self.model.layers[plan.layers[n]]
        mlp = plan.sublayers[n].kind == "mlp"
        norm = layer.post_attention_layernorm if mlp else layer.input_layernorm
        assert isinstance(norm, RMSNorm)
        return norm

    @torch.no_grad()
    def initialise(self, parameter: Tensor, name: str, generator: torch.Generator) -> None:
        """Fill a full-sized `parameter` of that name, by the rule of its spec.

        Norms 1, biases 0, matrices normal: with standard deviation 0.02, or
        0.02 / sqrt(2 num_layers) for a matrix that writes to the residual.
        """
        self.specs[name].init.fill(parameter, self.config.num_layers, generator)


def meta_model(config: ModelConfig) -> Transformer:
    """The model without its numbers, on `meta`."""
    with torch.device("meta"):
        return Transformer(config)


def tensor_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """What the model stores, by name."""
    return meta_model(config).shapes
