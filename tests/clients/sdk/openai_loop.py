"""Two turns with a tool each, by the OpenAI SDK: chat and responses, streamed and not."""

import sys

from openai import OpenAI

from common import PROMPT, SECOND, TOOL, Tools

model = sys.argv[1]
client = OpenAI(max_retries=0)


def chat(stream):
    tools = Tools()
    messages = [{"role": "system", "content": f"chat {stream}"}, {"role": "user", "content": PROMPT}]
    texts = []
    for ask in (None, SECOND):
        if ask:
            messages.append({"role": "user", "content": ask})
        while True:
            args = {"model": model, "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
            if stream:
                with client.chat.completions.stream(**args) as events:
                    for _ in events:
                        pass
                    message = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**args).choices[0].message
            messages.append(message.to_dict())
            if not message.tool_calls:
                texts.append(message.content)
                break
            for call in message.tool_calls:
                result = tools.run(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    tools.check(texts)


def responses(stream):
    tools = Tools()
    items = [{"role": "user", "content": PROMPT}]
    texts = []
    for ask in (None, SECOND):
        if ask:
            items.append({"role": "user", "content": ask})
        while True:
            args = {"model": model, "instructions": f"responses {stream}", "input": items, "store": False}
            args["tools"] = [{"type": "function", "strict": False, **TOOL}]
            if stream:
                with client.responses.stream(**args) as events:
                    kinds = [event.type for event in events]
                    assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
                    response = events.get_final_response()
            else:
                response = client.responses.create(**args)
            items += [item.to_dict() for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                texts.append(response.output_text)
                break
            for call in calls:
                result = tools.run(call.name, call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    tools.check(texts)


for stream in (False, True):
    chat(stream)
    responses(stream)
