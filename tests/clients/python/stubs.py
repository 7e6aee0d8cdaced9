"""Calls Generate with stubs that grpcio-tools makes from the .proto files."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import grpc
from grpc_tools import protoc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="HOST:PORT of a router")
    parser.add_argument("--protos", required=True, help="directory that holds inflight/v1")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as generated:
        files = sorted(str(path) for path in Path(arguments.protos, "inflight", "v1").glob("*.proto"))
        flags = [f"-I{arguments.protos}", f"--python_out={generated}", f"--grpc_python_out={generated}"]
        if protoc.main(["protoc", *flags, *files]) != 0:
            sys.exit("protoc failed")
        sys.path.insert(0, generated)
        from inflight.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

    text, token_ids, usage = "", [], None
    with grpc.insecure_channel(arguments.target) as channel:
        request = inference_pb2.GenerateRequest(
            text=arguments.prompt,
            sampling=sampling_pb2.SamplingParams(temperature=0.8, seed=arguments.seed),
            stop=sampling_pb2.StopConditions(max_tokens=24, ignore_eos=True),
            return_token_ids=True,
        )
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=30):
            if response.WhichOneof("event") == "delta":
                text += response.delta.text
                token_ids.extend(response.delta.token_ids)
            elif response.WhichOneof("event") == "completed":
                usage = response.completed.usage
    print(json.dumps({"text": text, "token_ids": token_ids, "completion_tokens": usage.completion_tokens}))


if __name__ == "__main__":
    main()
