"""Talks to a model with the anthropic package: `python examples/anthropic_client.py --model pirate "Hello"`.

ANTHROPIC_BASE_URL names the gateway, as http://127.0.0.1:8000, and ANTHROPIC_API_KEY holds a key.
"""

from __future__ import annotations

import argparse
import sys

from anthropic import Anthropic


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model, and print its answer as it comes.")
    parser.add_argument("prompt")
    parser.add_argument("--model", required=True, help="the base model's name, or an adapter's")
    parser.add_argument("--max-tokens", type=int, default=100)
    arguments = parser.parse_args()
    with (
        Anthropic() as client,
        client.messages.stream(
            model=arguments.model,
            max_tokens=arguments.max_tokens,
            messages=[{"role": "user", "content": arguments.prompt}],
        ) as stream,
    ):
        for text in stream.text_stream:
            sys.stdout.write(text)
            sys.stdout.flush()
        usage = stream.get_final_message().usage
    prompt_tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    sys.stdout.write(f"\n{prompt_tokens} tokens in, {usage.output_tokens} out\n")


if __name__ == "__main__":
    main()
