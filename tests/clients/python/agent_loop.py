"""Agents that execute the calls of a model whose answers end anywhere, by openai and anthropic as they come from PyPI.

Each answer is a turn. An agent executes what its client reports as calls, and answers with their results; else it asks again. Prints, for each
agent, the calls that it has executed by turn.
"""

import argparse
import json

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
ASK = {"role": "user", "content": "go on"}


def openai_chat(client, turns, streamed):
    """Chat completions."""
    import openai

    tools = [{"type": "function", "function": {"name": "remove", "parameters": SCHEMA}}]
    messages, executed = [ASK], []
    for _ in range(turns):
        if streamed:
            try:
                with client.chat.completions.stream(model="", messages=messages, tools=tools) as stream:
                    for _ in stream:
                        pass
                    choice = stream.get_final_completion().choices[0]
            except openai.LengthFinishReasonError as error:
                # The helper has no answer to return.
                choice = error.completion.choices[0]
        else:
            choice = client.chat.completions.create(model="", messages=messages, tools=tools).choices[0]
        calls = choice.message.tool_calls or [] if choice.finish_reason == "tool_calls" else []
        executed.append([[call.function.name, json.loads(call.function.arguments)] for call in calls])
        if calls:
            messages.append(choice.message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
        else:
            messages += [{"role": "assistant", "content": choice.message.content or "?"}, ASK]
        messages = messages[-9:] if messages[-9:][0]["role"] == "user" else [ASK]
    return executed


def openai_responses(client, turns, streamed):
    """Responses."""
    tools = [{"type": "function", "name": "remove", "parameters": SCHEMA, "strict": False}]
    executed = []
    for _ in range(turns):
        if streamed:
            with client.responses.stream(model="", input="go on", tools=tools) as stream:
                response = None
                for event in stream:
                    if event.type in ("response.completed", "response.incomplete"):
                        response = event.response
        else:
            response = client.responses.create(model="", input="go on", tools=tools)
        calls = [item for item in response.output if item.type == "function_call" and item.status == "completed"]
        executed.append([[call.name, json.loads(call.arguments)] for call in calls])
    return executed


def anthropic_messages(client, turns, streamed):
    """Messages."""
    tools = [{"name": "remove", "input_schema": SCHEMA}]
    messages, executed = [ASK], []
    for _ in range(turns):
        request = {"model": "", "max_tokens": 200, "messages": messages, "tools": tools}
        if streamed:
            with client.messages.stream(**request) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**request)
        # As agents do: each block is executed, whatever the stop reason.
        calls = [block for block in message.content if block.type == "tool_use"]
        executed.append([[call.name, call.input] for call in calls])
        if calls:
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "done"} for call in calls]
            content = [block.model_dump(exclude_none=True) for block in message.content]
            messages = [ASK, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
        else:
            messages = [ASK]
    return executed


def main():
    """Runs one agent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="base URL of the HTTP APIs")
    parser.add_argument("agent", choices=["chat", "responses", "messages"])
    parser.add_argument("turns", type=int)
    parser.add_argument("--streamed", action="store_true")
    arguments = parser.parse_args()
    if arguments.agent == "messages":
        import anthropic

        client = anthropic.Anthropic(base_url=arguments.url, api_key="none", max_retries=0)
        executed = anthropic_messages(client, arguments.turns, arguments.streamed)
    else:
        import openai

        client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none", max_retries=0)
        run = openai_chat if arguments.agent == "chat" else openai_responses
        executed = run(client, arguments.turns, arguments.streamed)
    print(json.dumps(executed))


if __name__ == "__main__":
    main()
