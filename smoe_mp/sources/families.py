"""How model families name and lay out their routed experts in safetensors checkpoints.  Data, no code.

Names alone do not say everything, and shapes say nothing: a stack of 8 x 64 x 64 may be transposed or not,
and gate and up may stand one behind the other or row by row in turn.  So what is known of each family is
written down here, taken from the model's own code in transformers (`conversion_mapping` and the modelling
file of the family), and goes with each tensor to the client as its tag.  A family that is not here is served
by the names that its tensors have in common with others, with the tag "unknown".

A tensor's name is

    PREFIX layers.N. MODULE experts.E. STORED SUFFIX        one tensor an expert
    PREFIX layers.N. MODULE STORED SUFFIX                   a stack: its first dimension is the expert

with any prefix ("model.", "language_model.model.", none) and any module ("mlp.", "block_sparse_moe.", none).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DENSE_SUFFIXES",
    "DRAFT_WORDS",
    "FAMILIES",
    "HIDDEN_KEYS",
    "LAYERS_KEYS",
    "ORDERED_SUFFIXES",
    "PACKED_SUFFIXES",
    "SCALED_DTYPES",
    "TEXT_CONFIG_KEYS",
    "TOP_K_KEYS",
    "UNKNOWN",
    "VOCAB_KEYS",
    "WIDTH_KEYS",
    "Family",
    "Key",
    "MoeLayers",
    "Projection",
]


@dataclass(frozen=True, slots=True)
class Key:
    """A key of config.json; `default` where the file does not have it."""

    name: str
    default: int


@dataclass(frozen=True, slots=True)
class MoeLayers:
    """Which of the layers 0 to `num_hidden_layers` - 1 have routed experts: those that pass all rules.

    `first`: layers below are dense.  `last`: layers above are dense; -1 is no bound.  `step`: only layers
    with (layer + `shift`) mod step == `remainder`.  `dense`: the key of a list of dense layers.  `kinds`:
    pairs of a key and a value; the first of these keys that holds a list (or a string of letters) of one
    kind a layer decides alone, and the layers of that kind are meant.
    """

    first: Key | None = None
    last: Key | None = None
    step: Key | None = None
    shift: int = 0
    remainder: Key | None = None
    dense: str = ""
    kinds: tuple[tuple[str, str | int], ...] = (("mlp_layer_types", "sparse"),)


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix of an expert: `stored` in the checkpoint, `name` for clients.

    `orientation`: "linear" (rows are outputs), "transposed" (rows are inputs) or "unknown".  `order`: where
    gate and up are one matrix, "concatenated" (all of gate, then all of up) or "interleaved" (gate, up, gate,
    up, ...), along the outputs.  `packed`: the orientation where it is stored in packed blocks, if another.
    """

    stored: str
    name: str
    orientation: str
    order: str = ""
    packed: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of the models with one of `model_types` in their config.json.

    `each`, `stacks`: the projections by storage.  `rows`: tensors elsewhere in the layer with one row an
    expert that is used with the expert.  `needs`: the sets of projections of which an expert has one in full.
    `experts`: keys of the number of routed experts a layer.
    """

    model_types: tuple[str, ...]
    each: tuple[Projection, ...]
    stacks: tuple[Projection, ...]
    layers: MoeLayers = MoeLayers()
    rows: tuple[Projection, ...] = ()
    needs: tuple[frozenset[str], ...] = (
        frozenset({"gate", "up", "down"}),
        frozenset({"gate_up", "down"}),
    )
    experts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


_PROJ = (
    Projection("gate_proj", "gate", "linear"),
    Projection("up_proj", "up", "linear"),
    Projection("down_proj", "down", "linear"),
)
_W = (
    Projection("w1", "gate", "linear"),
    Projection("w3", "up", "linear"),
    Projection("w2", "down", "linear"),
)
#: What transformers 5 itself holds and can save, and what MLX writes ("switch_mlp", "switch_glu").
_STACKS = (
    Projection("experts.gate_up_proj", "gate_up", "linear", "concatenated"),
    Projection("experts.gate_proj", "gate", "linear"),
    Projection("experts.up_proj", "up", "linear"),
    Projection("experts.down_proj", "down", "linear"),
    Projection("switch_mlp.gate_proj", "gate", "linear"),
    Projection("switch_mlp.up_proj", "up", "linear"),
    Projection("switch_mlp.down_proj", "down", "linear"),
    Projection("experts.switch_glu.gate_proj", "gate", "linear"),
    Projection("experts.switch_glu.up_proj", "up", "linear"),
    Projection("experts.switch_glu.down_proj", "down", "linear"),
)
_UNGATED = (
    Projection("up_proj", "up", "linear"),
    Projection("down_proj", "down", "linear"),
)
_FIRST_DENSE = Key("first_k_dense_replace", 0)

FAMILIES = (
    Family(
        ("qwen2_moe", "qwen3_moe", "qwen3_next"),
        _PROJ,
        _STACKS,
        MoeLayers(step=Key("decoder_sparse_step", 1), shift=1, dense="mlp_only_layers"),
    ),
    Family(("qwen3_5_moe", "qwen3_5_moe_text", "olmoe"), _PROJ, _STACKS),
    Family(
        # The code takes the stacks either way and tells by their shape which: that cannot be known.
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        _PROJ,
        (
            Projection("experts.gate_up_proj", "gate_up", "unknown"),
            Projection("experts.down_proj", "down", "unknown"),
        ),
        MoeLayers(step=Key("decoder_sparse_step", 1), shift=1, dense="mlp_only_layers"),
    ),
    Family(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"),
        _PROJ,
        _STACKS,
        MoeLayers(
            first=_FIRST_DENSE,
            step=Key("moe_layer_freq", 1),
            kinds=(("mlp_layer_types", "sparse"), ("moe_layer_freq", 1)),
        ),
    ),
    Family(
        ("glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm_moe_dsa", "dots1", "mistral4"),
        _PROJ,
        _STACKS,
        MoeLayers(first=_FIRST_DENSE),
    ),
    Family(
        ("ernie4_5_moe",),
        _PROJ,
        _STACKS,
        MoeLayers(
            first=Key("moe_layer_start_index", 0),
            last=Key("moe_layer_end_index", -1),
            step=Key("moe_layer_interval", 1),
            shift=1,
        ),
    ),
    Family(("mixtral", "minimax", "minimax_m2", "phimoe", "deepseek_v4"), _W, _STACKS),
    Family(
        ("jamba",),
        _PROJ,
        _STACKS,
        MoeLayers(step=Key("expert_layer_period", 2), remainder=Key("expert_layer_offset", 1)),
    ),
    Family(("lfm2_moe",), _W, _STACKS, MoeLayers(first=Key("num_dense_layers", 2))),
    Family(
        ("nemotron_h",),
        _UNGATED,
        tuple(p for p in _STACKS if p.name in ("up", "down")),
        MoeLayers(kinds=(("layers_block_type", "moe"), ("hybrid_override_pattern", "E"))),
        needs=(frozenset({"up", "down"}),),
    ),
    Family(
        ("granitemoe", "granitemoeshared", "granitemoehybrid"),
        (),
        (
            Projection("block_sparse_moe.input_linear", "gate_up", "linear", "concatenated"),
            Projection("block_sparse_moe.output_linear", "down", "linear"),
            *_STACKS,
        ),
        needs=(frozenset({"gate_up", "down"}),),
        experts=("num_local_experts", "num_experts"),
    ),
    Family(
        ("gemma4", "gemma4_text"),
        _PROJ,
        _STACKS,
        rows=(Projection("router.per_expert_scale", "router_scale", ""),),
    ),
    Family(
        ("gpt_oss",),
        (),
        (
            Projection("experts.gate_up_proj", "gate_up", "transposed", "interleaved", packed="linear"),
            Projection("experts.down_proj", "down", "transposed", packed="linear"),
        ),
        needs=(frozenset({"gate_up", "down"}),),
        experts=("num_local_experts", "num_experts"),
    ),
)


def _unknown(projections: tuple[Projection, ...]) -> tuple[Projection, ...]:
    return tuple(Projection(p.stored, p.name, "unknown") for p in projections)


#: For model types that are not listed: every name that a listed one has, and nothing known of the order.
UNKNOWN = Family(
    (),
    _unknown(_PROJ + _W),
    _unknown(
        (
            *_STACKS,
            Projection("block_sparse_moe.input_linear", "gate_up", "unknown"),
            Projection("block_sparse_moe.output_linear", "down", "unknown"),
        )
    ),
    MoeLayers(
        first=_FIRST_DENSE,
        step=Key("decoder_sparse_step", 1),
        shift=1,
        dense="mlp_only_layers",
        kinds=(("mlp_layer_types", "sparse"), ("layers_block_type", "moe"), ("moe_layer_freq", 1)),
    ),
    needs=(
        frozenset({"gate", "up", "down"}),
        frozenset({"gate_up", "down"}),
        frozenset({"up", "down"}),
    ),
)

#: Where the config.json of a model of several parts has the language model's own.
TEXT_CONFIG_KEYS = ("text_config", "language_config", "llm_config", "thinker_config")
#: Words in a prefix that belong to layers which only draft tokens.
DRAFT_WORDS = frozenset({"mtp", "nextn", "draft", "eagle"})
#: What a projection's own matrix is called behind its name; all else goes with it.
DENSE_SUFFIXES = frozenset({"", "weight"})
PACKED_SUFFIXES = frozenset({"blocks", "qweight", "weight_packed"})
#: What is in the same orientation as the matrix that it goes with.  What else a quantiser writes (GPTQ's and
#: AWQ's `qweight`, `qzeros`, `scales`, ...) has an order of its own.
ORDERED_SUFFIXES = DENSE_SUFFIXES | {"weight_scale_inv", "weight_scale", "scale_inv", "scale"}
#: Types that mean nothing without a scale.
SCALED_DTYPES = frozenset(
    {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4"}
)  # fmt: skip

LAYERS_KEYS = ("num_hidden_layers", "n_layers", "num_layers")
HIDDEN_KEYS = ("hidden_size",)
WIDTH_KEYS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
VOCAB_KEYS = ("vocab_size",)
TOP_K_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk", "num_experts_per_token")
