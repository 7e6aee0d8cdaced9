"""Calls messages and their token counts with anthropic, as it comes from PyPI."""

import argparse
import json

import anthropic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="URL of a router's HTTP APIs")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", required=True)
    arguments = parser.parse_args()
    client = anthropic.Anthropic(base_url=arguments.url, api_key="none", max_retries=0)
    conversation = {
        "model": arguments.model,
        "system": [{"type": "text", "text": "Answer briefly. 🙂"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": arguments.prompt}]}],
    }
    ask = {**conversation, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask)
    text = whole.content[0].text
    with client.messages.stream(**ask) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    kinds = [event.type for event in client.messages.create(**ask, stream=True)]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = client.messages.create(**ask, stop_sequences=[stop])
    refused = {}
    for name, change in {
        "model": {"model": "no-such-model"},
        "temperature": {"extra_body": {"temperature": -1}},
        "tools": {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    }.items():
        try:
            client.messages.create(**{**ask, **change})
        except anthropic.APIStatusError as error:
            refused[name] = [type(error).__name__, error.status_code, error.body["error"]["type"]]
    usage = final.usage
    answer = {
        "text": text,
        "streamed": streamed,
        "final": final.content[0].text,
        "kinds": kinds,
        "stop_reason": whole.stop_reason,
        "stop": stop,
        "stopped": [stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence],
        "output_tokens": usage.output_tokens,
        "input_tokens": usage.input_tokens + usage.cache_read_input_tokens,
        "counted": client.messages.count_tokens(**conversation).input_tokens,
        "refused": refused,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
