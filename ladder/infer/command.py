"""`ladder generate`: completions of prompts, printed."""

from __future__ import annotations

import argparse
import sys

import torch
from tokenizers import Tokenizer

from ladder.checkpoint import newest, read_config, read_stop_tokens
from ladder.comm.access import common_push_refusal
from ladder.data.template import ChatTemplate, LeftOut, open_template
from ladder.data.tokenizer import encode
from ladder.infer.cache import check_cache_kind
from ladder.infer.engine import device_of, generate, refuse_not_finite
from ladder.infer.fused import fuse_refusal
from ladder.infer.lines import line_name, write_completions
from ladder.infer.load import load_for_inference, load_model_tokenizer
from ladder.infer.options import check
from ladder.infer.prompts import check_room
from ladder.infer.text import TokenPrinter, before_stop, continuation, read_stops, stopper
from ladder.models.errors import UserError
from ladder.models.quantised import held_as
from ladder.models.storage import SCALED
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.dispatch import size_text


def generate_command(options: argparse.Namespace) -> int:
    """Run `ladder generate` on this rank; rank 0 prints."""
    launch.join(options.device)  # ranks that have joined report an error once
    sampling = check(options)
    check_cache_kind(options.cache)
    folder = newest(options.model)
    launch.agree(vars(options))
    tokenizer = load_model_tokenizer(folder)
    tokenizer.encode_special_tokens = False  # a prompt may hold special tokens, as templates do
    stop = set() if options.ignore_eos else set(read_stop_tokens(folder))
    special, until = read_stops(tokenizer, options.stop)
    stop |= special
    template = open_template(folder, tokenizer, _template_of(options))
    context = read_config(folder, quantised=True).max_seq_len
    prompts = _encoded(options, tokenizer, template, context)
    if template is not None and not options.ignore_eos:
        stop.add(tokenizer.token_to_id(template.names["eos_token"]))
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
    if main and len(prompts) == 1 and options.out is None:
        begun = options.prompt[0] if template is None else ""
        printer = TokenPrinter(tokenizer, prompts[0], begun, until)
    try:
        with torch.inference_mode(), refuse_not_finite(folder):
            results = generate(
                model,
                prompts,
                options.cache,
                max_new_tokens=options.max_new_tokens,
                sampling=sampling,
                stop=stop,
                on_token=None if printer is None else printer.add,
                ended=stopper(tokenizer, until, prompts),
            )
    except KeyboardInterrupt:
        if printer is not None:
            print()  # so that the message about it begins a new line
        raise
    if printer is not None:
        printer.end()
    if main and (kind := held_as(model)):
        print(f"weights: {kind}, with a scale for each {SCALED[kind]}", file=sys.stderr)
    text = _picked_reducers(model, options.reducer)
    if text and main:
        print(f"reducer picked: {text}", file=sys.stderr)
    found = []
    for given, prompt, result in zip(options.prompt, prompts, results, strict=True):
        whole = continuation(tokenizer, prompt, result.tokens)
        shown = before_stop(whole, until)
        ended = result.reason if shown == whole else "stop"  # the last token may complete one
        count = len(result.tokens)
        found.append({"prompt": given, "text": shown, "tokens": count, "reason": ended})
    if not main:
        return 0
    if options.out is not None:
        write_completions(options.out, found)
        print(f"{options.out}: {len(found)} completions")
    elif printer is not None:
        if found[0]["reason"] == "context":
            print(f"ended by the model's context of {context} tokens", file=sys.stderr)
    else:
        for i, each in enumerate(found):
            print(f"--- prompt {i} ({each['tokens']} tokens, ended by {each['reason']})")
            told = each["prompt"] if template is None else f"{each['prompt']}\n"
            print(told + each["text"])
    return 0


def _template_of(options: argparse.Namespace) -> str | None:
    """The template to open: a file (which implies --chat), "" for the tokenizer's own, or None."""
    return options.chat_template or ("" if options.chat else None)


def _encoded(
    options: argparse.Namespace, tokenizer: Tokenizer, template: ChatTemplate | None, context: int
) -> list[list[int]]:
    """The tokens of each prompt. Raises UserError for one that does not fit the model's context."""
    prompts = []
    for i, text in enumerate(options.prompt):
        what = line_name(options.prompts, options.lines[i]) if options.prompts else "--prompt"
        if template is None:
            prompt = encode(tokenizer, text, what)
        else:
            prompt = _chat_prompt(template, tokenizer, text, what)
        if not prompt:
            raise UserError(f"{what}={text!r} has no tokens; give some text")
        check_room(what, len(prompt), context)
        prompts.append(prompt)
    return prompts


def _chat_prompt(template: ChatTemplate, tokenizer: Tokenizer, text: str, what: str) -> list[int]:
    """The tokens of a chat in which the user has said `text`, up to the answer.

    what: the prompt's name in errors.
    """
    try:
        chat = template.render([{"role": "user", "content": text}], prompt=True)
    except LeftOut as reason:
        raise UserError(
            f"{what}={text!r} makes a conversation {reason}; give another --chat-template"
        ) from reason
    return encode(tokenizer, chat, what, special=False)


def _picked_reducers(model: Transformer, wanted: str) -> str:
    """The reducer of each message size, if chosen automatically, else "". Every rank calls it."""
    sizes = getattr(model.reducer, "picked", {})
    if wanted == "auto" and launch.world_size() > 1:
        why = common_push_refusal(launch.world_size())
        if why:
            return f"async (push: {why})"
    return ", ".join(f"{size_text(size)} {name}" for size, name in sorted(sizes.items()))
