"""Runs a batch with the openai package: `python examples/batch.py --model pirate "Who are you?" "And I?"`.

OPENAI_BASE_URL names the gateway, as http://127.0.0.1:8000/v1, and OPENAI_API_KEY holds a key.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from openai import OpenAI

ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer prompts in what other work leaves over.")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", required=True, help="the base model's name, or an adapter's")
    arguments = parser.parse_args()
    lines = [
        {
            "custom_id": f"prompt-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": arguments.model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 100,
            },
        }
        for number, prompt in enumerate(arguments.prompts)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with OpenAI() as client:
        file = client.files.create(file=("prompts.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while batch.status not in ENDED:
            time.sleep(POLL_S)
            batch = client.batches.retrieve(batch.id)
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id:
                sys.stdout.write(client.files.content(file_id).text)
        if batch.status != "completed":
            sys.exit(f"The batch is {batch.status}: {batch.errors}")


if __name__ == "__main__":
    main()
