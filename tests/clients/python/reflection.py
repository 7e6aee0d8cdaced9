"""Calls Generate knowing nothing but the address: the types come from server reflection."""

import argparse
import json

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="HOST:PORT of a router")
    parser.add_argument("--protos", help="not used; the same flags as the client with stubs")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()

    text, token_ids, completion_tokens = "", [], None
    with grpc.insecure_channel(arguments.target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = database.get_services()
        name = next(service for service in services if service.endswith(".Inference"))
        method = DescriptorPool(database).FindServiceByName(name).FindMethodByName("Generate")
        request_type = message_factory.GetMessageClass(method.input_type)
        response_type = message_factory.GetMessageClass(method.output_type)
        generate = channel.unary_stream(
            f"/{name}/Generate",
            request_serializer=request_type.SerializeToString,
            response_deserializer=response_type.FromString,
        )
        request = request_type(
            text=arguments.prompt,
            sampling={"temperature": 0.8, "seed": arguments.seed},
            stop={"max_tokens": 24, "ignore_eos": True},
            return_token_ids=True,
        )
        for response in generate(request, timeout=30):
            if response.WhichOneof("event") == "delta":
                text += response.delta.text
                token_ids.extend(response.delta.token_ids)
            elif response.WhichOneof("event") == "completed":
                completion_tokens = response.completed.usage.completion_tokens
    print(json.dumps({"text": text, "token_ids": token_ids, "completion_tokens": completion_tokens}))


if __name__ == "__main__":
    main()
