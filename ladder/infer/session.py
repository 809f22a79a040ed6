"""The state of one batch on the device, its prefill and its decode step, in CUDA graphs on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ladder.comm.capture import Mode
from ladder.costs import GRAPHED_PROMPT_TOKENS
from ladder.infer.cache import Cache
from ladder.infer.devices import (
    device_of,
    on_its_device,
)
from ladder.infer.graphs import capture_graph
from ladder.infer.prompts import padded_width
from ladder.infer.sampling import Sampling, choose_greedily, choose_parallel
from ladder.kernels.carveout import DRIVERS, carveout, least
from ladder.kernels.choice import GreedyChoice
from ladder.models.errors import UserError
from ladder.models.layers import vocabulary_start
from ladder.models.transformer import Transformer
from ladder.parallel.chains import overlaps
from ladder.parallel.reducers import PushReducer

PROMPT_GRAPHS = 8  # kept by a session, one per padded width; each holds the memory of a prefill

# All but cuDNN's attention, whose result for one masked query varies by run (torch 2.11, H200).
REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Session:
    """The state of one batch on the device, and the decode step that advances it.

    tokens, positions: [B] int64, the newest token of each sequence and its position. uniforms:
    [steps, B] float32, the random numbers of each step. Until the next step, `out` holds the tokens
    that the last step chose (-1: the logits were not finite) and `logits` [B, V_local] this
    process's shard of the logits.
    """

    def __init__(
        self,
        model: Transformer,
        batch: int,
        capacity: int,
        sampling: Sampling,
        fused: bool,
        graphs: bool,
        cache: str = "auto",
    ) -> None:
        self.fused, self.graphs = fused, graphs
        # by width: the graph, its input (the tokens) and its output (the logits)
        self.prompt_graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.device = device = device_of(model)
        self.model, self.sampling, self.capacity = model, sampling, capacity
        self.cache = Cache(model, batch, capacity, cache)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.out = torch.zeros_like(self.tokens)
        self.uniforms = torch.zeros((capacity, batch), device=device)
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.greedy: GreedyChoice | None = None
        ranks, reducer = model.reducer.ranks, model.reducer
        if fused and device.type == "cuda" and sampling.temperature == 0:
            shape = batch, ranks.process, ranks.processes
            if isinstance(reducer, PushReducer):
                self.greedy = GreedyChoice(*shape, reducer.group, device)
            elif ranks.processes == 1:
                self.greedy = GreedyChoice(*shape, None, device)
        self.logits = self.graph_logits = torch.empty(0, device=device)
        self.left = 0  # decode steps until every sequence has filled its row of the cache

    @on_its_device
    def prefill(self, prompts: Sequence[Sequence[int]], uniforms: Tensor) -> None:
        """Run the prompts and choose the first new token of each; UserError if one is too long."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        if lengths.max() > self.capacity:
            raise UserError(
                f"a prompt of {int(lengths.max())} tokens does not fit this session's cache of "
                f"{self.capacity} positions; ask for a longer one"
            )
        self.left = self.capacity - int(lengths.min())
        width = self.prompt_width(int(lengths.max()))
        padded = torch.zeros((len(prompts), width), dtype=torch.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = torch.as_tensor(prompt)
        if not self.fused:  # plain attention multiplies masked values by 0, and 0 * NaN is NaN
            self.cache.clear()
        self.uniforms[: len(uniforms)].copy_(uniforms)
        self.counter.zero_()
        self.positions.copy_(lengths)
        if self.prompt_mode(width) == "eager":
            self._prefill(padded.to(self.tokens.device))
            return
        if width not in self.prompt_graphs:
            inputs = torch.zeros_like(padded, device=self.tokens.device)
            graph, _ = capture_graph(lambda: self._prefill(inputs))
            self.prompt_graphs[width] = graph, inputs, self.logits
            self.counter.zero_()  # the warm-up runs advanced it
            self.positions.copy_(lengths)
        graph, inputs, self.logits = self.prompt_graphs[width]
        inputs.copy_(padded)
        graph.replay()

    def prompt_width(self, longest: int) -> int:
        """The width that prompts are padded to, so that few graphs serve all lengths."""
        if not self.graphs:
            return longest
        return min(padded_width(longest), self.capacity)

    def prompt_mode(self, width: int) -> Mode:
        """Whether prompts of this width run in a CUDA graph, in this session as it is now."""
        kept = width in self.prompt_graphs or len(self.prompt_graphs) < PROMPT_GRAPHS
        small = len(self.tokens) * width <= GRAPHED_PROMPT_TOKENS
        return "captured" if self.graphs and small and kept else "eager"

    def _prefill(self, padded: Tensor) -> None:
        positions = torch.arange(padded.shape[1], device=padded.device).expand(len(padded), -1)
        self.cache.at(positions, padded.shape[1])
        # One position is the last one anyway; fused modules treat such inputs as a decode step.
        last = self.positions - 1 if padded.shape[1] > 1 else None
        self._choose(padded, None, positions=positions, cache=self.cache, last=last)

    @on_its_device
    def step(self) -> None:
        """Decode one token of every sequence; the tokens of finished sequences are not used.

        Raises UserError when every sequence has filled its row of the cache.
        """
        if self.left == 0:
            raise UserError(
                f"the cache of {self.capacity} positions is full; ask for a longer session"
            )
        self.left -= 1
        if self.graph is not None:
            self.graph.replay()
            self.logits = self.graph_logits
        else:
            self._step()

    def _step(self) -> None:
        positions = self.positions.unsqueeze(1)
        extent = int(positions.max()) + 1 if positions.device.type == "cpu" else self.capacity
        self.cache.at(positions, extent)
        mask = None if self.fused else self.cache.mask()
        inputs = {"positions": positions, "cache": self.cache, "mask": mask}
        with sdpa_kernel(REPEATABLE):
            self._choose(self.tokens.unsqueeze(1), self.positions, **inputs)

    def _choose(self, tokens: Tensor, advance: Tensor | None, **inputs: Any) -> None:
        """Run the model, choose the next token of each sequence, and add 1 to `advance`."""
        reducer, vocab_size = self.model.reducer, self.model.config.vocab_size
        logits = self.model(tokens, gather=False, **inputs)[:, -1]
        first = vocabulary_start(vocab_size, reducer.ranks)
        self.logits = logits
        if self.greedy is not None:
            self.greedy(logits, first, self.out, self.tokens, advance, self.capacity - 1)
            return
        if self.sampling.temperature == 0:
            chosen = choose_greedily(logits, first, reducer)
        else:
            uniforms = self.uniforms.index_select(0, self.counter.unsqueeze(0))[0]
            self.counter.add_(1).clamp_(max=self.capacity - 1)
            chosen = choose_parallel(logits, first, uniforms, self.sampling, reducer, vocab_size)
        self.out.copy_(chosen)
        self.tokens.copy_(chosen.clamp(min=0))
        if advance is not None:
            advance.add_(1).clamp_(max=self.capacity - 1)

    @on_its_device
    def capture(self) -> None:
        """Record `step` in a CUDA graph; `prefill` overwrites the state that warm-up changes."""
        reducer = self.model.reducer
        # With NCCL the driver decides, since no other setting was measured: NCCL's kernels run
        # beside a step's, and an SM would have to be idle before it had the memory that they need.
        no_nccl = isinstance(reducer, PushReducer) or reducer.ranks.processes == 1
        wanted = DRIVERS
        if self.fused and no_nccl:
            rows = len(self.tokens)
            one = reducer.ranks.held == 1  # virtual ranks have one stream
            beside = one and any(overlaps(self.model.config.plan, rows))
            wanted = least(rows, beside, self.model.lm_head.scales is not None)
        with carveout(wanted):
            self.graph, _ = capture_graph(self._step)
        self.graph_logits = self.logits
