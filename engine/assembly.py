"""Puts an engine together: the model, its memory, and the core that schedules it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from adapters.blob_store import BlobReader, open_reader
from engine.adapter_readers import NUM_READERS, Readers, reader_of
from engine.adapter_tiers import AdapterTiers
from engine.block_pool import BLOCK_SIZE, BlockPool
from engine.constraints import Grammars, make_grammars
from engine.host_memory import available_ram
from engine.loop import EngineLoop
from engine.memory import MemoryLimits, MemoryPlan, NotEnoughMemory, plan_memory
from engine.model.adapter_rehearsal import prepare_loads
from engine.model.loading import LoadedModel, load_model
from engine.rank_pages import RankPages
from engine.runner import Runner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.adapter_gate import AdapterGate
from engine.scheduler.placements import PLACEMENTS_PER_STEP
from engine.settings import EngineSettings
from engine.step_memory import measure_step_memory
from engine.transfer import lock_host_memory
from kernels.native import release_threads
from protos import engine_pb2 as pb

_MOST_RESERVED = 8 << 30
"""Bytes of host memory page-locked at the start: all that adapters may take by default. To lock far more
would take too long."""
_SPREAD_PROMPTS = {"cpu": 0, "cuda": 256}
"""See `SchedulerLimits`: on a CPU no token of a prompt is cheaper than another."""


@dataclass(frozen=True, slots=True)
class Core:
    """The engine's loop, not started yet, and what the server tells of."""

    loop: EngineLoop
    tiers: AdapterTiers
    store: BlobReader
    model_info: pb.ModelInfo
    tokenizer_files: Mapping[str, bytes]
    grammars: Grammars | None
    """None where answers cannot be held to a grammar."""


def assemble(settings: EngineSettings) -> Core:
    """Loads the model and allocates everything that the engine will ever hold on the device.

    Raises:
        ModelNotAvailable, NotEnoughMemory, OSError, ValueError: with one sentence that says what to change.
    """
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no usable GPU here; use --device cpu")
    limits = SchedulerLimits(
        settings.max_num_seqs,
        settings.step_tokens(device),
        settings.max_num_waiting,
        spread_prompts=_SPREAD_PROMPTS[device],
    )
    model = load_model(
        settings.model, dtype=settings.dtype, device=device, max_model_len=settings.max_model_len
    )
    memory = _plan_memory(settings, model, limits)
    host_bytes = settings.lora_host_bytes(device, available_ram())
    store = open_reader(settings.store, settings.store_cache, int(settings.store_cache_bytes))
    runner = _make_runner(settings, model, memory)
    _prepare(settings, model, runner, limits, host_bytes)
    release_threads()  # of this thread: from here on the loop's computes

    news = threading.Event()
    tiers = AdapterTiers(
        reader_of(model.network),
        fetch=store.reading,
        place=Readers(NUM_READERS).place,
        is_local=store.has_local,
        discard=store.discard,
        num_pages=memory.num_rank_pages,
        ends_bytes=memory.ends_bytes,
        host_bytes=host_bytes,
        wake=news.set,
    )
    pages = RankPages(memory.num_rank_pages, ends_bytes=memory.ends_bytes, in_host=tiers.has)
    gate = AdapterGate(
        pages,
        tiers,
        runner.write_adapter,
        runner.drop_adapter,
        placements_per_step=PLACEMENTS_PER_STEP[device],
    )
    pool = BlockPool(memory.num_blocks, enable_prefix_caching=settings.enable_prefix_caching)
    model_info = _model_info(settings, model, memory, limits.max_choices)
    return Core(
        loop=EngineLoop(
            Scheduler(limits, pool, gate), runner, gate, news, overlap=model.device.type == "cuda"
        ),
        tiers=tiers,
        store=store,
        model_info=model_info,
        tokenizer_files=model.tokenizer_files,
        grammars=make_grammars(model.tokenizer_files, model_info.vocab_size, model_info.eos_token_ids),
    )


def _prepare(
    settings: EngineSettings, model: LoadedModel, runner: Runner, limits: SchedulerLimits, host_bytes: int
) -> None:
    """Does beforehand, and in step with nobody, what the first requests and adapters would wait for."""
    most = {"max_num_seqs": limits.max_num_seqs, "max_num_batched_tokens": limits.max_num_batched_tokens}
    runner.warm_up(**most)
    if model.device.type != "cuda":
        return
    if not settings.enforce_eager:
        runner.capture_graphs(**most)
    lock_host_memory(model.device)
    prepare_loads(
        model.network,
        runner.write_adapter,
        host_bytes=min(host_bytes, _MOST_RESERVED),
        max_rank=settings.max_lora_rank,
    )


def _make_runner(settings: EngineSettings, model: LoadedModel, memory: MemoryPlan) -> Runner:
    try:
        return Runner(
            model,
            num_blocks=memory.num_blocks,
            num_rank_pages=memory.num_rank_pages,
            max_lora_rank=settings.max_lora_rank,
        )
    except RuntimeError as error:  # what torch raises on every device when there is no memory
        raise NotEnoughMemory(
            f"The device refuses {memory.num_blocks} KV blocks and {memory.num_rank_pages} rank pages "
            f"({str(error).splitlines()[0]}); lower --kv-cache-memory-bytes, --num-gpu-blocks-override or "
            "--lora-memory-bytes."
        ) from error


def _plan_memory(settings: EngineSettings, model: LoadedModel, limits: SchedulerLimits) -> MemoryPlan:
    step = None
    if model.device.type == "cuda":
        try:
            step = measure_step_memory(
                model,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_lora_rank=settings.max_lora_rank,
                has_graphs=not settings.enforce_eager,
            )
        except torch.OutOfMemoryError as error:
            raise NotEnoughMemory(
                f"Beside the weights the device has no room for a step of {limits.max_num_batched_tokens} "
                "tokens; lower --max-num-batched-tokens or --max-num-seqs."
            ) from error
    return plan_memory(
        model.config,
        model.dtype,
        model.device,
        MemoryLimits(
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
            num_gpu_blocks_override=settings.num_gpu_blocks_override,
            lora_memory_bytes=settings.lora_bytes(model.device.type),
            max_lora_rank=settings.max_lora_rank,
            step=step,
        ),
    )


def _model_info(
    settings: EngineSettings, model: LoadedModel, memory: MemoryPlan, max_choices: int
) -> pb.ModelInfo:
    config = model.config
    return pb.ModelInfo(
        name=settings.model_name,
        digest=model.digest,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        num_layers=config.num_layers,
        modules=[
            pb.LinearModule(name=name, in_features=wide_in, out_features=wide_out)
            for name, (wide_in, wide_out) in config.modules.items()
        ],
        eos_token_ids=config.eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=BLOCK_SIZE,
        num_blocks=memory.num_blocks,
        num_rank_pages=memory.num_rank_pages,
        max_lora_rank=settings.max_lora_rank,
        max_num_seqs=max_choices,
        engine_version=_version(),
        tied_embeddings=config.tie_word_embeddings,
        pooling=f"POOLING_{model.pooling.name}",
        hidden_size=config.hidden_size,
    )


def _version() -> str:
    try:
        return version("loraplex")
    except PackageNotFoundError:
        return "unknown"
