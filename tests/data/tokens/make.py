"""Makes the small tokenizer of the tests, and what the reference implementations say about it.

    pip install tokenizers jinja2 && python make.py
"""

import json
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TEXT = """You are a coding agent. Look at the files, then edit them. The tool returns what it has read.
fn main() { let value = read("path", 7); println!("{value}"); } // größer als 😀 {"name": "bash", "arguments": {"command": "ls"}}
def look(path: str) -> str: return open(path).read()  # what is there and where it is
""" * 4

TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "Tools:" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"path":"größe.txt","n":1.5,"deep":{"a":[1,true,null]}}'}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look <at> 'it' & more.", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}]
TURNS = [
    {"role": "system", "content": "You are a coding agent.\nBe brief."},
    {"role": "user", "content": "Look at größe.txt, please.  Two  spaces; <|im_end|> too.\r\n\ttabs 😀 123 4567"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "\nIt must be there.\n", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": TEXT},
    {"role": "assistant", "content": "It's done – ✓", "reasoning_content": "Yes."},
    {"role": "user", "content": "And now?"},
]


def tokenizer():
    made = Tokenizer(models.BPE(byte_fallback=False))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return made


def render(messages, tools):
    def parsed(message):
        calls = [call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}} for call in message.get("tool_calls", [])]
        return message | {"tool_calls": calls} if calls else message

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    template = env.from_string(TEMPLATE)
    return template.render(messages=[parsed(m) for m in messages], tools=tools, add_generation_prompt=True)


made = tokenizer()
made.save(str(HERE / "tokenizer.json"), pretty=False)
config = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
(HERE / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n")
golden = []
for count in (2, 4, 6):
    for tools in (None, TOOLS):
        body = {"model": "m", "messages": TURNS[:count]} | ({"tools": tools} if tools else {})
        text = render(TURNS[:count], tools)
        golden.append({"body": body, "text": text, "ids": made.encode(text, add_special_tokens=False).ids})
(HERE / "golden.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")
