"""The inference engine: prefill of a padded batch, then decoding, one token per sequence and step.

On a GPU one decode step (the model, its reduces, the choice of the token) is one CUDA graph, whose
output token is its next input: the host only reads the tokens, one step behind. On a CPU the same
steps run in eager mode. Both run the same `Transformer`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from ladder.costs import HEADROOM
from ladder.infer.cache import check_cache_kind
from ladder.infer.devices import (
    device_of,
    least_free,
    on_its_device,
    pass_bytes,
    release,
    session_bytes,
    to_host,
)
from ladder.infer.fused import InferenceTransformer, can_fuse, fuse, fuse_refusal
from ladder.infer.load import load_for_inference, refuse_device
from ladder.infer.memory import capacity
from ladder.infer.prompts import token_ids
from ladder.infer.sampling import Sampling, draws
from ladder.infer.session import Session
from ladder.infer.settings import check_count, check_ids
from ladder.jit import on_device
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer

SESSIONS = 8  # kept by an engine, each with its own cache

# The fused model by its original: a second engine of the same original shares the fused model.
FUSED: WeakKeyDictionary[Transformer, Transformer] = WeakKeyDictionary()


@dataclass
class Completion:
    """A prompt's continuation. reason: `stop`, `length`, or `context` (the context is full)."""

    tokens: list[int] = field(default_factory=list)
    reason: str = ""


class NotFiniteError(RuntimeError):
    """A model's logits hold NaN, or infinities."""


@contextlib.contextmanager
def refuse_not_finite(folder: Path) -> Iterator[None]:
    """Turn NotFiniteError, of the model in `folder`, into the UserError of a command."""
    try:
        yield
    except NotFiniteError as error:
        raise UserError(
            f"{folder}: {error}; its weights hold NaN or infinities, or overflow: try --dtype "
            f"float32, or use another model"
        ) from error


class Engine:
    """Generates with a model on its device and ranks; every rank makes the same calls.

    model: a loaded model, or a folder, which `load_for_inference` loads. tp, reducer, device,
    weights, activations: for a folder only, see `load_for_inference`. graphs: run decode steps as
    CUDA graphs; None: on GPUs. fused: pack the model's weights and decode with fused kernels
    (`ladder.infer.fused`, which empties the original model); None: on GPUs, if the kernels support
    the model. cache: the type of keys and values, `auto` (the model's) or `fp8` (see
    ladder.infer.cache). The engine keeps the last used SESSIONS sessions, or fewer if memory is
    short. A session has a cache and graphs for a batch size, a cache length and sampling options.
    """

    def __init__(
        self,
        model: Transformer | str | Path,
        graphs: bool | None = None,
        fused: bool | None = None,
        *,
        cache: str = "auto",
        tp: int = 0,
        reducer: str = "auto",
        device: str = "auto",
        weights: str = "auto",
        activations: str = "auto",
    ) -> None:
        check_cache_kind(cache)
        self.cache = cache
        if not isinstance(model, str | Path):
            if not isinstance(model, Transformer):
                raise UserError(
                    f"model is of type {type(model).__name__}; give a Transformer (of a "
                    f"LadderForCausalLM, its `transformer`), or a model's folder"
                )
            loaded = model
            if (tp, reducer, device, weights, activations) != (0, *["auto"] * 4):
                raise UserError(
                    "tp, reducer, device, weights and activations are for a folder; this model is "
                    "loaded already"
                )
        else:
            loaded = load_for_inference(
                model,
                tp=tp,
                reducer=reducer,
                device=device,
                weights=weights,
                activations=activations,
            )
        loaded = FUSED.get(loaded, loaded)
        self.device = device_of(loaded)
        on_gpu = self.device.type == "cuda"
        if graphs and not on_gpu:
            raise UserError("graphs=True needs a model on a GPU; leave it out on a CPU")
        if fused and (reason := fuse_refusal(loaded)):
            raise UserError(f"fused=True cannot run {reason}; leave it out")
        if fused is False and isinstance(loaded, InferenceTransformer):
            raise UserError("fused=False needs a model that no engine has fused; load it again")
        if fused is None:
            fused = isinstance(loaded, InferenceTransformer) or (on_gpu and can_fuse(loaded))
        self.fused = fused
        if cache == "fp8":
            refuse_device("fp8", self.device, "keys and values", "--cache auto")
        if fused and not isinstance(loaded, InferenceTransformer):
            with on_device(self.device):
                FUSED[loaded] = fused_model = fuse(loaded)
            loaded = fused_model
        self.model = loaded
        self.graphs = on_gpu if graphs is None else graphs
        self.sessions: dict[tuple[int, int, Sampling], Session] = {}

    @torch.inference_mode()
    @on_its_device
    def session(self, batch: int, length: int, sampling: Sampling) -> Session:
        """A session for `batch` sequences of up to `length` tokens, with its graph if enabled."""
        context = self.model.config.max_seq_len
        if length > context:
            raise UserError(
                f"a session of {length} tokens is longer than the model's max_seq_len={context}"
            )
        if isinstance(self.model, InferenceTransformer):
            self.model.refuse_batch(batch)
        size = capacity(self.model.config, length) if self.graphs else length
        key = (batch, size, replace(sampling, seed=0))
        session = self.sessions.pop(key, None)
        if session is None:
            if len(self.sessions) >= SESSIONS:
                release(self.device)  # so that its graphs have finished
                del self.sessions[next(iter(self.sessions))]
            if self.sessions:
                self._make_room(session_bytes(self.model, batch, size, self.cache))
            session = Session(
                self.model, batch, size, sampling, self.fused, self.graphs, self.cache
            )
            if self.graphs:
                session.capture()
        if self.graphs:
            self.sessions[key] = session  # the newest is the last
        return session

    def _held(self, key: tuple[int, int, Sampling]) -> float:
        """The most bytes that a session is estimated to hold, including its prompt graphs."""
        batch, capacity, _ = key
        widths = self.sessions[key].prompt_graphs
        found = session_bytes(self.model, batch, capacity, self.cache)
        return found + sum(pass_bytes(self.model, batch, width) for width in widths)

    def _make_room(self, need: float, using: Session | None = None) -> None:
        """Drop the least recently used sessions until every rank has `need` bytes free; drop none
        if all of them would not be enough. All ranks drop the same. `using` is kept."""
        old = [key for key, each in self.sessions.items() if each is not using]
        if not old or need <= HEADROOM * least_free(self.device, self.model.reducer):
            return
        release(self.device)  # freed memory that torch keeps may be enough
        free = least_free(self.device, self.model.reducer)
        if need > HEADROOM * (free + sum(map(self._held, old))):
            return
        while old and need > HEADROOM * free:
            del self.sessions[old.pop(0)]
            release(self.device)
            free = least_free(self.device, self.model.reducer)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 64,
        sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
        stop: Collection[int] = (),
        on_token: Callable[[int, int], None] | None = None,
        ended: Callable[[int, list[int]], bool] | None = None,
    ) -> list[Completion]:
        """Continue each prompt (token ids, as a list or a tensor; lengths may differ); every rank
        returns the same.

        stop: ids that end a sequence and are not part of it. on_token: called with (prompt index,
        token) for each new token. ended: called with (prompt index, its tokens so far); returns
        whether the sequence is finished, the same on every rank. Raises UserError for an empty
        prompt and for a prompt that fills the model's context, NotFiniteError if the model's logits
        are not finite.
        """
        check_count("max_new_tokens", max_new_tokens, 1)
        max_new_tokens = operator.index(max_new_tokens)
        check_ids("stop", stop)
        if not isinstance(sampling, Sampling):
            raise UserError(
                f"sampling={sampling!r} must be a Sampling, as Sampling(temperature=0.8); leave it "
                f"out for greedy decoding"
            )
        try:
            prompts = list(prompts)
        except TypeError as error:
            raise UserError(
                f"prompts={prompts!r} must be a list of prompts, each a list of token ids"
            ) from error
        context, vocabulary = self.model.config.max_seq_len, self.model.config.vocab_size
        prompts = [token_ids(i, prompt, context, vocabulary) for i, prompt in enumerate(prompts)]
        if not prompts:
            return []
        rooms = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
        longest = max(len(prompt) + room for prompt, room in zip(prompts, rooms, strict=True))
        session = self.session(len(prompts), longest, sampling)
        width = session.prompt_width(max(map(len, prompts)))
        if self.sessions and width not in session.prompt_graphs:
            self._make_room(pass_bytes(self.model, len(prompts), width), session)
        results = [Completion() for _ in prompts]

        session.prefill(prompts, draws(sampling, len(prompts), max(rooms)))
        arrived = to_host(session.out)
        for done in range(1, max(rooms) + 1):
            following: Callable[[], list[int]] | None = None
            if self.graphs and done < max(rooms):  # start the next step before reading the last
                session.step()
                following = to_host(session.out)
            for i, token in enumerate(arrived()):
                if token < 0:
                    raise NotFiniteError(f"the model's logits of prompt {i} are not finite")
                if results[i].reason:
                    continue
                if token in stop:
                    results[i].reason = "stop"
                    continue
                results[i].tokens.append(token)
                if on_token is not None:
                    on_token(i, token)
                if len(results[i].tokens) == rooms[i]:
                    results[i].reason = "length" if rooms[i] == max_new_tokens else "context"
                elif ended is not None and ended(i, results[i].tokens):
                    results[i].reason = "stop"
            if all(result.reason for result in results):
                break
            if following is None:
                session.step()
                following = to_host(session.out)
            arrived = following
        return results


def generate(
    model: Transformer, prompts: Sequence[Sequence[int]], cache: str = "auto", **options: object
) -> list[Completion]:
    """`Engine(model, cache=cache).generate(prompts, ...)`, for a single call."""
    return Engine(model, cache=cache).generate(prompts, **options)
