"""The map says what transformers would load: checked against models that transformers loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import FAMILIES, make_tiny, tiny_config
from family_configs import SPECIFIC, WRAPPED
from moespeq.errors import CheckpointError, UnsupportedModelError
from moespeq.model import families
from moespeq.model.checkpoint_map import CheckpointMap, map_checkpoint
from moespeq.model.empty import empty_model
from moespeq.model.loading import load_config
from moespeq.model.tokenizer import Tokenizer
from moespeq.prepare.experts import ExpertReader
from moespeq.store import open_checkpoint
from moespeq.types import ExpertKey

SINGLE_FILE = "1GB"
TOP_K_NAMES = {
    "dbrx": "moe_top_k",
    "ernie4_5_moe": "moe_k",
    "gemma4": "top_k_experts",
    "gemma4_text": "top_k_experts",
    "hunyuan_v1_moe": "moe_topk",
    "kimi_linear": "num_experts_per_token",
}


def read_map(folder: Path) -> CheckpointMap:
    return map_checkpoint(open_checkpoint(folder))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def assert_reads_what_transformers_loads(folder: Path) -> CheckpointMap:
    model = type(empty_model(load_config(folder))).from_pretrained(folder, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(folder)
    mapped = map_checkpoint(checkpoint)
    reader = ExpertReader(checkpoint, mapped.pieces, mapped.matrices)
    for layer, name in enumerate(mapped.module_names):
        module = model.get_submodule(name)
        for expert in range(mapped.num_experts):
            loaded = loaded_matrices(module, expert)
            for ours, theirs in zip(reader.read(ExpertKey(layer, expert)), loaded, strict=True):
                assert torch.equal(ours, theirs), (name, expert)
    return mapped


def loaded_matrices(module: torch.nn.Module, expert: int) -> list[torch.Tensor]:
    """Up and down [out, in] of an experts module of transformers."""
    if hasattr(module, "mlp"):  # Dbrx stacks the rows of all experts
        stacked = [module.mlp.w1, module.mlp.v1, module.mlp.w2]
        gate, up, down = (rows.view(module.num_experts, -1, rows.shape[1])[expert] for rows in stacked)
        return [torch.cat([gate, up]), down.T]
    up = module.gate_up_proj if getattr(module, "has_gate", True) else module.up_proj
    loaded = [up[expert], module.down_proj[expert]]
    is_transposed = getattr(module, "is_transposed", "Llama4" in type(module).__name__)  # which does not say so
    return [matrix.T for matrix in loaded] if is_transposed else loaded


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return make_tiny("qwen3_moe", tmp_path / "qwen", shard_size=SINGLE_FILE)


def test_the_tiny_models_cover_every_supported_family() -> None:
    proven = {tiny_config(family).get_text_config().model_type for family in FAMILIES}
    assert proven == {name for name in families.FAMILIES if name not in WRAPPED}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_is_what_transformers_loads(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family, seed=3)
    mapped = assert_reads_what_transformers_loads(folder)
    text = {**SPECIFIC, **WRAPPED}[family]
    text = {**text, **text.get("ffn_config", {})}
    assert mapped.model_type in (family, f"{family}_text")
    assert mapped.top_k == text[TOP_K_NAMES.get(family, "num_experts_per_tok")]
    assert [name for name, _, _ in mapped.matrices] == ["up" if family == "nemotron_h" else "gate_up", "down"]
    assert len(mapped.module_names) >= 2
    tensors, names = open_checkpoint(folder).tensors, {piece.tensor for piece in mapped.pieces}
    assert names.isdisjoint(mapped.dense)
    assert names | set(mapped.dense) == set(tensors)
    first = [piece.tensor for piece in mapped.pieces if (piece.layer, piece.expert) == (0, 0)]
    assert len({tensors[name].file for name in first}) > 1


def test_biases_of_experts_are_dense(tmp_path: Path) -> None:
    mapped = read_map(make_tiny("gpt_oss", tmp_path / "m"))
    assert "model.layers.0.mlp.experts.gate_up_proj_bias" in mapped.dense
    assert {piece.tensor.rsplit(".", 1)[1] for piece in mapped.pieces} == {"gate_up_proj", "down_proj"}


def test_a_fused_checkpoint_of_a_per_expert_family_is_read(qwen: Path) -> None:
    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = {
                kind: torch.stack([tensors.pop(f"{prefix}.{e}.{kind}_proj.weight") for e in range(16)])
                for kind in ("gate", "up", "down")
            }
            tensors[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
            tensors[f"{prefix}.down_proj"] = parts["down"]

    before = read_map(qwen)
    rewrite(qwen, fuse)
    mapped = assert_reads_what_transformers_loads(qwen)
    assert mapped.matrices == before.matrices
    assert {piece.index for piece in mapped.pieces} == set(range(16))


def test_layers_of_kimi_are_read_by_the_names_of_its_own_checkpoints(tmp_path: Path) -> None:
    """transformers saves them as blocks, a name that only its images' layers have on the hub."""
    folder = make_tiny("kimi_k25", tmp_path / "m", shard_size=SINGLE_FILE)
    saved = read_map(folder)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("language_model.model.blocks.")]:
            tensors[name.replace(".blocks.", ".layers.")] = tensors.pop(name)

    rewrite(folder, rename)
    mapped = assert_reads_what_transformers_loads(folder)
    assert {piece.tensor for piece in mapped.pieces}.isdisjoint(piece.tensor for piece in saved.pieces)
    assert mapped.module_names == saved.module_names


def test_fused_and_single_tensors_of_one_layer_are_refused(qwen: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(qwen, lambda tensors: tensors.update({name: torch.zeros(16, 64, 48, dtype=torch.bfloat16)}))
    with pytest.raises(CheckpointError, match="Both fused and single"):
        read_map(qwen)


def test_a_multi_token_prediction_layer_is_dense_though_it_looks_like_experts(tmp_path: Path) -> None:
    folder = make_tiny("deepseek_v3", tmp_path / "m", shard_size=SINGLE_FILE)
    before = read_map(folder)
    extra = "model.layers.4.mlp.experts.0.gate_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({extra: torch.ones(48, 64, dtype=torch.bfloat16)}))
    after = read_map(folder)
    assert extra in after.dense
    assert after.pieces == before.pieces


def test_layers_without_experts_are_not_counted(tmp_path: Path) -> None:
    mapped = read_map(make_tiny("qwen3_moe", tmp_path / "m", mlp_only_layers=[1]))
    assert mapped.module_names == ("model.layers.0.mlp.experts", "model.layers.2.mlp.experts")
    assert {piece.layer for piece in mapped.pieces} == {0, 1}


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("model.layers.1.mlp.experts.15.down_proj.weight", None, "does not hold expert 15 of model.layers.1"),
        ("model.layers.1.mlp.experts.15.up_proj.weight", None, "does not hold expert 15 of model.layers.1"),
        ("model.layers.1.mlp.experts.3.up_proj.weight", (40, 64), "fits no expert"),
        ("model.layers.1.mlp.experts.3.up_proj.weight", (48, 32), "fits no expert"),
        ("model.layers.1.mlp.experts.3.up_proj.weight", (48,), "fits no expert"),
        ("model.layers.1.mlp.experts.16.down_proj.weight", (64, 48), "more than config.json counts"),
    ],
)
def test_an_incomplete_or_misshapen_expert_is_named(
    qwen: Path, name: str, shape: tuple[int, ...] | None, says: str
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)

    rewrite(qwen, change)
    with pytest.raises(CheckpointError, match=says):
        read_map(qwen)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_tensor_that_is_not_there_is_missed(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family, shard_size=SINGLE_FILE)
    whole = load_file(folder / "model.safetensors")
    dense = [name for name in read_map(folder).dense if "vis" not in name and "projector" not in name]
    names = [name for name in dense if ".layers." not in name or ".layers.2." in name]
    assert len(names) >= 8
    for name in names:
        rest = {other: tensor for other, tensor in whole.items() if other != name}
        save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
        parts = r"model|transformer|lm_head|backbone|language_model|vision_tower|multi_modal_projector|mm_projector"
        with pytest.raises(CheckpointError, match=rf"lacks '({parts})\."):
            read_map(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.gate.weight", "model.norm.weight"]
)
def test_a_dense_tensor_of_another_shape_is_named_with_both_shapes(qwen: Path, name: str) -> None:
    rewrite(qwen, lambda tensors: tensors.update({name: torch.zeros(7, dtype=torch.bfloat16)}))
    with pytest.raises(CheckpointError, match=rf"{name}' has shape \[7\] and config\.json asks for \[.*64\]"):
        read_map(qwen)


def test_heads_that_do_not_fit_the_tensors_are_refused(qwen: Path) -> None:
    edit_config(qwen, num_attention_heads=3, num_key_value_heads=8)
    with pytest.raises(
        CheckpointError, match=r"q_proj\.weight' has shape \[64, 64\] and config\.json asks for \[48, 64\]"
    ):
        read_map(qwen)


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_embeddings_need_only_one_of_their_tensors(tmp_path: Path, kept: str) -> None:
    folder = make_tiny("qwen3_moe", tmp_path / "m", shard_size=SINGLE_FILE, tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: tensors.update({kept: tensors.pop(embedding)}))
    assert kept in read_map(folder).dense
    rewrite(folder, lambda tensors: tensors.pop(kept))
    with pytest.raises(CheckpointError, match=f"lacks '{embedding}'"):
        read_map(folder)


def test_a_top_k_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("deepseek_v3", tmp_path / "m")
    edit_config(folder, num_experts_per_tok=None)
    with pytest.raises(CheckpointError, match=r"to None of \d+ experts; num_experts_per_tok must be 1 to"):
        read_map(folder)


@pytest.mark.parametrize("top_k", [-1, 0, 17])
def test_a_top_k_that_no_router_can_choose_is_refused(qwen: Path, top_k: int) -> None:
    edit_config(qwen, num_experts_per_tok=top_k)
    with pytest.raises(CheckpointError, match=f"to {top_k} of 16 experts; num_experts_per_tok must be 1 to 16"):
        read_map(qwen)


def test_more_layers_than_tensors_are_refused_before_a_model_is_built(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moespeq.model.checkpoint_map.empty_model", lambda _: pytest.fail("a model was built"))
    edit_config(qwen, num_hidden_layers=10**6)
    with pytest.raises(CheckpointError, match="counts 1000000 layers and the checkpoint holds "):
        read_map(qwen)


@pytest.mark.parametrize(("dtype", "says"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")])
def test_the_map_says_what_experts_are_written_in(tmp_path: Path, dtype: torch.dtype, says: str) -> None:
    assert read_map(make_tiny("mixtral", tmp_path / "m", dtype=dtype)).dtypes == (says,) * 3


def test_a_layer_of_two_dtypes_is_refused(qwen: Path) -> None:
    name = "model.layers.1.mlp.experts.7.down_proj.weight"
    rewrite(qwen, lambda tensors: tensors.update({name: tensors[name].half()}))
    with pytest.raises(UnsupportedModelError, match=rf"{name}' is F16 and others of its layer are BF16"):
        read_map(qwen)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_a_quantised_checkpoint_is_refused_and_told_what_to_use(qwen: Path, method: str) -> None:
    edit_config(qwen, quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedModelError, match=rf"qwen3_moe.*\({method}\).*use the bf16 checkpoint"):
        read_map(qwen)


@pytest.mark.parametrize("end", ["qweight", "qzeros"])
def test_packed_weights_that_no_config_owns_up_to_are_refused(qwen: Path, end: str) -> None:
    name = f"model.layers.0.mlp.experts.0.gate_proj.{end}"
    rewrite(qwen, lambda tensors: tensors.update({name: torch.zeros(8, 8, dtype=torch.int32)}))
    with pytest.raises(UnsupportedModelError, match=rf"{end}'.*\(GPTQ or AWQ\).*use the bf16 checkpoint"):
        read_map(qwen)


def test_code_in_a_checkpoint_of_a_known_family_is_never_run(qwen: Path) -> None:
    ran = qwen / "ran"
    (qwen / "mine.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Mine: pass\n")
    auto_map = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine", "AutoTokenizer": ["mine.Mine", None]}
    edit_config(qwen, auto_map=auto_map)
    path = qwen / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map}))
    assert read_map(qwen).model_type == "qwen3_moe"
    assert Tokenizer.load(qwen) is not None
    assert type(load_config(qwen)).__module__.startswith("transformers.")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llama"}, "'llama' is dense"),
        (
            {"model_type": "jetmoe", "num_local_experts": 8},
            "Model type 'jetmoe' is not supported: its code computes experts by itself",
        ),
        (
            {"model_type": "llama", "num_local_experts": 8},
            "No test proves model type 'llama' yet as one with routed experts",
        ),
        ({"model_type": "mine", "auto_map": {"AutoModel": "x.py"}}, "'mine' runs code from its checkpoint"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_with_the_reason(qwen: Path, config: dict[str, Any], says: str) -> None:
    (qwen / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=rf"{says}.*info --families"):
        read_map(qwen)


def test_a_supported_family_without_any_experts_is_refused(qwen: Path) -> None:
    edit_config(qwen, mlp_only_layers=[0, 1, 2])
    with pytest.raises(UnsupportedModelError, match="no layer with routed experts"):
        read_map(qwen)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"model_type": "mixtral", "hidden_size": "wide"}'])
def test_a_damaged_config_is_a_checkpoint_error(qwen: Path, text: str) -> None:
    (qwen / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_map(qwen)


@pytest.mark.parametrize("values", [{"hidden_size": "wide"}, {"rope_parameters": 5}, {"layer_types": ["x"]}])
def test_a_field_of_the_wrong_type_is_named_in_one_line(qwen: Path, values: dict[str, Any]) -> None:
    edit_config(qwen, **values)
    with pytest.raises(CheckpointError, match=f"config.json .*{next(iter(values))}") as caught:
        read_map(qwen)
    assert "\n" not in str(caught.value)


def test_a_text_that_transformers_has_no_class_for_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("step3p7", tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(tiny_config("step3p7").text_config.to_dict()))
    with pytest.raises(UnsupportedModelError, match="'step3p5' only as a part of a model of images; use a checkpoint"):
        read_map(folder)


def test_a_missing_config_is_a_checkpoint_error(qwen: Path) -> None:
    (qwen / "config.json").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        read_map(qwen)
