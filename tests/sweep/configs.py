"""Small configurations of any model of transformers, made from the configuration's own fields.

Everything that is a width becomes 32, so that whatever is added fits: 4 heads of 8, inner layers of
48, two layers of each kind, images of 32 pixels, 61 tokens. Dropout is off.
"""

from __future__ import annotations

import re
from typing import Any

import transformers

WIDTH, INNER, HEADS, HEAD, LAYERS, POSITIONS, VOCABULARY = 32, 48, 4, 8, 2, 64, 61
IMAGE, MELS, LABELS = 32, 16, 3
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
FIRST_SPECIAL = 40  # ids of images and other marks start here; those of words end before

# A name's pattern -> a size; the first that fits counts. Numbers that are smaller stay.
COUNTS: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?$", VOCABULARY),
    (r"experts_per_tok(en)?$|^moe_k$|top_k_experts|moe_topk$|num_selected", 2),
    (r"n_shared_experts$|num_shared_experts$|first_k_dense_replace", 1),
    (r"n_group$|topk_group$|num_expert_group$", 1),
    (r"num_(local_|routed_)?experts$|n_routed_experts$|moe_num_experts$", 4),
    (r"^(num_|n_)?((hidden|encoder|decoder|text|vision|audio|attention)_)*layers?$", LAYERS),
    (r"feat_extract_layers$|adapter_layers$", 99),
    (r"layers?$|^depth$|_depth$|num_hidden_groups|^num_blocks$|num_encoder_blocks", LAYERS),
    (r"max_(source_|target_|2d_)?position|^n_positions$|^n_ctx$|max_seq|max_pos_emb", POSITIONS),
    (r"max_(source|target)_positions|max_length$|context_length$|model_max_length", POSITIONS),
    (r"^image_size$|^img_size$|^input_size$|^pretrain_image_size$", IMAGE),
    (r"num_mel_bins$|^mel_dim$|^n_mels$", MELS),
    (r"sliding_window(_size)?$|attention_window$|local_attention$|^block_size$", 4),
    (r"attention_chunk_size$|mamba_chunk_size$|^chunk_size$|max_span_length$", 4),
    (r"num_(codevectors_per_group|negatives)$", 6),
    (r"num_(queries|query_tokens|denoising|proposals)$|(num|n)_latents(_2d)?$", 6),
    (r"relative_attention_num_buckets$|num_buckets$", 8),
    (r"max_distance$", 10),
    (r"index_topk$", 4),
    (r"num_parallel_samples$", 2),
    (r"^context_size$", 8),
    (r"hash_byte_group_vocab$", VOCABULARY),
    (r"zero_expert_num$|(^|_)n_?groups$", 2),
    (r"self_attends_per_block$", LAYERS),
    (r"^n_window(_infer)?$", 8),
    (r"mm_tokens_per_image$|^num_windows$", 4),
    (r"^index_kpool$", 2),
)  # fmt: skip
WIDTHS: tuple[tuple[str, int], ...] = (
    (r"mamba_(d_head|head_dim)$", 16),
    (r"(^|_)(head_dim|d_kv|d_head|dim_head|kv_channels|key_dim|head_size)$", HEAD),
    (r"attention_head_dim$|(qk_nope|qk_rope|v|qk)_head_dim$|linear_(key|value)?_?head_dim$", HEAD),
    (r"lora_rank$|compressed?_dim$", 16),
    (r"(^|_)rotary_dim$", 4),
    (r"(num_|n_|^)(attention_|key_value_|kv_|mel_attn_)?heads?$|attention_heads$|_heads$", HEADS),
    (r"multi_query_group_num$", HEADS),
    (r"^upsample_groups$|^d_latents$", WIDTH),
    (r"(ffn|feed_?forward|intermediate|inner|mlp)_?(hidden_)?(dim|size)|^d_ff$|^dff$", INNER),
    (r"^n_inner$|^d_inner$|dim_(ff|feedforward)$|intermediate", INNER),
    (r"^patch_size$", 8),
    (r"^window_size$", 4),
    (r"(state_size|d_state|time_step_rank|dt_rank|ssm_state)$", 4),
    (r"num_conv_pos_embeddings$", 8),
    (r"num_conv_pos_embedding_groups$", 4),
    (r"hidden_size|hidden_dim$|d_model|n_embd|emb(ed(ding)?)?_dim|embedding_size", WIDTH),
    (r"^dim$|model_dim$|projection_dim$|project_dim$|proj_dim$|proj_size$|output_dim$", WIDTH),
    (r"width$|pooler_output_size|d_cross|kv_dim", WIDTH),
    (r"codevector_dim$|xvector_output_dim|hidden_channels$|output_channels$|feature_size$", WIDTH),
)  # fmt: skip
# Fields that some configurations leave out though their models need them.
NEEDED: dict[str, int] = {
    "vocab_size": VOCABULARY, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "prediction_length": 4, "n_shared_experts": 1,
    "head_dim": HEAD, "num_key_value_heads": HEADS, "image_token_id": VOCABULARY - 2,
    "image_token_index": VOCABULARY - 2, "audio_token_id": VOCABULARY - 3,
}  # fmt: skip

# Lists, one number for each stage of a pyramid.
STAGES: dict[str, tuple[int, ...]] = {
    "depths": (2, 1, 1, 1),
    "hidden_sizes": (16, 32, 48, 64),
    "neck_hidden_sizes": (16, 32, 48, 64),
    "num_heads": (2, 2, 2, 2),
    "num_attention_heads": (2, 2, 2, 2),
    "embed_dims": (16, 32, 48, 64),
    "tdnn_dim": (16, 16, 16, 16, 32),
    "blocks_per_stage": (1, 1, 2, 1),
}
# Fields that name layers by number.
INDICES = re.compile(
    r"(index(es)?|indices|idxs|layer_ids|cross_attention_layers|_block_indexes|"
    r"vision_feature_layers?)$"
)
# Fields that name layers by number and must keep as many entries as they have.
COUNTED = re.compile(r"out_indices|hook_ids|state_indices|extract_layers|target_layers")

_MAMBA = "mamba" if transformers.__version__ < "5" else "linear_attention"
# Layers that share their weights: the same one twice.
_SHARED: dict[str, Any] = {
    "layers_block_type": [_MAMBA, "hybrid"] * 2, "num_hidden_layers": 4,
    "attention_hidden_size": 64,
}  # fmt: skip
# Image and window sizes such that windows divide the image at every stage.
_PYRAMID: dict[str, Any] = {"image_size": 2 * IMAGE, "window_size": 2}
# Fields by model_type that the rules above get wrong.
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "align_vision_model": {"width_coefficient": 0.2, "depth_coefficient": 0.2},
    "mpnet": {"relative_attention_num_buckets": 32},  # the number that its forward takes
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "big_bird": {"attention_type": "original_full"},  # the one that a decoder may have
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},  # else one expert, and no choice
    "mamba2": {"head_dim": 16, "n_groups": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mistral4": {"head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
    },
    "jamba": {"use_mamba_kernels": False},
    "zamba": _SHARED | {"attention_head_dim": 16, "use_mamba_kernels": False},
    "zamba2": _SHARED | {"attention_head_dim": 16, "kv_channels": 16, "hybrid_layer_ids": [1, 3]},
    "glm4v_moe_text": {"head_dim": 16},
    "align": {"projection_dim": 64},
    "bridgetower": {"hidden_size": 64},
    "bridgetower_text_model": {"hidden_size": 64},
    "bridgetower_vision_model": {"hidden_size": 64},  # 64 for each head
    "chameleon": {
        "vocabulary_map": {
            "<image>": VOCABULARY - 2,
            **{f"IMGIMG{'ABCDEFGH'[i]}Z": 48 + i for i in range(8)},
        }
    },
    "clap_audio_model": {"spec_size": 64, "num_mel_bins": 32, "window_size": 2},
    "chameleon_vqgan": {"num_embeddings": 8},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "donut-swin": _PYRAMID,
    "swin": _PYRAMID,
    "swinv2": _PYRAMID | {"pretrained_window_sizes": [0, 0, 0, 0]},
    "efficientloftr": {"hidden_size": 256},  # of its last feature map
    "efficientnet": {"width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 256},
    "glmasr_encoder": {"intermediate_size": 4 * WIDTH},
    "glpn": {"decoder_hidden_size": 64},
    "mobilevitv2": {"image_size": 64},
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "embed_dim_per_stage": [16, 32, 48, 64],
        "num_attention_heads_per_stage": [1, 2, 2, 2],
    },
    "sam2_vision_model": {"backbone_channel_list": [64, 48, 32, 16]},
    "seggpt": {
        "merge_index": 0,
        "num_hidden_layers": 5,
        "intermediate_hidden_state_indices": [1, 2, 3, 4],
    },
    "vitmatte": {"convstream_hidden_sizes": [16, 32, 48], "fusion_hidden_sizes": [64, 32, 16, 8]},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        }
    },
}


def small(config: Any, level: int = 0) -> Any:
    """The configuration with its sizes made small, and those inside it.

    level: 0 for all rules; 1 without those of lists; 2 without those of widths either.
    """
    cls = type(config)
    held = config.to_dict()
    try:
        standard = cls().to_dict()
    except Exception:
        standard = {}
    derived = {"model_type", "transformers_version", "stage_names", "architectures", "id2label",
               "label2id", "out_features", "out_indices", "_out_features", "_out_indices",
               "num_attention_heads_per_layer"}  # fmt: skip
    changes = {k: v for k, v in held.items() if k not in derived and standard.get(k) != v}
    changes |= _numbers(held, level)
    changes |= _lists({k: v for k, v in held.items() if k not in derived}, level)
    changes |= _stages(held)
    mapped = getattr(config, "attribute_map", None) or {}
    changes = {k: v for k, v in changes.items() if mapped.get(k) not in changes}
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and part.model_type == "timm_backbone":  # any will do
            changes[name] = _resnet(len(part.out_indices or [4]))
        elif part is not None and hasattr(part, "to_dict"):
            changes[name] = small(part, level).to_dict()
    changes |= OWN.get(config.model_type, {})
    made = cls(**changes)
    if any(k.endswith("vocab_size") or k in ("text_config", "decoder") for k in held):
        for key, value in TOKENS.items():
            setattr(made, key, value)
    return made


def _resnet(maps: int) -> dict[str, Any]:
    """A small ResNet configuration that returns this many feature maps."""
    return {
        "model_type": "resnet", "embedding_size": 16, "hidden_sizes": list(STAGES["hidden_sizes"]),
        "depths": [1, 1, 1, 1], "layer_type": "basic",
        "out_features": [f"stage{i}" for i in range(5 - min(maps, 4), 5)],
    }  # fmt: skip


def _numbers(held: dict[str, Any], level: int) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    special = FIRST_SPECIAL
    shared, heads = held.get("num_key_value_heads"), held.get("num_attention_heads")
    for key, value in sorted(held.items()):
        if re.search(r"drop|mask_(time|feature)_prob|jitter", key) and _number(value):
            if not (isinstance(value, int) and value > 1):
                changes[key] = type(value)(0)
        elif key in ("apply_spec_augment", "use_cache", "output_router_logits"):
            changes[key] = False
        elif key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            turned = re.search(r"vl|omni|glm\d*v|ocr", held.get("model_type", ""))
            if level < 2 and ("mrope_section" in value or turned):
                changes[key] = {**value, "mrope_section": [2, 1, 1]}
            elif level < 2 and not value and held.get("layer_types"):
                rope = {"rope_type": "default", "rope_theta": 10000.0}
                changes[key] = dict.fromkeys(held["layer_types"], rope)
        elif value is None and key in NEEDED and level < 2:
            changes[key] = NEEDED[key]
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif re.search(r"_?(token|tok|mask|pad|sep|cls|eo[sdicav]|bo[sica])_?(id|index)$", key):
            if key in TOKENS:
                changes[key] = TOKENS[key]
            elif value >= FIRST_SPECIAL or re.search(r"image|video|audio|vision|media", key):
                changes[key], special = special, min(special + 1, VOCABULARY - 1)
        elif key == "num_encoder_blocks" and value == len(held.get("depths") or ()):
            continue
        else:
            rules = COUNTS if level == 2 else COUNTS + WIDTHS
            found = next((size for rule, size in rules if re.search(rule, key)), None)
            if found is not None and value > found:
                changes[key] = found
    if level < 2 and {"qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"} <= held.keys():
        parts = (changes.get(k, held[k]) for k in ("qk_nope_head_dim", "qk_rope_head_dim"))
        changes["qk_head_dim"] = sum(n or 0 for n in parts)
    if level < 2 and {"window_size", "spatial_merge_size", "patch_size"} <= held.keys():
        changes["window_size"] = 4 * changes.get("patch_size", held["patch_size"])  # in pixels
    if level < 2 and isinstance(shared, int) and isinstance(heads, int) and shared < heads:
        latent = "kv_lora_rank" in held  # where heads share one latent, none share a key
        changes["num_key_value_heads"] = HEADS if latent else min(2, shared)
    return changes


def _stages(held: dict[str, Any]) -> dict[str, Any]:
    """Changes for a backbone: as many layers as stages are read where its layers are its stages;
    for any other the stages that are read."""
    read, names = held.get("out_features") or [], held.get("stage_names") or []
    if len(read) < 2:
        return {}
    for key in ("num_hidden_layers", "depth"):
        if held.get(key) == len(names) - 1:
            count = max(LAYERS, len(read))
            return {key: count, "out_features": [f"stage{i + 1}" for i in range(len(read))]}
    return {"out_features": list(read)}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _lists(held: dict[str, Any], level: int) -> dict[str, Any]:
    """Lists of a number for each layer keep one of every kind; lists of stages become narrow."""
    found: dict[str, Any] = {}
    count = next((held[k] for k in ("num_hidden_layers", "n_layer", "num_layers", "depth")
                  if isinstance(held.get(k), int)), None)  # fmt: skip
    lists = {k: list(v) for k, v in held.items() if isinstance(v, (list, tuple))}
    by_layer = {k: v for k, v in lists.items() if len(v) == count and len(v) > 1}
    by_layer = {k: v for k, v in by_layer.items() if k not in STAGES}
    if by_layer:
        rows = list(zip(*by_layer.values(), strict=True))
        chosen = [i for i, row in enumerate(rows) if row not in rows[:i]][:6]
        chosen = chosen if len(chosen) > 1 else [0, 1]
        found |= {k: [v[i] for i in chosen] for k, v in by_layer.items()}
        for key in ("num_hidden_layers", "n_layer", "num_layers", "depth"):
            if key in held and isinstance(held[key], int):
                found[key] = len(chosen)
    for key, value in lists.items():
        if key in found or level == 2:
            continue
        if COUNTED.search(key) and len(value) > 1 and all(isinstance(v, int) for v in value):
            found[key] = list(range(len(value)))
            found |= {k: max(LAYERS, len(value)) for k in ("num_hidden_layers", "depth")
                      if k in held}  # fmt: skip
        elif INDICES.search(key) and value and all(isinstance(v, int) for v in value):
            found[key] = [0, 1][-min(len(value), 2) :]
        elif key == "image_grid_pinpoints":
            found[key] = [[IMAGE, IMAGE]]
        elif key == "image_size":
            found[key] = [IMAGE] * len(value)
        elif key == "conv_dim":
            found[key] = [16] * len(value)
        elif level == 0 and key in STAGES and len(value) <= len(STAGES[key]):
            if all(isinstance(v, int) for v in value):
                found[key] = list(STAGES[key][: len(value)])
        elif "drop" in key and all(isinstance(v, float) for v in value):
            found[key] = [0.0] * len(value)
    return found
