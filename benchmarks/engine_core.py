"""What the engine's core costs beside the device: scheduling alone, and serving 256 live streams.

A fake device sleeps for the length of a step, without the interpreter's lock, as a GPU would. The same
sequences run offline (the loop's thread alone) and over a real link to a client in another process; the
difference of their step times is what gRPC, threads and the lock cost.

    python benchmarks/engine_core.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import grpc

from engine.__main__ import SWITCH_INTERVAL_S
from engine.adapter_tiers import AdapterTiers
from engine.block_pool import BlockPool, root_hash
from engine.loop import EngineLoop
from engine.outputs import LinkOutput
from engine.rank_pages import RankPages
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.adapter_gate import AdapterGate
from engine.sequence import Request
from engine.server import EngineServer
from engine.service import EngineService
from engine.step import RowResult, SamplingParams, StepPlan, StepResult
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc as pb_grpc

NUM_SEQS = 256
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 300
STEP_S = 0.005
ROUNDS = 5
MODEL = pb.ModelInfo(
    name="fake",
    digest=bytes(32),
    vocab_size=32000,
    max_model_len=4096,
    dtype="float32",
    max_num_seqs=NUM_SEQS,
)


class SleepingRunner:
    """Takes `STEP_S` for a step, and notes when full decode steps begin."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.starts: list[float] = []
        self.cpu: list[float] = []
        self._result = StepResult()

    def submit(self, plan: StepPlan) -> SleepingRunner:
        self._result = self.execute(plan)
        return self

    def draw(self) -> None:
        """Nothing has to wait for the host."""

    def result(self) -> StepResult:
        return self._result

    def execute(self, plan: StepPlan) -> StepResult:
        if len(plan.rows) == NUM_SEQS and all(len(row.tokens) == 1 for row in plan.rows):
            self.starts.append(time.perf_counter())
            self.cpu.append(time.thread_time())
        if self._step_s:
            time.sleep(self._step_s)
        return StepResult(
            tuple([RowResult(row.seq_id, 1 + row.start % 1000) for row in plan.rows if row.sampling])
        )

    def step_times(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.starts, self.starts[1:], strict=False)]


def make_core(runner: SleepingRunner) -> tuple[EngineLoop, Scheduler, AdapterTiers]:
    news = threading.Event()
    tiers = AdapterTiers(lambda digest: _no_adapters(), num_pages=4, host_bytes=1, wake=news.set)
    gate = AdapterGate(RankPages(4), tiers, lambda pages, copy: None)
    limits = SchedulerLimits(NUM_SEQS, 8192, 4096)
    scheduler = Scheduler(limits, BlockPool(NUM_SEQS * (PROMPT_TOKENS + OUTPUT_TOKENS + 32) // 16), gate)
    return EngineLoop(scheduler, runner, gate, news), scheduler, tiers


def _no_adapters() -> Any:
    raise LookupError("there are no adapters here")


def make_request(number: int) -> Request:
    return Request(
        link="offline",
        request_id=number,
        prompt=[1 + number] * PROMPT_TOKENS,
        sampling=(SamplingParams(temperature=1.0, seed=number),),
        max_len=PROMPT_TOKENS + OUTPUT_TOKENS,
        block_root=root_hash(bytes(32), "float32", b"", b""),
        tenant=f"tenant-{number % 8}",
    )


def scheduling_us() -> dict[str, float]:
    """Median microseconds of `schedule` and `update` with 256 decoding sequences."""
    _, scheduler, tiers = make_core(SleepingRunner(0))
    for number in range(NUM_SEQS):
        scheduler.add(make_request(number))
    runner = SleepingRunner(0)
    schedule: list[float] = []
    update: list[float] = []
    while scheduler.num_running + scheduler.num_waiting:
        begin = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        result = runner.execute(plan)
        ran = time.perf_counter()
        scheduler.update(plan, result)
        scheduler.take_outputs()
        if len(plan.rows) == NUM_SEQS:
            schedule.append(planned - begin)
            update.append(time.perf_counter() - ran)
    tiers.close()
    return {"schedule": 1e6 * statistics.median(schedule), "update": 1e6 * statistics.median(update)}


def offline_step_s() -> list[float]:
    """Step times of the loop's thread alone."""
    runner = SleepingRunner(STEP_S)
    loop, scheduler, tiers = make_core(runner)
    done = threading.Event()
    ended = 0

    def deliver(news: Mapping[Hashable, LinkOutput]) -> None:
        nonlocal ended
        ended += sum(len(output.finished) for output in news.values())
        if ended == NUM_SEQS:
            done.set()

    for number in range(NUM_SEQS):
        scheduler.add(make_request(number))
    loop.start(deliver, done.set)
    done.wait()
    loop.stop()
    tiers.close()
    return runner.step_times()


async def online_step_s() -> tuple[list[float], dict[str, float]]:
    """Step times of the same work, with every stream going over one link to another process.

    Also the milliseconds of CPU a step that the loop's thread and the server's thread take.
    """
    runner = SleepingRunner(STEP_S)
    loop, _, tiers = make_core(runner)
    events = asyncio.get_running_loop()
    service = EngineService(loop, MODEL, {}, lambda digest: False)
    server = EngineServer(service)
    port = await server.start("127.0.0.1:0")

    def deliver(news: Mapping[Hashable, LinkOutput]) -> None:
        events.call_soon_threadsafe(service.take_news, news)

    loop.start(deliver, lambda: None)
    client = multiprocessing.get_context("spawn").Process(target=run_client, args=(port,))
    client.start()
    begin = time.thread_time()
    await asyncio.to_thread(client.join)
    server_s = time.thread_time() - begin
    assert client.exitcode == 0
    await server.stop()
    loop.stop()
    tiers.close()
    loop_s = runner.cpu[-1] - runner.cpu[0]
    cpu_ms = {"loop": 1e3 * loop_s / len(runner.cpu), "server": 1e3 * server_s / len(runner.cpu)}
    return runner.step_times(), cpu_ms


def run_client(port: int) -> None:
    """Submits everything on one link, and reads until all of it has ended."""
    asyncio.run(_read_all(port))


async def _read_all(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = pb_grpc.EngineStub(channel).Link()
        for number in range(NUM_SEQS):
            submit = pb.Submit(
                request_id=number,
                prompt_tokens=[1 + number] * PROMPT_TOKENS,
                seeds=[number],
                max_tokens=OUTPUT_TOKENS,
                sampling=pb.Sampling(temperature=1.0),
                tenant=f"tenant-{number % 8}",
            )
            await call.write(pb.LinkRequest(submit=submit))
        ended = tokens = 0
        while ended < NUM_SEQS:
            message = await call.read()
            ended += len(message.finished)
            tokens += len(message.tokens)
        assert tokens == NUM_SEQS * OUTPUT_TOKENS
        call.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description="What the engine's core costs beside the device.")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    load = os.getloadavg()[0]
    costs = scheduling_us()
    offline: list[float] = []
    online: list[float] = []
    cpu_ms: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        offline.append(statistics.median(offline_step_s()))
        times, cpu = asyncio.run(online_step_s())
        online.append(statistics.median(times))
        cpu_ms.append(cpu)
    figures = {
        "sequences": NUM_SEQS,
        "load_average_before": load,
        "cores": os.cpu_count(),
        "schedule_us": costs["schedule"],
        "update_us": costs["update"],
        "offline_step_ms": [1e3 * value for value in offline],
        "online_step_ms": [1e3 * value for value in online],
        "loop_cpu_ms": min(cpu["loop"] for cpu in cpu_ms),
        "server_cpu_ms": min(cpu["server"] for cpu in cpu_ms),
        "online_over_offline": statistics.median(online) / statistics.median(offline),
        "best_online_over_best_offline": min(online) / min(offline),
    }
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
