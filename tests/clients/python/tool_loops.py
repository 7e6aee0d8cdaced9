"""Loops of tool calls and parse helpers of openai, anthropic and LangChain, as they come from PyPI."""

import argparse
import json

QUESTION = "How warm is it?"
PARSE = "PARSE the weather"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def weather(arguments):
    """The tool."""
    return f"7 in {arguments['city']}"


def openai_chat(client, model):
    """A loop of chat completions, streamed and not, and Pydantic helpers."""
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    answers = []
    for streamed in (False, True):
        messages = [{"role": "user", "content": QUESTION}]
        while True:
            if streamed:
                with client.chat.completions.stream(model=model, messages=messages, tools=tools) as stream:
                    for _ in stream:
                        pass
                    choice = stream.get_final_completion().choices[0]
            else:
                choice = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0]
            message = choice.message
            if choice.finish_reason != "tool_calls":
                answers.append(message.content)
                break
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = weather(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    tool = openai.pydantic_function_tool(Weather, name="weather")
    called = client.chat.completions.parse(model=model, messages=[{"role": "user", "content": QUESTION}], tools=[tool])
    parsed = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": PARSE}], response_format=Weather
    )
    call = called.choices[0].message.tool_calls[0].function.parsed_arguments
    return {"answers": answers, "tool": call.city, "parsed": parsed.choices[0].message.parsed.city}


def openai_responses(client, model):
    """A loop of responses."""
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    answers = []
    for streamed in (False, True):
        items = [{"role": "user", "content": QUESTION}]
        while True:
            if streamed:
                with client.responses.stream(model=model, input=items, tools=tools) as stream:
                    for _ in stream:
                        pass
                    response = stream.get_final_response()
            else:
                response = client.responses.create(model=model, input=items, tools=tools)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                answers.append(response.output_text)
                break
            items += [item.model_dump(exclude_none=True) for item in response.output]
            for call in calls:
                result = weather(json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    return {"answers": answers}


def anthropic_messages(url, model):
    """A loop of messages."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    answers = []
    for streamed in (False, True):
        messages = [{"role": "user", "content": QUESTION}]
        while True:
            ask = {"model": model, "max_tokens": 200, "messages": messages, "tools": tools}
            if streamed:
                with client.messages.stream(**ask) as stream:
                    for _ in stream:
                        pass
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**ask)
            if message.stop_reason != "tool_use":
                answers.append(message.content[-1].text)
                break
            messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": weather(block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
    return {"answers": answers}


def langchain(url, model):
    """LangChain's bound tools and structured output."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        """Weather of a city."""

        city: str

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model)
    bound = chat.bind_tools([{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}])
    answers = []
    for streamed in (False, True):
        messages = [HumanMessage(QUESTION)]
        while True:
            if streamed:
                message = None
                for piece in bound.stream(messages):
                    message = piece if message is None else message + piece
            else:
                message = bound.invoke(messages)
            if not message.tool_calls:
                answers.append(message.content)
                break
            messages.append(message)
            for call in message.tool_calls:
                messages.append(ToolMessage(weather(call["args"]), tool_call_id=call["id"]))
    parsed = chat.with_structured_output(Weather, method="json_schema").invoke(PARSE)
    return {"answers": answers, "parsed": parsed.city}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", required=True)
    parser.add_argument("--server", required=True, help="URL of a router's HTTP APIs")
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    url, model = arguments.server, arguments.model
    if arguments.client.startswith("openai"):
        import openai

        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        run = openai_chat if arguments.client == "openai chat" else openai_responses
        answer = run(client, model)
    elif arguments.client == "anthropic":
        answer = anthropic_messages(url, model)
    else:
        answer = langchain(url, model)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
