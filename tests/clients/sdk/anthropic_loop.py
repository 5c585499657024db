"""Two turns with a tool each, by the Anthropic SDK, streamed and not; and a count of tokens."""

import os
import sys

from anthropic import Anthropic

from common import PROMPT, SECOND, TOOL, Tools

model = sys.argv[1]
TRANSLATED = os.environ.get("KVC_TRANSLATED") == "True"
client = Anthropic(max_retries=0)
tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}

for stream in (False, True):
    tools = Tools()
    messages = [{"role": "user", "content": PROMPT}]
    texts = []
    for ask in (None, SECOND):
        if ask:
            messages.append({"role": "user", "content": ask})
        while True:
            system = [{"type": "text", "text": f"stream {stream}", "cache_control": {"type": "ephemeral"}}]
            args = {"model": model, "system": system, "messages": messages, "tools": [tool]}
            counted = client.messages.count_tokens(**args).input_tokens
            if stream:
                with client.messages.stream(max_tokens=2000, **args) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(max_tokens=2000, **args)
            usage = message.usage
            true = usage.input_tokens + usage.cache_read_input_tokens
            # Where the engine has no such call the gateway estimates.
            assert abs(counted - true) <= (true // 10 if TRANSLATED else 0), (counted, usage)
            messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
            if message.stop_reason != "tool_use":
                texts.append("".join(block.text for block in message.content if block.type == "text"))
                break
            calls = [block for block in message.content if block.type == "tool_use"]
            results = [(call.id, tools.run(call.name, call.input)) for call in calls]
            content = [{"type": "tool_result", "tool_use_id": i, "content": result} for i, result in results]
            messages.append({"role": "user", "content": content})
    tools.check(texts)
