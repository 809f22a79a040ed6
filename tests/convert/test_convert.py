"""`ladder convert`: Hugging Face's folders to every plan and back, streamed, verified, refused."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from ladder import checkpoint
from ladder.checkpoint import load_model, newest
from ladder.cli import main
from ladder.convert import weights
from ladder.convert.command import convert
from ladder.hf_config import config_from_huggingface
from ladder.infer.engine import Engine, generate
from ladder.infer.load import load_for_inference
from ladder.models import UserError
from ladder.train.loop import train
from ladder.train.shards import write_file
from tests import restatement
from tests.convert.folders import (
    FAMILIES,
    INDEX,
    SHAPE,
    assert_refused,
    assert_same_bits,
    edit,
    hugging_face,
    save,
    tensors,
)
from tests.distributed import Pools, tp_mesh
from tests.folders import TOKENS
from tests.samples import relative_error
from tests.train.runs import recipe, run_on_ranks

NORM = "model.layers.1.input_layernorm.weight"


# There and back


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bit of every tensor, the config and the companions; and transformers' logits."""
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    source = save(tmp_path / "hf", family)
    there = convert(source, tmp_path / "ours", "standard")
    back = convert(tmp_path / "ours", tmp_path / "back", to="hf")
    for report in (there, back):
        assert isinstance(report.logits, float)
        assert report.logits < 1e-5
    for name in ("ours", "back"):
        assert_same_bits(tensors(tmp_path / name), tensors(source))
        assert (tmp_path / name / INDEX).exists()
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (tmp_path / name / file).read_text() == (source / file).read_text()
        assert not (tmp_path / name / "README.md").exists()
        assert checkpoint.read_stop_tokens(tmp_path / name) == [3, 5]
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == (
        json.loads((source / "config.json").read_text())
    )


def test_settings_of_generation_get_the_end_tokens_that_they_lack(tmp_path: Path) -> None:
    """Those of a run of an earlier version may name only its start's: transformers would go on."""
    source = save(tmp_path / "hf")
    edit(source / "generation_config.json", eos_token_id=5, top_p=0.9)
    convert(source, tmp_path / "ours", "standard")
    settings = json.loads((tmp_path / "ours" / "generation_config.json").read_text())
    assert (settings["eos_token_id"], settings["top_p"]) == ([3, 5], 0.9)


@pytest.mark.parametrize("family", FAMILIES)
def test_back_without_the_original_config(tmp_path: Path, family: str) -> None:
    """A trained checkpoint has none: transformers must read what is written from ours alone."""
    convert(save(tmp_path / "hf", family), tmp_path / "ours", "standard")
    edit(tmp_path / "ours" / "config.json", huggingface=None)
    report = convert(tmp_path / "ours", tmp_path / "back", to="hf")
    assert isinstance(report.logits, float)
    assert report.logits < 1e-5
    kind = json.loads((tmp_path / "back" / "config.json").read_text())["model_type"]
    assert kind == family.split(",")[0].split()[0].replace("mistral", "llama")


@pytest.mark.parametrize("kept", [True, False])
def test_token_ids_go_back(tmp_path: Path, kept: bool) -> None:
    """Those of our config.json, or of the original; LlamaConfig's default of bos_token_id is 1."""
    convert(save(tmp_path / "hf"), tmp_path / "ours", "standard")
    path = tmp_path / "ours" / "config.json"
    if not kept:
        edit(path, huggingface=None)
    convert(tmp_path / "ours", tmp_path / "none", to="hf")
    edit(path, bos_token_id=7, pad_token_id=9)
    convert(tmp_path / "ours", tmp_path / "some", to="hf")
    originals = json.loads((tmp_path / "hf" / "config.json").read_text())
    for name, expected in (
        ("none", (originals["bos_token_id"], originals["pad_token_id"]) if kept else (None, None)),
        ("some", (7, 9)),
    ):
        found = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert (found.bos_token_id, found.pad_token_id) == expected
    edit(path, huggingface=None)
    convert(tmp_path / "ours", tmp_path / "ladder", "ladder")
    found = json.loads((tmp_path / "ladder" / "config.json").read_text())
    assert (found["bos_token_id"], found["pad_token_id"]) == (7, 9)


def test_an_original_config_that_is_no_longer_true_is_not_used(tmp_path: Path) -> None:
    """Say, after fine-tuning on longer sequences."""
    convert(save(tmp_path / "hf"), tmp_path / "ours", "standard")
    path = tmp_path / "ours" / "config.json"
    edit(path, model=json.loads(path.read_text())["model"] | {"max_seq_len": 128})
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["max_position_embeddings"] == 128


def test_a_checkpoint_of_several_ranks_goes_back(tmp_path: Path) -> None:
    """Its files hold boxes of the tensors: here the rows of three ranks."""
    source = save(tmp_path / "hf")
    convert(source, tmp_path / "ours", "standard")
    (file,) = (tmp_path / "ours").glob("*.safetensors")
    whole = load_file(file)
    file.unlink()
    files = []
    for rank in range(3):
        thirds = {name: value.chunk(3)[rank].clone() for name, value in whole.items()}
        starts = {
            name: [rank * value.chunk(3)[0].shape[0], *[0] * (value.dim() - 1)]
            for name, value in whole.items()
        }
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        files.append(tmp_path / "ours" / name)
        write_file(files[-1], thirds, starts)
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    assert_same_bits(tensors(tmp_path / "back"), tensors(source))
    files[1].unlink()
    with pytest.raises(UserError, match="lacks a part of the tensor"):
        convert(tmp_path / "ours", tmp_path / "again", to="hf")
    assert not (tmp_path / "again").exists()


def test_a_tied_head_that_is_stored_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped where it is the embedding; where it is not, which of the two was meant?

    Compared to its last row, some rows at a time.
    """
    monkeypatch.setattr("ladder.reader.TIED_ROWS", 16)
    source = save(tmp_path / "hf", "llama 3, tied")
    index = json.loads((source / INDEX).read_text())["weight_map"]
    embedding = tensors(source)["model.embed_tokens.weight"]
    edit(source / INDEX, weight_map=index | {"lm_head.weight": "head.safetensors"})
    save_file({"lm_head.weight": embedding}, source / "head.safetensors")
    convert(source, tmp_path / "ours", "standard")
    assert "lm_head.weight" not in tensors(tmp_path / "ours")
    other = embedding.clone()
    other[-1, -1] += 1
    save_file({"lm_head.weight": other}, source / "head.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        convert(source, tmp_path / "again", "standard")
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_model(source)  # transformers would compute with the head


def test_keys_that_a_config_leaves_out_are_as_in_transformers() -> None:
    """A norm's eps, a context, a rotary base, heads: all that a config.json need not name."""
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        shape = {key: SHAPE[key] for key in needed} | {"num_attention_heads": 32}
        shape["hidden_size"] = 32 * 8
        if name == "Mistral":
            shape["sliding_window"] = None  # transformers' own default is refused
        given = getattr(transformers, f"{name}Config")(**shape).to_dict()
        least = {"model_type": given["model_type"], **shape}
        found = config_from_huggingface(least, "config.json")
        assert found == config_from_huggingface(given, "config.json"), name
        assert found.norm_eps == given["rms_norm_eps"]


# What the families compute


def logits_on_rank(rank: int, world: int, folders: list[Path]) -> list[Tensor]:
    with torch.no_grad():
        return [load_model(folder, tp_mesh(world))(TOKENS) for folder in folders]


@torch.no_grad()
def test_the_families_compute_what_transformers_does(tmp_path: Path, pools: Pools) -> None:
    """In one process and on two: a norm of q after its rotation, or a bias on the output, shows.
    And decoding: a key must be normed before it is cached."""
    folders = [save(tmp_path / str(i), family) for i, family in enumerate(FAMILIES)]
    expected = [hugging_face(family)(TOKENS).logits for family in FAMILIES]
    alone = [load_model(folder) for folder in folders]
    ranks = pools(2).run(logits_on_rank, folders)
    for found in ([model(TOKENS) for model in alone], *ranks):
        for family, one, other in zip(FAMILIES, found, expected, strict=True):
            assert relative_error(one, other) < 1e-5, family
    for family, model in zip(FAMILIES, alone, strict=True):
        greedy = hugging_face(family).generate(
            TOKENS[:1], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        found_tokens = generate(model, [TOKENS[0].tolist()], max_new_tokens=6)[0].tokens
        assert found_tokens == greedy[0, TOKENS.shape[1] :].tolist(), family


# What the plans compute: their equations, of the source's weights


def two_norms(weights: dict[str, Tensor], config: Any, tokens: Tensor, ranks: int) -> Tensor:
    """`parallel` with the source's norms where they were: y = x + Attention(n(x)) + MLP(m(x))."""
    run = restatement.Run(weights, config, tokens, ranks)
    x = run.embedding
    for layer in range(config.num_layers):
        attention = run.all_reduce(run.attention, layer, x)
        x = x + attention + run.all_reduce(run.mlp, layer, x)
    return run.head([x])


PLANS = (
    ("standard", None), ("ladder", None), ("hybrid", None), ("ladder@1-3", None),
    ("parallel", None), ("desync-2x", 2), ("desync-4x", 2), ("accumulate-4x", 2),
    ("accumulate-2x-lag1", 2), ("dtp-1", 2),
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("plan", "degree"), PLANS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_plan_computes_its_equations(
    tmp_path: Path, family: str, plan: str, degree: int | None
) -> None:
    """A hybrid's first ladder sublayer reads without the last standard MLP (section 4.2), norms are
    folded into what read them, and those of each rank begin as the one that they come from."""
    source = save(tmp_path / "hf", family)
    convert(source, tmp_path / "ours", plan, degree)
    model = load_model(tmp_path / "ours")
    written = two_norms if plan == "parallel" else restatement.named(plan, model.config)
    assert written is not None
    expected = written(tensors(source), model.config, TOKENS, degree or 1)
    assert relative_error(model(TOKENS), expected) < 1e-5
    if plan != "standard":
        assert relative_error(model(TOKENS), hugging_face(family)(TOKENS).logits) > 1e-3


def test_one_of_our_models_gets_more_ladder_layers(tmp_path: Path) -> None:
    """From a hybrid to another, but not from norms that were merged."""
    source = save(tmp_path / "hf")
    convert(source, tmp_path / "hybrid", "hybrid")
    convert(tmp_path / "hybrid", tmp_path / "ladder", "ladder")
    assert_same_bits(tensors(tmp_path / "ladder"), tensors(source))
    assert checkpoint.read_config(tmp_path / "ladder").plan.name == "ladder"
    convert(source, tmp_path / "parallel", "parallel")
    with pytest.raises(UserError, match="plan 'parallel' of the source"):
        convert(tmp_path / "parallel", tmp_path / "wrong", "ladder")
    convert(source, tmp_path / "desync", "desync-2x", 2)
    with pytest.raises(UserError, match="plan 'desync-2x' of the source"):  # two ranks' norms
        convert(tmp_path / "desync", tmp_path / "wrong", "desync-2x", 4)


# Streaming


@pytest.mark.parametrize("plan", ["ladder", "parallel"])
def test_one_files_tensors_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """One file's tensors are in memory at a time, for any size of the model."""
    source = save(tmp_path / "hf")
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    living: list[weakref.ref[Tensor]] = []
    most = 0

    def watched(*arguments: Any) -> Tensor:
        nonlocal most
        made = make(*arguments)
        living.append(weakref.ref(made))
        held = [value for each in living if (value := each()) is not None]
        most = max(most, sum(value.nbytes for value in held))
        return made

    make = weights.make
    monkeypatch.setattr(weights, "make", watched)
    convert(source, tmp_path / "ours", plan)
    old = tensors(source).values()
    assert sum(value.nbytes for value in old) > 100_000
    assert 0 < most <= 20_000 + max(value.nbytes for value in old)


# What is wrong


def change_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        files = json.loads((folder / INDEX).read_text())["weight_map"]
        path = folder / files[NORM]
        found = load_file(path)
        change(found)
        save_file(found, path, {"format": "pt"})
        names = dict.fromkeys(found, path.name)
        kept = {name: file for name, file in files.items() if file != path.name}
        edit(folder / INDEX, weight_map=kept | names)

    return apply


def change_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change_tensors(lambda t: t.update({"model.extra": torch.ones(2)})), ("model.extra",)),
        (change_tensors(lambda t: t.pop(NORM)), ("lacks the tensor", NORM)),
        (change_tensors(lambda t: t.update({NORM: torch.ones(5)})), (NORM, "[5]", "[32]")),
        (change_tensors(lambda t: t.update({NORM: torch.ones(32).char()})), (NORM, "I8")),
        (lambda folder: next(folder.glob("model-00002*")).unlink(), ("model-00002", "missing")),
        (change_tensors(lambda t: t[NORM].fill_(torch.nan)), (NORM, "model-0000", "holds NaN")),
        (change_tensors(lambda t: t[NORM][3:4].fill_(-torch.inf)), (NORM, "or infinity")),
        (change_config(num_hidden_layers=5), ("lacks the tensor", "layers.4.", "and 6 more")),
        (change_config(model_type="gpt2"), ("'gpt2'",)),
        (change_config(rope_parameters={"rope_type": "longrope"}), ("'longrope'",)),
        (change_config(rope_parameters=None, rope_scaling={"factor": 2.0}), ("'factor': 2.0",)),
        (change_config(partial_rotary_factor=0.5), ("partial_rotary_factor=0.5",)),
        (change_config(quantization_config={"bits": 4}), ("quantization_config",)),
        (change_config(eos_token_id="<end>"), ("eos_token_id='<end>'",)),
        (change_config(eos_token_id=91), ("json has eos_token_id=91, outside vocab_size=91",)),
        (change_config(eos_token_id=[92, -1]), ("eos_token_id=[92, -1], outside",)),
        (change_config(model_type="mistral", sliding_window=32),
         ("sliding_window=32", "max_position_embeddings=64")),
        (change_config(model_type="qwen2", sliding_window=32, use_sliding_window=True,
                       max_window_layers=2), ("sliding_window=32",)),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    words: tuple[str, ...],
) -> None:
    damage(save(tmp_path / "hf"))
    assert_refused(capsys, tmp_path / "hf", words, "--plan", "ladder")


def test_ids_that_models_have_are_kept(tmp_path: Path) -> None:
    """Older Llamas have a padding token of -1, and one end of several in the vocabulary ends."""
    source = save(tmp_path / "hf")
    edit(source / "config.json", eos_token_id=[3, 200], pad_token_id=-1)
    convert(source, tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (kept["eos_token_id"], kept["huggingface"]["pad_token_id"]) == ([3, 200], -1)


def test_a_value_too_large_for_the_type_is_named(tmp_path: Path) -> None:
    change_tensors(lambda t: t[NORM].fill_(1e5))(save(tmp_path / "hf"))
    with pytest.raises(UserError, match=f"--dtype=float16: a value of '{NORM}' is too large"):
        convert(tmp_path / "hf", tmp_path / "out", dtype="float16")


def test_a_window_that_no_layer_has_is_no_window(tmp_path: Path) -> None:
    """Qwen's configs name one, and use_sliding_window=false."""
    source = save(tmp_path / "hf", "qwen2")
    edit(source / "config.json", sliding_window=32, use_sliding_window=False)
    convert(source, tmp_path / "a", "ladder")
    edit(source / "config.json", layer_types=None, use_sliding_window=True, max_window_layers=4)
    convert(source, tmp_path / "b", "ladder")


def test_a_faulty_disk_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(values: dict[str, Tensor], *arguments: Any, **options: Any) -> None:
        values[NORM] = values[NORM].clone()
        values[NORM][7] += 1e-6
        save_file(values, *arguments, **options)

    source = save(tmp_path / "hf")
    monkeypatch.setattr(checkpoint, "save_file", faulty)
    with pytest.raises(UserError, match=f"{NORM}: the written data differs"):
        convert(source, tmp_path / "out", "ladder")
    assert list(tmp_path.iterdir()) == [source]


def test_what_transformers_cannot_load_is_not_compared(tmp_path: Path) -> None:
    """It is told in one line, and nothing is written."""
    source = save(tmp_path / "hf")
    edit(source / "config.json", bos_token_id="<begin>")
    with pytest.raises(UserError, match=r"transformers cannot load .*bos_token_id"):
        convert(source, tmp_path / "out", "standard")
    assert not (tmp_path / "out").exists()


def test_a_run_is_exported_as_one_plain_folder(corpus: Path, tmp_path: Path, pools: Pools) -> None:
    """Without --plan a model keeps its own: what two ranks wrote as shards is joined, for others to
    read."""
    config = recipe(corpus, tmp_path / "run", plan="ladder", steps=3, tp=2)
    pools(2).run(run_on_ranks, config.to_dict(), None)
    found = newest(tmp_path / "run")
    assert list(found.glob("shard-*"))
    assert main(["convert", str(tmp_path / "run"), "--out", str(tmp_path / "plain")]) == 0
    names = {file.name for file in (tmp_path / "plain").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    models = [load_model(folder) for folder in (found, tmp_path / "plain")]
    assert models[0].config == models[1].config
    for (name, value), other in zip(
        models[0].state_dict().items(), models[1].state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name
    shard = next(found.glob("shard-00002-model-*"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    shard.write_bytes(data)
    with pytest.raises(UserError, match=f"{shard.name} is damaged.*another checkpoint"):
        convert(found, tmp_path / "again")
    for load in (load_for_inference, Engine):
        with pytest.raises(UserError, match=f"{shard.name} is damaged.*another checkpoint"):
            load(tmp_path / "run")
    wrong = recipe(corpus, tmp_path / "student", steps=3, teacher=str(tmp_path / "run"))
    with pytest.raises(UserError, match=f"{shard.name} is damaged.*as teacher"):
        train(wrong)


def test_transformers_is_told_which_token_ends_a_text(corpus: Path, tmp_path: Path) -> None:
    """A run's folder gives its id alone, and the harness has to pad with something."""
    train(recipe(corpus, tmp_path / "run", plan="standard", steps=3))
    assert main(["convert", f"{tmp_path}/run", "--to", "hf", "--out", f"{tmp_path}/hf"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
