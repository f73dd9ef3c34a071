"""Inputs: every accepted form, made for tiny transformers models, fitted to `forward`, without a cache."""

from __future__ import annotations

import collections
from typing import Any, TypedDict, Unpack

import pytest
import torch
import transformers
from torch import nn

from autotp import inputs as I
from autotp.errors import InputError

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT = SMALL | {"vocab_size": 99, "max_position_embeddings": 64}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = SMALL | {"image_size": 32, "patch_size": 8}
SEQ2SEQ = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 99, "pad_token_id": 0}
SEQ2SEQ |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
SEQ2SEQ |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
TOWERS = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}

# class, config class, its fields, and the shapes to be made
MODELS = [
    ("LlamaForCausalLM", "LlamaConfig", TEXT, {"input_ids": (2, 16)}),
    ("LlamaForCausalLM", "LlamaConfig", TEXT | {"max_position_embeddings": 8}, {"input_ids": (2, 8)}),
    ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 1, "n_head": 4, **SPECIAL}, {"input_ids": (2, 16)}),
    ("BertModel", "BertConfig", TEXT, {"input_ids": (2, 16)}),
    ("ViTModel", "ViTConfig", VISION, {"pixel_values": (2, 3, 32, 32)}),
    ("ViTModel", "ViTConfig", VISION | {"image_size": (16, 32)}, {"pixel_values": (2, 3, 16, 32)}),
    ("ViTModel", "ViTConfig", VISION | {"num_channels": 1}, {"pixel_values": (2, 1, 32, 32)}),
    ("VideoMAEModel", "VideoMAEConfig", VISION | {"num_frames": 4}, {"pixel_values": (2, 4, 3, 32, 32)}),
    (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4},
        {"input_ids": (2, 16), "decoder_input_ids": (2, 12)},
    ),
    (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 20},
        {"input_features": (2, 8, 40), "decoder_input_ids": (2, 12)},
    ),
    (
        "Speech2TextModel",
        "Speech2TextConfig",
        SEQ2SEQ | {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64},
        {"input_features": (2, 64, 8), "decoder_input_ids": (2, 12)},
    ),
    (
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        SMALL | {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embedding_groups": 4},
        {"input_values": (2, (2 * 31 + 3 - 1) * 5 + 10)},
    ),
    ("ASTModel", "ASTConfig", SMALL | {"num_mel_bins": 32, "max_length": 48}, {"input_values": (2, 48, 32)}),
    ("CLIPModel", "CLIPConfig", TOWERS, {"input_ids": (2, 16), "pixel_values": (2, 3, 32, 32)}),
    (  # the text would have to hold a placeholder per image patch
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
        },
        {"input_ids": (2, 16)},
    ),
]


def build(name: str, config: str, fields: dict) -> nn.Module:
    return getattr(transformers, name)(getattr(transformers, config)(**fields)).eval()


class Plain(nn.Module):
    def forward(self, x, scale=1.0):
        return x * scale


class Open(nn.Module):
    config: Any = None

    def forward(self, input_ids, attention_mask=None, use_cache=None, past_key_values=None, **kwargs):
        return input_ids


class Config:
    def __init__(self, **fields):
        vars(self).update(fields)


def test_every_accepted_form():
    x, y = torch.ones(2), torch.zeros(2)
    assert I.normalise(x).args == (x,) and I.normalise(x).kwargs == {}
    assert I.normalise((x, y)).args == I.normalise([x, y]).args == (x, y)
    for mapping in (dict, collections.UserDict, transformers.BatchEncoding):
        assert I.normalise(mapping({"x": x})).kwargs == {"x": x}
    inputs = I.Inputs(x, y=y)
    assert I.normalise(inputs) is inputs and (inputs.args, inputs.kwargs) == ((x,), {"y": y})
    with pytest.raises(AttributeError):
        inputs.args = ()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("example", [None, 3, "text", {1: torch.ones(1)}, {torch.ones(1)}])
def test_other_forms_are_refused_with_the_accepted_ones(example):
    with pytest.raises(InputError, match=r"a tensor, a tuple .* a mapping .* autotp.Inputs"):
        I.normalise(example)


@pytest.mark.parametrize(("name", "config", "fields", "shapes"), MODELS, ids=lambda v: v if isinstance(v, str) else "")
def test_made_inputs_run(name, config, fields, shapes):
    model = build(name, config, fields)
    made = I.for_model(model)
    assert made is not None and not made.args
    assert {key: tuple(value.shape) for key, value in made.kwargs.items()} == shapes
    again = I.for_model(model)
    assert again is not None and all(torch.equal(value, again.kwargs[key]) for key, value in made.kwargs.items())
    inputs, _ = I.without_cache(model, made)
    I.bind(model.forward, inputs)
    with torch.no_grad():
        out = model(*inputs.args, **inputs.kwargs)
    assert out.get("past_key_values") is None
    assert all(v.isfinite().all() for v in out.values() if isinstance(v, torch.Tensor))


def test_made_ids_are_plain_words():
    # The whole vocabulary but 5 and 7 is special, in a list, a number and a sub-config.
    text = Config(mask_token_index=4, sep_token_id=6, model_type="s")
    config = Config(vocab_size=8, pad_token_id=0, eos_token_id=[1, 2, 3], bos_token_id=None, text_config=text)
    ids = I.MAKERS["input_ids"](config, torch.Generator().manual_seed(0))
    assert set(ids.flatten().tolist()) == {5, 7}


def test_made_inputs_have_the_models_dtype_and_a_real_device():
    with torch.device("meta"):
        model = build("ViTModel", "ViTConfig", VISION).to(torch.bfloat16)
    made = I.for_model(model)
    assert made is not None
    assert made.kwargs["pixel_values"].dtype == torch.bfloat16
    assert made.kwargs["pixel_values"].device == torch.device("cpu")


def test_no_inputs_are_made_where_nothing_says_which():
    assert I.for_model(Plain()) is None
    assert I.for_model(build("VideoMAEForPreTraining", "VideoMAEConfig", VISION)) is None  # it requires a mask


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (I.Inputs(), "missing a required argument: 'x'.*accepts .x, scale="),
        (I.Inputs(1, 2, 3), "too many positional arguments.*Given: 3 positional.*accepts .x, scale="),
        (I.Inputs(1, y=2), "unexpected keyword argument 'y'.*accepts .x, scale="),
        (I.Inputs(1, x=2), "multiple values for argument 'x'"),
    ],
)
def test_inputs_that_do_not_fit(inputs, words):
    with pytest.raises(InputError, match=words):
        I.bind(Plain().forward, inputs)


def test_a_misspelt_name_is_not_swallowed_by_kwargs():
    with pytest.raises(InputError, match="ignore the input 'atention_mask': did you mean 'attention_mask'"):
        I.bind(Open().forward, I.Inputs(1, atention_mask=2))
    assert I.bind(Open().forward, I.Inputs(1, token_type_ids=2)).arguments["kwargs"] == {"token_type_ids": 2}


class Further(TypedDict, total=False):
    attention_masks: int


class Saying(nn.Module):
    def forward(self, x: int, attention_mask: int = 0, **kwargs: Unpack[Further]) -> int:
        return x


def test_a_name_that_kwargs_say_is_not_taken_for_a_misspelt_one():
    assert I.bind(Saying().forward, I.Inputs(1, attention_masks=2)).arguments["kwargs"] == {"attention_masks": 2}
    with pytest.raises(InputError, match="did you mean 'attention_mask'"):
        I.bind(Saying().forward, I.Inputs(1, attention_maks=2))


def test_the_cache_is_switched_off_and_said():
    model = Open()
    plain = I.Inputs(1)
    assert I.without_cache(model, plain) == (plain, None)
    model.config = Config(use_cache=False)
    assert I.without_cache(model, plain) == (plain, None)
    model.config = Config(use_cache=True)
    off, note = I.without_cache(model, plain)
    assert (off.args, off.kwargs) == ((1,), {"use_cache": False})
    assert note == "captured without the key/value cache (config.use_cache=True)"
    said_off = I.Inputs(1, use_cache=False)
    assert I.without_cache(model, said_off) == (said_off, None)
    model.config = Config(text_config=Config(use_cache=True, model_type="t"))
    assert I.without_cache(model, plain)[0].kwargs == {"use_cache": False}


def test_a_cache_asked_for_by_the_inputs_is_switched_off_where_it_stood():
    off, note = I.without_cache(Open(), I.Inputs(1, None, True, None))
    assert (off.args, off.kwargs) == ((1, None, False, None), {}) and note and "use_cache=True was given" in note
    off, _ = I.without_cache(Open(), I.Inputs(1, use_cache=True))
    assert off.kwargs == {"use_cache": False}
    untouched = I.Inputs(torch.ones(1))
    assert I.without_cache(Plain(), untouched) == (untouched, None)


def test_a_model_that_takes_use_cache_through_kwargs():
    model = build(
        "GraniteMoeForCausalLM", "GraniteMoeConfig", TEXT | {"num_local_experts": 2, "num_experts_per_tok": 1}
    )
    made = I.for_model(model)
    assert made is not None
    with torch.no_grad():
        assert model(**made.kwargs).past_key_values is not None  # the control
        assert model(**I.without_cache(model, made)[0].kwargs).past_key_values is None


@pytest.mark.parametrize("name", ["past_key_values", "cache_params"])
def test_a_cache_passed_in_is_refused(name):
    with pytest.raises(InputError, match=f"{name}.*a cache .*tuple.*made for calls without"):
        I.without_cache(Open(), I.Inputs(1, **{name: ()}))
    assert I.without_cache(Open(), I.Inputs(1, **{name: None}))[1] is None
