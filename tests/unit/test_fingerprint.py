"""What tells KV of different weights and configurations apart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from daric_rag.config import DaricConfig
from daric_rag.engine.fingerprint import adapter_fingerprint, root_fields, weights_fingerprint
from daric_rag.engine.keys import root_key
from tests.hub_cache import put_into_hub_cache
from tests.tiny_models import make_tiny_adapter, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("Llama", tmp_path_factory.mktemp("fingerprint") / "llama")


def root_of(path: Path, **engine_args: Any) -> str:
    """The root key of a real vLLM configuration."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = {"dtype": "bfloat16", "enforce_eager": True, **engine_args}
    vllm_config = AsyncEngineArgs(model=str(path), **arguments).create_engine_config()
    return root_key(root_fields(vllm_config, DaricConfig())).hex()


def test_all_that_changes_kv_changes_the_root(model: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    roots = [
        root_of(model),
        root_of(model, dtype="float32"),
        root_of(model, kv_cache_dtype="float16"),
        root_of(model, quantization="fp8_per_tensor"),
        root_of(model, quantization="fp8_per_block"),
        root_of(model, hf_overrides={"rope_parameters": rope}),
        root_of(model, hf_overrides={"attn_logit_softcapping": 30.0}),
        root_of(model, hf_overrides={"rms_norm_eps": 1e-3}),
        root_of(model, hf_overrides=_with_one_layer_less),
        root_of(model, load_format="dummy"),
    ]
    assert len(set(roots)) == len(roots)


def _with_one_layer_less(hf_config: Any) -> Any:
    hf_config.num_hidden_layers = 1
    return hf_config


def test_what_changes_nothing_leaves_the_root(model: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(model, tmp_path / "moved")
    config = moved / "config.json"
    config.write_text(config.read_text().replace('"transformers_version": "', '"transformers_version": "0'))
    for same in (root_of(moved), root_of(model, seed=5), root_of(model, max_model_len=512, max_num_seqs=3)):
        assert same == root_of(model)


def test_a_hub_id_is_found_as_vllms_own_download_leaves_it(model: Path, tmp_path: Path) -> None:
    put_into_hub_cache(model, tmp_path, "someone/model", absent=["pytorch_model.bin", "onnx/model.onnx"])
    found = weights_fingerprint("someone/model", None, str(tmp_path))
    assert found == weights_fingerprint(str(model))
    assert found == weights_fingerprint("someone/model", "main", str(tmp_path))
    with pytest.raises(ValueError, match=r"'someone/model' is no local path .* pass the path"):
        weights_fingerprint("someone/model", "other-branch", str(tmp_path))
    with pytest.raises(ValueError, match="'someone/model' is no local path"):
        weights_fingerprint("someone/model")


def test_fine_tunes_of_one_model_share_nothing(model: Path, tmp_path: Path) -> None:
    prints = [weights_fingerprint(str(model))]
    weights = load_file(model / "model.safetensors")
    assert (model / "model.safetensors").stat().st_size > 2**20
    # A fine-tune may change nothing but a few norms of some hundred bytes.
    for name in [name for name in weights if name.endswith("norm.weight")][:2]:
        tuned = shutil.copytree(model, tmp_path / name)
        save_file({**weights, name: weights[name] + 0.01}, tuned / "model.safetensors", {"format": "pt"})
        prints.append(weights_fingerprint(str(tuned)))
    assert len(set(prints)) == len(prints) == 3


def test_a_configuration_without_weights_identifies_nothing(model: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shutil.copy(model / "config.json", tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name}' has no weights .* pass the directory"):
            weights_fingerprint(str(tmp_path / name))


def test_adapters_differ_by_name_and_by_every_file(tmp_path: Path) -> None:
    first = str(make_tiny_adapter(tmp_path / "first", 1))
    same = str(make_tiny_adapter(tmp_path / "same", 1))
    other = str(make_tiny_adapter(tmp_path / "other", 2))
    assert adapter_fingerprint("a", first) == adapter_fingerprint("a", same)
    assert adapter_fingerprint("a", first) != adapter_fingerprint("b", first)
    assert adapter_fingerprint("a", first) != adapter_fingerprint("a", other)
    config = tmp_path / "same" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 8'))
    assert adapter_fingerprint("a", first) != adapter_fingerprint("a", same)


def test_an_adapter_is_found_as_vllm_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = make_tiny_adapter(tmp_path / "first", 1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for seed, name in enumerate(("someone/adapter", "someone/other"), start=1):
        put_into_hub_cache(make_tiny_adapter(tmp_path / f"a{seed}", seed), tmp_path / "hub", name)
    assert adapter_fingerprint("a", "someone/adapter") == adapter_fingerprint("a", str(local))
    assert adapter_fingerprint("a", "someone/adapter") != adapter_fingerprint("a", "someone/other")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert adapter_fingerprint("a", "~/first") == adapter_fingerprint("a", str(local))


@pytest.mark.parametrize("path", ["someone/absent", "no such thing", "/nowhere"])
def test_an_adapter_that_is_not_here_has_no_identity(path: str) -> None:
    with pytest.raises(ValueError, match="cannot be told"):
        adapter_fingerprint("a", path)
