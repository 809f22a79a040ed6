"""`ladder generate`: completions of prompts, printed."""

from __future__ import annotations

import argparse
import sys
from itertools import chain

import torch
from tokenizers import Tokenizer

from ladder.checkpoint import newest, read_stop_tokens
from ladder.comm.access import common_push_refusal
from ladder.data.template import ChatTemplate, LeftOut, open_template
from ladder.data.tokenizer import encode, load_tokenizer
from ladder.infer.cache import check_cache_kind
from ladder.infer.engine import NotFiniteError, device_of, generate
from ladder.infer.fused import fuse_refusal
from ladder.infer.load import load_for_inference
from ladder.infer.options import check
from ladder.models.errors import UserError
from ladder.models.quantised import held_as
from ladder.models.storage import SCALED
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.dispatch import size_text

CONTEXT = 32  # about the number of earlier tokens with which a new token is decoded


class TokenPrinter:
    """Prints one completion token by token, and holds back characters whose bytes are incomplete.

    prompt: the prompt's token ids. text: printed before the completion, with its first token. A new
    token is decoded with only the last few tokens, so its time does not grow with the text. These
    begin with a whole character: if its first byte is missing, decoders may lose all that follow.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], text: str) -> None:
        self.tokenizer, self.before = tokenizer, text
        self.tokens: list[int] = []  # not printed yet
        start = max(0, len(prompt) - CONTEXT)
        while start and tokenizer.decode(prompt[start:]).startswith("\ufffd"):
            start -= 1
        self.shown = [prompt[start:]]  # groups of tokens, each of whole characters

    def _text(self) -> str:
        return continuation(self.tokenizer, [*chain(*self.shown)], self.tokens)

    def add(self, _: int, token: int) -> None:
        self.tokens.append(token)
        text = self._text()
        if not text.endswith("\ufffd"):  # the bytes of a character may be split over tokens
            sys.stdout.write(self.before + text)
            sys.stdout.flush()
            self.before = ""
            self.shown.append(self.tokens)
            self.tokens = []
            if sum(map(len, self.shown[1:])) >= CONTEXT:
                del self.shown[0]

    def end(self) -> None:
        print(self.before + self._text())


def continuation(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text that `tokens` add to the prompt; decoded alone, they may lose a leading space."""
    return str(tokenizer.decode(prompt + tokens))[len(tokenizer.decode(prompt)) :]


def generate_command(options: argparse.Namespace) -> int:
    """Run `ladder generate` on this rank; rank 0 prints."""
    launch.join(options.device)  # ranks that have joined report an error once
    sampling = check(options)
    check_cache_kind(options.cache)
    folder = newest(options.model)
    launch.agree(vars(options))
    tokenizer = load_tokenizer(folder)
    tokenizer.encode_special_tokens = False  # a prompt may hold special tokens, as templates do
    stop = set() if options.ignore_eos else set(read_stop_tokens(folder))
    stop |= {_stop_token(tokenizer, text) for text in options.stop}
    template = open_template(folder, tokenizer, _template_of(options))
    if template is None:
        prompts = [encode(tokenizer, text, "--prompt") for text in options.prompt]
    else:
        prompts = [_chat_prompt(template, tokenizer, text) for text in options.prompt]
        if not options.ignore_eos:
            stop.add(tokenizer.token_to_id(template.names["eos_token"]))
    for text, prompt in zip(options.prompt, prompts, strict=True):
        if not prompt:
            raise UserError(f"--prompt={text!r} has no tokens; give some text")
    model = load_for_inference(
        folder,
        tp=options.tp,
        reducer=options.reducer,
        dtype=options.dtype,
        device=options.device,
        weights=options.weights,
        activations=options.activations,
    )
    main = launch.rank() == 0
    if main and device_of(model).type == "cuda" and (reason := fuse_refusal(model)):
        print(f"decodes without fused kernels, which cannot run {reason}", file=sys.stderr)
    printer = None
    if main and len(prompts) == 1:
        printer = TokenPrinter(tokenizer, prompts[0], options.prompt[0] if template is None else "")
    try:
        with torch.inference_mode():
            results = generate(
                model,
                prompts,
                options.cache,
                max_new_tokens=options.max_new_tokens,
                sampling=sampling,
                stop=stop,
                on_token=None if printer is None else printer.add,
            )
    except KeyboardInterrupt:
        if printer is not None:
            print()  # so that the message about it begins a new line
        raise
    except NotFiniteError as error:
        raise UserError(
            f"{folder}: {error}; its weights hold NaN or infinities, or overflow: try --dtype "
            f"float32, or use another model"
        ) from error
    if printer is not None:
        printer.end()
    if main and (kind := held_as(model)):
        print(f"weights: {kind}, with a scale for each {SCALED[kind]}", file=sys.stderr)
    text = _picked_reducers(model, options.reducer)
    if text and main:
        print(f"reducer picked: {text}", file=sys.stderr)
    if printer is not None:
        if results[0].reason == "context":
            room = model.config.max_seq_len
            print(f"ended by the model's context of {room} tokens", file=sys.stderr)
    elif main:
        for i, (prompt, result) in enumerate(zip(options.prompt, results, strict=True)):
            print(f"--- prompt {i} ({len(result.tokens)} tokens, ended by {result.reason})")
            told = prompt if template is None else f"{prompt}\n"
            print(told + continuation(tokenizer, prompts[i], result.tokens))
    return 0


def _template_of(options: argparse.Namespace) -> str | None:
    """The template to open: a file (which implies --chat), "" for the tokenizer's own, or None."""
    return options.chat_template or ("" if options.chat else None)


def _chat_prompt(template: ChatTemplate, tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a chat in which the user has said `text`, up to the answer."""
    try:
        chat = template.render([{"role": "user", "content": text}], prompt=True)
    except LeftOut as reason:
        raise UserError(
            f"--prompt={text!r} makes a conversation {reason}; give another --chat-template"
        ) from reason
    return encode(tokenizer, chat, "--prompt", special=False)


def _picked_reducers(model: Transformer, wanted: str) -> str:
    """The reducer of each message size, if chosen automatically, else "". Every rank calls it."""
    sizes = getattr(model.reducer, "picked", {})
    if wanted == "auto" and launch.world_size() > 1:
        why = common_push_refusal(launch.world_size())
        if why:
            return f"async (push: {why})"
    return ", ".join(f"{size_text(size)} {name}" for size, name in sorted(sizes.items()))


def _stop_token(tokenizer: Tokenizer, text: str) -> int:
    ids = encode(tokenizer, text, "--stop", special=False)
    known = tokenizer.token_to_id(text)
    ids = ids if known is None else [known]
    if len(ids) != 1:
        raise UserError(
            f"--stop={text!r} is {len(ids)} tokens of this tokenizer; give the text of one token"
        )
    return int(ids[0])
