"""Holds a conversation with LangChain and with LlamaIndex, as they come from PyPI."""

import argparse
import json

from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="URL of a router's HTTP APIs")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", required=True)
    arguments = parser.parse_args()
    base = f"{arguments.url}/v1"

    chain = ChatOpenAI(
        base_url=base, api_key="none", model=arguments.model, max_tokens=24, temperature=0, stream_usage=True
    )
    conversation = [("system", "Answer briefly."), ("user", arguments.prompt)]
    whole = chain.invoke(conversation)
    pieces = list(chain.stream(conversation))
    usage = [piece.usage_metadata for piece in pieces if piece.usage_metadata]

    index = OpenAILike(
        model=arguments.model,
        api_base=base,
        api_key="none",
        is_chat_model=True,
        context_window=1024,
        max_tokens=24,
        temperature=0,
    )
    messages = [ChatMessage(role="system", content="Answer briefly."), ChatMessage(role="user", content=arguments.prompt)]
    chat = index.chat(messages)
    streamed = "".join(piece.delta or "" for piece in index.stream_chat(messages))
    answer = {
        "langchain": whole.content,
        "langchain_streamed": "".join(piece.content for piece in pieces),
        "langchain_tokens": [whole.usage_metadata["output_tokens"], usage[-1]["output_tokens"]],
        "llama_index": chat.message.content,
        "llama_index_streamed": streamed,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
