"""Small random models of the transformers library, made from their config classes alone."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

# What a field becomes where the config's default is larger. Eight heads of 8, four kv heads: tp 2 and 4 divide both.
COUNTS: dict[int, str] = {
    1: "n_group topk_group n_groups first_k_dense_replace num_shared_experts n_shared_experts",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers num_blocks "
    "depth num_decoder_layers encoder_num_layers decoder_num_layers encoder_num_hidden_layers "
    "decoder_num_hidden_layers num_experts_per_tok top_k moe_topk moe_k moe_top_k num_selected_experts experts_top_k "
    "num_experts_per_token "
    "num_conv_pos_embedding_groups num_latents num_hidden_groups n_codebook_layers num_self_attends_per_block",
    4: "num_key_value_heads num_kv_heads multi_query_group_num num_experts num_local_experts n_routed_experts "
    "moe_num_experts num_routed_experts encoder_num_key_value_heads decoder_num_key_value_heads "
    "cross_num_key_value_heads linear_num_key_heads",
    8: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads mamba_n_heads "
    "encoder_num_attention_heads decoder_num_attention_heads cross_num_attention_heads mamba_num_heads index_n_heads "
    "linear_num_value_heads num_queries num_labels patch_size",
    16: "num_mel_bins sliding_window attention_window max_length num_conv_pos_embeddings num_audio_channels index_topk "
    "mamba_chunk_size chunk_size",
    32: "image_size crop_size",
}
# The same for widths, which `scale` multiplies.
WIDTHS: dict[int, str] = {
    4: "rotary_dim",
    8: "head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim attention_head_dim global_head_dim mamba_head_dim "
    "linear_key_head_dim linear_value_head_dim index_head_dim qk_head_dim mamba_d_head",
    16: "kv_lora_rank q_lora_rank state_size mamba_d_state ssm_state_size",
    64: "hidden_size d_model n_embd dim embed_dim d_embed projection_dim embedding_size decoder_hidden_size "
    "encoder_hidden_size word_embed_proj_dim moe_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size max_position_embeddings n_positions max_source_positions d_latents "
    "max_target_positions cross_hidden_size lru_width qformer_hidden_size out_hidden_size output_dim hidden_dim "
    "encoder_dim emb_dim spk_embed_dim text_embed_dim vision_embed_dim vision_hidden_size audio_hidden_size "
    "expert_ffn_hidden_size",
    128: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim mlp_dim ffn_hidden_size d_inner "
    "decoder_intermediate_size encoder_intermediate_size feed_forward_size dense_intermediate_size block_ff_dim "
    "ffn_intermediate_size dim_feedforward",
    256: "vocab_size text_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input audio_vocab_size "
    "image_vocab_size entity_vocab_size codebook_size shape_vocab_size pronunciation_vocab_size",
}
SIZES, SCALED = ({name: size for size, names in x.items() for name in names.split()} for x in (COUNTS, WIDTHS))
# The same for a field that lists a size for each stage.
STAGES: dict[str, list[int]] = {
    **dict.fromkeys(["hidden_sizes", "embed_dims", "embed_dim", "neck_hidden_sizes"], [32, *[64] * 15]),
    **dict.fromkeys(["depths", "depth", "layers", "num_blocks"], [1] * 16),
    **dict.fromkeys(["num_heads", "num_attention_heads", "num_key_value_heads"], [4, *[8] * 15]),
    **dict.fromkeys(["conv_dim"], [32] * 16),
}
SCALE = 16  # width 1024, vocabulary 4096
LIST = Path(__file__).resolve().parents[1] / "architectures.toml"
KINDS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "block_types",
)  # fields that list every layer's kind
GROUPED = {  # heads of keys and values, that are as many as all heads where the default has it so
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_heads",
    "encoder_num_key_value_heads": "encoder_num_attention_heads",
    "decoder_num_key_value_heads": "decoder_num_attention_heads",
}
TOKENS = ("_token_id", "_token_ids", "_token_index")


@dataclass(frozen=True)
class Architecture:
    """A line of the list.

    Attributes:
        name: model type, in transformers' words. family: heading of the table that it is shown in.
        mapping: transformers' table of classes, such as "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES".
        overrides: config fields that differ from the sizes below.
    """

    name: str
    family: str
    mapping: str
    overrides: Mapping[str, Any] = field(default_factory=dict)


def architectures() -> list[Architecture]:
    """The list, in the order of its file."""
    listed = tomllib.loads(LIST.read_text())
    sizes = listed["sizes"]
    return [
        Architecture(name, group["family"], group["classes"], sizes.get(name, {}))
        for group in listed["group"]
        for name in group["types"].split()
    ]


def small(cls: Any, overrides: Mapping[str, Any] | None = None, scale: int = 1) -> Any:
    """A config of class `cls` with the sizes of `COUNTS` and `WIDTHS`, its sub-configs too.

    Args:
        cls: a config class of transformers.
        overrides: fields that win over these; a mapping for a sub-config's.
        scale: times which widths, vocabulary and positions are larger, those of `overrides` too.
    """
    overrides = {k: v * scale if k in SCALED and isinstance(v, int) else v for k, v in (overrides or {}).items()}
    given = {
        k: small(sub, overrides.pop(k, {}), scale) for k, sub in _parts(cls).items() if overrides.get(k, 0) is not None
    }
    large, renamed = cls(**given), getattr(cls, "attribute_map", {})
    fields = {
        k: vars(large)[renamed.get(k, k)] for k in _declared(cls) if k not in given and renamed.get(k, k) in vars(large)
    }
    sizes = SIZES | {k: v * scale for k, v in SCALED.items()}
    chosen = {
        k: sizes[k] for k, v in fields.items() if k in sizes and type(v) is int and (v > sizes[k] or "heads" in k)
    }
    chosen |= {k: chosen[h] for k, h in GROUPED.items() if k in chosen and fields[k] == fields.get(h)}
    chosen |= {k: STAGES[k][: len(v)] for k, v in fields.items() if k in STAGES and isinstance(v, (list, tuple))}
    chosen |= _kinds(fields, overrides)
    chosen |= _tokens(fields, {**fields, **chosen, **overrides}.get("vocab_size"))
    return cls(**{**chosen, **given, **overrides})


def _parts(cls: Any) -> dict[str, type]:
    """The classes of a config's sub-configs; where it names none (`AutoConfig`), those of its defaults."""
    named = getattr(cls, "sub_configs", {})
    parts = {name: sub for name, sub in named.items() if hasattr(sub, "model_type")}
    defaults = vars(cls()) if len(parts) < len(named) else {}
    return parts | {k: type(v) for k, v in defaults.items() if k in named and k not in parts and v is not None}


def _declared(cls: type) -> list[str]:
    """Names of the fields that a config class takes."""
    names = [f.name for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else []
    names += [p.name for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def _kinds(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Every kind of layer once, at least two layers, where the config lists a kind for each layer."""
    lists = {k: list(dict.fromkeys(fields[k])) for k in KINDS if isinstance(fields.get(k), (list, tuple))}
    lists = {k: v for k, v in lists.items() if len(v) > 1}
    if not lists or overrides.keys() & {"num_hidden_layers", *KINDS}:
        return {}
    count = max(map(len, lists.values()))
    return {"num_hidden_layers": count, **{k: [v[i % len(v)] for i in range(count)] for k, v in lists.items()}}


def _tokens(fields: Mapping[str, Any], vocabulary: Any) -> dict[str, int]:
    """Token numbers that a small vocabulary lacks: the last ones it has."""
    last = vocabulary if isinstance(vocabulary, int) else SCALED["vocab_size"]
    names = [k for k, v in fields.items() if k.endswith(TOKENS) and type(v) is int and v >= last]
    return {name: last - 1 - i for i, name in enumerate(names)}


def redraw(model: nn.Module) -> nn.Module:
    """Noise on every weight: an initialisation of zeros and ones hides what is forgotten or counted twice."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=draw).to(tensor.dtype))
        kept = model.state_dict().keys()
        for name, tensor in model.named_buffers():
            if name in kept and tensor.is_floating_point():  # running statistics: a variance stays positive
                tensor.add_(0.1 * torch.rand(tensor.shape, generator=draw).to(tensor.dtype))
    return model


def model_class(mapping: str, kind: str) -> Any:
    """The class that transformers' table `mapping` names for a model type; None where this version has none."""
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    name = getattr(tables, mapping, {}).get(kind)
    name = name[0] if isinstance(name, (list, tuple)) else name
    return getattr(importlib.import_module("transformers"), name, None) if name else None


def build(architecture: Architecture) -> nn.Module:
    """A small model with random weights, in eval mode.

    Raises:
        LookupError: the installed transformers has no such model.
    """
    cls = model_class(architecture.mapping, architecture.name)
    if cls is None:
        raise LookupError(f"this transformers has no {architecture.name} in {architecture.mapping}")
    torch.manual_seed(0)
    return redraw(cls(small(cls.config_class, architecture.overrides))).eval()


def wide(architecture: Architecture) -> nn.Module:
    """The same model `SCALE` times as wide, in bfloat16, on the meta device: for plans, which need no weights."""
    cls = model_class(architecture.mapping, architecture.name)
    with torch.device("meta"):
        return cls(small(cls.config_class, architecture.overrides, SCALE)).to(torch.bfloat16).eval()
