"""LadderLM: our engine as a model of lm-evaluation-harness (the `eval` extra).

Every rank runs the harness and computes the requests of rank 0, which are sent as tokens: otherwise
ranks whose harness drew other examples would run different passes and wait for each other forever.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from ladder.checkpoint import newest, read_config, read_stop_tokens
from ladder.data.template import LeftOut, open_template
from ladder.data.tokenizer import (
    encode,
    end_of_text,
    special_tokens,
)
from ladder.eval.scoring import Request, Score, score
from ladder.infer.engine import Engine
from ladder.infer.load import load_model_tokenizer
from ladder.infer.sampling import Sampling
from ladder.infer.settings import check_count, check_number
from ladder.infer.text import stopper
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.progress import Progress

DEFAULT_NEW_TOKENS = 256  # for a task that sets none, as in the harness's Hugging Face model
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")  # supported keys of generation_kwargs
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # one key
# Further keys are accepted at the values at which they have no effect.
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1}


class LadderLM(TemplateLM):
    """A sharded model and its folder's tokenizer; `batch` sequences per forward pass.

    Tokens, prefixes and truncation follow the harness's Hugging Face model (HFLM), so the figures
    are comparable. chat_template: a Jinja file, or "" for the folder's template, if requests are
    conversations; None: they are plain text. cache: the type of keys and values (Engine), also when
    a text is scored. window: the most tokens per window when a whole text is scored; None: the
    model's context, as in HFLM.
    """

    def __init__(
        self,
        model: Transformer,
        folder: Path,
        batch: int = 8,
        chat_template: str | None = None,
        cache: str = "auto",
        window: int | None = None,
    ) -> None:
        super().__init__()
        folder = newest(folder)
        self.model, self.batch = model, batch
        self.window = min(self.max_length, window or self.max_length)
        self.tokenizer: Tokenizer = load_model_tokenizer(folder)
        self.tokenizer.encode_special_tokens = False  # as in transformers
        self.template = open_template(folder, self.tokenizer, chat_template)
        stops = read_stop_tokens(folder)
        end = _special(folder, self.tokenizer, "eos_token")
        if end is None:
            end = stops[0] if stops else end_of_text(self.tokenizer)
        begin = _special(folder, self.tokenizer, "bos_token")
        self.end, self.stops = end, {*stops, end}
        self.prefix = end if begin is None else begin
        self.prefix_text, self.end_text = (
            self.tokenizer.decode([token], skip_special_tokens=False)
            for token in (self.prefix, self.end)
        )
        self.where = str(folder)
        # Not fused: the fused modules compute only the logits of the last position.
        self.engine = Engine(model, fused=False, cache=cache)

    @property
    def eot_token_id(self) -> int:
        return self.end

    @property
    def prefix_token_id(self) -> int:
        return self.prefix

    @property
    def max_length(self) -> int:
        return self.model.config.max_seq_len

    @property
    def tokenizer_name(self) -> str:
        return "ladder"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not (self.prefix_text and string.startswith(self.prefix_text))
        return encode(self.tokenizer, string, "a text of the task", special=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without a generation prompt, its last message stays open."""
        assert self.template is not None
        # Some templates refuse a system message, such as a task's description.
        without = [message for message in chat_history if message["role"] != "system"]
        for messages in (chat_history, without):
            with contextlib.suppress(LeftOut):
                if add_generation_prompt:
                    return self.template.render(messages, prompt=True)
                return self.template.unfinished(messages)
        raise UserError(
            f"the chat template of {self.template.where} refuses the examples of a task; leave "
            f"--chat-template out, or give another"
        )

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-likelihood in nats of each (context, continuation), and whether it is greedy."""
        pairs = [
            self._encode(*request.args)._replace(task=request.task_name) for request in requests
        ]
        return [*self._score(pairs)]

    def _encode(self, context: str, continuation: str) -> Request:
        """The tokens of a pair. An empty continuation, on which HFLM fails, has no tokens."""
        if not continuation:
            return Request([self.prefix], [])
        if not context:
            tokens = self.tok_encode(continuation, add_special_tokens=False)
            if tokens[:1] == [self.prefix]:
                return Request(tokens[:1], tokens[1:])
            return Request([self.prefix], tokens)
        before, after = self._encode_pair(context, continuation)
        if not after:  # the continuation was merged into the context's last token
            whole = self.tok_encode(context + continuation)
            before, after = whole[:-1], whole[-1:]
        return Request(before or [self.prefix], after)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return [*self._score([Request(*each[1:]) for each in requests])]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each whole text in nats, in windows cut as by the harness."""
        windows: list[list[Request]] = []
        for request in requests:
            cut = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix, self.window, context_len=1
            )
            windows.append([Request(*make_disjoint_window(pair)) for pair in cut])
        scores = iter(self._score([window for each in windows for window in each]))
        # The windows of rank 0 were scored; a text has the same number of windows on every rank.
        return [sum(next(scores).loglikelihood for _ in each) for each in windows]

    def _score(self, requests: list[Request]) -> list[Score]:
        requests = launch.from_first(requests)
        with Progress("score", len(requests), "requests", quiet=launch.rank() != 0) as progress:
            return score(
                self.model,
                requests,
                self.batch,
                progress.update,
                cache=self.engine.cache,
                where=self.where,
            )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text generated after each context, up to the first of the task's stop sequences."""
        asked = []
        for request in requests:
            context, options = request.args[:2]
            tokens = self.tok_encode(context) or [self.prefix]
            found = generation(options, request.task_name, self.max_length, self.where)
            found["until"] = handle_stop_sequences(found["until"], self.end_text)
            asked.append((tokens, found))
        asked = launch.from_first(asked)
        # Requests with the same options together, the longest first.
        kinds = [json.dumps(options, sort_keys=True) for _, options in asked]
        order = sorted(range(len(asked)), key=lambda i: (kinds[i], -len(asked[i][0]), asked[i][0]))
        results = [""] * len(asked)
        done = 0
        with Progress("generate", len(asked), "requests", quiet=launch.rank() != 0) as progress:
            for _, group in itertools.groupby(order, key=lambda i: kinds[i]):
                same = list(group)
                for start in range(0, len(same), self.batch):
                    chunk = same[start : start + self.batch]
                    prompts, options = [asked[i][0] for i in chunk], asked[chunk[0]][1]
                    # A seed per batch, so that repeats of a request draw different texts.
                    texts = self._generate(prompts, **options, seed=done)
                    for i, text in zip(chunk, texts, strict=True):
                        results[i] = text
                    done += len(chunk)
                    progress.update(done)
        return results

    def _generate(
        self, prompts: list[list[int]], count: int, until: list[str], seed: int, **sampling: Any
    ) -> list[str]:
        """The texts generated after the prompts, which are cut at the front to leave room."""
        results = self.engine.generate(
            [prompt[-(self.max_length - count) :] for prompt in prompts],
            max_new_tokens=count,
            sampling=Sampling(**sampling, seed=seed),
            stop=self.stops,
            ended=stopper(self.tokenizer, until),
        )
        # Without special tokens, as HFLM's: a stop sequence that names one has ended the tokens.
        texts = [self.tokenizer.decode(result.tokens) for result in results]
        return [postprocess_generated_text(text, until, None) for text in texts]


def check_generation(tasks: Mapping[str, Any], folders: Iterable[Path]) -> None:
    """Raise UserError for a task with generation_kwargs that a model of `folders` refuses."""
    contexts = {folder: read_config(folder, quantised=True).max_seq_len for folder in folders}
    shortest = min(contexts, key=contexts.__getitem__)
    for name, task in tasks.items():
        # A class that builds its own requests has other options; they are checked when it runs.
        usual = type(task).construct_requests is ConfigurableTask.construct_requests
        if usual and task.OUTPUT_TYPE == "generate_until":
            options = task.get_config("generation_kwargs")
            generation(options, name, contexts[shortest], str(shortest))


def generation(
    options: Mapping[str, Any], task: str | None, context: int, where: str
) -> dict[str, Any]:
    """The arguments of `LadderLM._generate` for a task's generation_kwargs.

    Raises UserError for options that the engine does not support. context: the max_seq_len of the
    model in the folder `where`.
    """
    given = {name: value for name, value in options.items() if value is not None}
    until = given.pop("until", [])
    texts = [until] if isinstance(until, str) else until
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"task {task!r} has until={until!r}; give a text or a list of texts")
    try:
        for name in LENGTHS:
            if name in given:
                check_count(name, given[name], 1)
        for name in ("temperature", "top_p"):
            check_number(name, given.get(name, 1.0))
        known = {**normalize_gen_kwargs(given, DEFAULT_NEW_TOKENS)}
        sample = known.get("do_sample") and known.get("temperature", 1.0) > 0
        sampling: dict[str, Any] = {
            "temperature": known.get("temperature", 1.0) if sample else 0.0,
            "top_k": known.get("top_k", 0) if sample else 0,
            "top_p": known.get("top_p", 1.0) if sample else 1.0,
        }
        Sampling(**sampling)
    except UserError as error:
        raise UserError(f"task {task!r}: {error}") from None
    extra = sorted(name for name in {*given} - {*SAMPLING, *LENGTHS}
                   if given[name] != NEUTRAL.get(name))  # fmt: skip
    if extra:
        raise UserError(
            f"task {task!r} generates with {extra[0]}={given[extra[0]]!r}, and the engine "
            f"supports only {', '.join(SAMPLING)}; leave the task out"
        )
    count = known["max_gen_toks"]
    if count >= context:
        raise UserError(
            f"task {task!r} generates up to {count} tokens and the context of {where} is "
            f"max_seq_len={context}; leave the task out"
        )
    return {"count": count, "until": [*texts], **sampling}


def _special(folder: Path, tokenizer: Tokenizer, name: str) -> int | None:
    """The id of `bos_token` or `eos_token` by a folder's files, or None."""
    token = special_tokens(folder).get(name)
    found = None if token is None else tokenizer.token_to_id(token)
    return None if found is None else int(found)
