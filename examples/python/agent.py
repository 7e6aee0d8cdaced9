"""An agent: a model that calls tools until it has an answer, with openai's client.

    inflight up --model DIR &
    pip install openai
    python agent.py --url http://127.0.0.1:8640 "How warm is it in Zürich?"

The model needs a chat template with tools, as those of Llama 3, Qwen and Mistral; the router's `--tool-call-format` sets the
format of its calls if the template does not tell.
"""

import argparse
import json

from openai import OpenAI

TEMPERATURES = {"Zürich": 7, "Nairobi": 24}


def temperature(city: str) -> str:
    """Temperature of a city in degrees Celsius."""
    return json.dumps({"city": city, "celsius": TEMPERATURES.get(city)})


TOOLS = {
    "temperature": (
        temperature,
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    ),
}


def call(name: str, arguments: str) -> str:
    """Runs a tool; an error is a result, too, which the model may correct."""
    try:
        function, _ = TOOLS[name]
        return function(**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return json.dumps({"error": str(error)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8640", help="URL of a router's HTTP APIs")
    parser.add_argument("--rounds", type=int, default=8, help="maximum rounds of calls")
    parser.add_argument("question")
    arguments = parser.parse_args()
    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    tools = [
        {"type": "function", "function": {"name": name, "description": function.__doc__, "parameters": parameters}}
        for name, (function, parameters) in TOOLS.items()
    ]
    messages = [{"role": "user", "content": arguments.question}]
    for _ in range(arguments.rounds):
        message = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message.model_dump(exclude_none=True))
        for asked in message.tool_calls:
            result = call(asked.function.name, asked.function.arguments)
            print(f"{asked.function.name}({asked.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": result})
    raise SystemExit(f"no answer after {arguments.rounds} rounds of calls")


if __name__ == "__main__":
    main()
