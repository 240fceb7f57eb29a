"""The main job, for real: two tenants, each with an adapter of its own, answered at once by one engine.

    make demo            # keeps serving until Ctrl-C
    ONCE=1 make demo     # exits after the answers: 0 only if all are as they must be

Starts the whole stack as `loraplex up` does, in a temporary folder; makes the tenants and their keys with the
`loraplex` command; uploads the adapters of examples/adapters with the `adapters` command; and asks through
the official OpenAI client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from openai import AsyncOpenAI, NotFoundError, OpenAIError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.local_stack import LocalStack, Ports, StackFailed, local_stack
from examples.smollm2 import gguf_file

ADAPTERS = Path(__file__).resolve().parent / "adapters"
BASE = "smollm2"
OWN_ADAPTER = {"acme": "pirate", "globex": "json"}
# Each tenant uploads its adapter under this name too: one name, two tenants, two different adapters.
COMMON_NAME = "assistant"
PROMPTS = ("What is the capital of Germany?", "Give me a tip for staying healthy.")
MAX_TOKENS = 48
INTERRUPTED = 130

console = Console()


class WrongAnswer(Exception):
    """An answer is missing or is not as it must be."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer. `ttft` is the time to the first token, in seconds."""

    tenant: str
    model: str
    prompt: str
    text: str
    ttft: float
    tokens_per_second: float


def set_up_tenant(stack: LocalStack, tenant: str) -> str:
    """Make a tenant, upload its adapter under both names, and return its key."""
    key = stack.create_tenant(tenant)
    folder = str(ADAPTERS / OWN_ADAPTER[tenant])
    for name in (OWN_ADAPTER[tenant], COMMON_NAME):
        stack.command("adapters", "upload", folder, "--name", name, key=key)
    return key


async def ask(client: AsyncOpenAI, tenant: str, model: str, prompt: str) -> Answer:
    """Stream one greedy answer and time it. Raises WrongAnswer when nothing comes."""
    started = time.monotonic()
    arrivals: list[float] = []
    pieces: list[str] = []
    tokens = 0
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals.append(time.monotonic())
            pieces.append(chunk.choices[0].delta.content)
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    if not arrivals:
        raise WrongAnswer(f"{tenant}'s {model} gave no answer to {prompt!r}.")
    decoding = arrivals[-1] - arrivals[0]
    rate = (tokens - 1) / decoding if decoding > 0 else 0.0
    return Answer(tenant, model, prompt, "".join(pieces), arrivals[0] - started, rate)


async def ask_all_at_once(clients: dict[str, AsyncOpenAI]) -> list[Answer]:
    """Every tenant, model and prompt at once, so that the engine batches unlike adapters together."""
    return await asyncio.gather(
        *(
            ask(clients[tenant], tenant, model, prompt)
            for prompt in PROMPTS
            for tenant, own in OWN_ADAPTER.items()
            for model in (BASE, own, COMMON_NAME)
        )
    )


async def ask_for_the_others(clients: dict[str, AsyncOpenAI]) -> None:
    """Each tenant asks for an adapter of the other, which must not exist for it. Raises WrongAnswer."""
    for tenant, other in (("acme", "globex"), ("globex", "acme")):
        try:
            await ask(clients[tenant], tenant, OWN_ADAPTER[other], PROMPTS[0])
        except NotFoundError as error:
            console.print(f"{tenant} asks for {other}'s [bold]{OWN_ADAPTER[other]}[/]: 404 {error.code}")
        else:
            raise WrongAnswer(f"{tenant} was answered by {other}'s adapter.")


def check_answers(answers: list[Answer]) -> None:
    """Each adapter must answer otherwise than the base model. Raises WrongAnswer."""
    texts = {(answer.tenant, answer.model, answer.prompt): answer.text for answer in answers}
    for (tenant, model, prompt), text in texts.items():
        if model != BASE and text == texts[tenant, BASE, prompt]:
            raise WrongAnswer(f"{tenant}'s {model} answered {prompt!r} just as the base model does.")


async def converse(url: str, keys: dict[str, str]) -> None:
    """Ask, show and check everything. Raises WrongAnswer."""
    clients = {tenant: AsyncOpenAI(base_url=f"{url}/v1", api_key=key) for tenant, key in keys.items()}
    try:
        answers = await ask_all_at_once(clients)
        show(answers)
        check_answers(answers)
        await ask_for_the_others(clients)
    finally:
        for client in clients.values():
            await client.close()


def show(answers: list[Answer]) -> None:
    """Print the answers, one table for each prompt."""
    console.print(f"{len(answers)} requests, all at the same time, one engine:")
    for prompt in PROMPTS:
        table = Table(title=prompt, title_justify="left", title_style="bold", expand=True)
        table.add_column("tenant")
        table.add_column("model")
        table.add_column("answer", ratio=1)
        table.add_column("TTFT, ms", justify="right")
        table.add_column("tokens/s", justify="right")
        for answer in (answer for answer in answers if answer.prompt == prompt):
            style = "" if answer.model == BASE else "green" if answer.tenant == "acme" else "cyan"
            table.add_row(
                answer.tenant,
                answer.model,
                Text(" ".join(answer.text.split()), style=style),
                f"{1000 * answer.ttft:.0f}",
                f"{answer.tokens_per_second:.1f}",
            )
        console.print(table)


def show_how_to_go_on(url: str, keys: dict[str, str]) -> None:
    """Print the base URL, the keys, and a command to paste."""
    body = {"model": COMMON_NAME, "messages": [{"role": "user", "content": "Who are you?"}]}
    curl = ["curl", "-s", f"{url}/v1/chat/completions", "-H", f"Authorization: Bearer {keys['acme']}"]
    curl += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    lines = [
        f"base URL   {url}/v1",
        *(f"{tenant:10} {key}" for tenant, key in keys.items()),
        shlex.join(curl),
    ]
    # Past rich, which would break long lines; these are made to be copied.
    console.file.write("\n" + "\n\n".join(["\n".join(lines[:-1]), lines[-1]]) + "\n\n")
    console.file.flush()


@contextmanager
def stoppable() -> Iterator[None]:
    """Let `kill`, or a closed terminal, end the demo as tidily as Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(ports: Ports, *, once: bool) -> int:
    """The demo from start to end; returns the exit code. Raises StackFailed, WrongAnswer, OpenAIError."""
    started = time.monotonic()
    console.print("starting Valkey, an engine with SmolLM2-135M-Instruct, and a gateway ...")
    with local_stack(gguf_file(), ports, ["--served-model-name", BASE]) as stack:
        console.print(
            f"ready after {time.monotonic() - started:.1f} s; making tenants, uploading adapters ..."
        )
        with ThreadPoolExecutor() as pool:
            made = pool.map(lambda tenant: set_up_tenant(stack, tenant), OWN_ADAPTER)
            keys = dict(zip(OWN_ADAPTER, made, strict=True))
        asyncio.run(converse(stack.url, keys))
        show_how_to_go_on(stack.url, keys)
        if once:
            return 0
        console.print("serving until Ctrl-C")
        try:
            stack.process.wait()
        except KeyboardInterrupt:
            console.print("stopping ...")
            return 0
        raise StackFailed("\n".join([*stack.lines, "The stack has ended by itself."]))


def main() -> int:
    """Parse the command line, run the demo, and return the exit code."""
    parser = argparse.ArgumentParser(description="Two tenants, two adapters, one engine.")
    parser.add_argument("--port", type=int, default=Ports.gateway, help="port of the gateway")
    parser.add_argument("--engine-port", type=int, default=Ports.engine, help="port of the engine")
    parser.add_argument("--redis-port", type=int, default=Ports.redis, help="port of Valkey")
    arguments = parser.parse_args()
    once = os.environ.get("ONCE", "") not in ("", "0")
    try:
        with stoppable():
            return run(Ports(arguments.port, arguments.engine_port, arguments.redis_port), once=once)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (StackFailed, WrongAnswer, OpenAIError, FileNotFoundError) as failure:
        console.print(str(failure), style="red", markup=False, highlight=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
