"""Chats over gRPC: `python examples/grpc_client.py "Where be the treasure?" --model pirate`.

The gateway must have been started with `--grpc-port 9000`; LORAPLEX_API_KEY holds a key.
"""

from __future__ import annotations

import argparse
import os
import sys

import grpc

from protos.loraplex_pb2 import ChatMessage, ChatRequest, GenerationOptions
from protos.loraplex_pb2_grpc import InferenceStub

TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat over gRPC, as the answer comes.")
    parser.add_argument("prompt")
    parser.add_argument("--model", required=True, help="the base model's name, or an adapter's")
    parser.add_argument("--address", default="127.0.0.1:9000")
    parser.add_argument("--max-tokens", type=int, default=100)
    arguments = parser.parse_args()
    request = ChatRequest(
        model=arguments.model,
        messages=[ChatMessage(role="user", content=arguments.prompt)],
        options=GenerationOptions(max_tokens=arguments.max_tokens, temperature=0),
    )
    metadata = (("authorization", f"Bearer {os.environ['LORAPLEX_API_KEY']}"),)
    with grpc.insecure_channel(arguments.address) as channel:
        try:
            for chunk in InferenceStub(channel).ChatStream(request, metadata=metadata, timeout=TIMEOUT_S):
                for choice in chunk.choices:
                    sys.stdout.write(choice.delta.content)
                    sys.stdout.flush()
        except grpc.RpcError as error:
            sys.exit(f"{error.code().name}: {error.details()}")  # type: ignore[attr-defined]
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
