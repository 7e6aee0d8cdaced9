"""Streams a completion from a router: generate.py PROMPT [HOST:PORT]. See ../README.md for the stubs it imports."""

import sys

import grpc
from inflight.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time"
    target = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:8650"
    request = inference_pb2.GenerateRequest(
        text=prompt,
        sampling=sampling_pb2.SamplingParams(temperature=0.8, seed=7),
        stop=sampling_pb2.StopConditions(max_tokens=64),
    )
    with grpc.insecure_channel(target) as channel:
        client = inference_pb2_grpc.InferenceStub(channel)
        # Cancelling the call, or leaving the loop, cancels the request.
        for response in client.Generate(request, timeout=30):
            event = response.WhichOneof("event")
            if event == "delta":
                print(response.delta.text, end="", flush=True)
            elif event == "completed":
                usage = response.completed.usage
                print(f"\n{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated")


if __name__ == "__main__":
    main()
