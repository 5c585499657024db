"""The task all SDKs run: the script the builtin worker plays, and the tool it calls."""

import json

SCRIPT = [
    {"text": "I look.", "tool_calls": [{"name": "look", "arguments": {"path": "größe.txt", "n": 1.5}}]},
    {"text": "The first turn is done."},
    {"tool_calls": [{"name": "look", "arguments": {"path": "b.txt"}}]},
    {"text": "The second turn is done – ✓."},
]
#: Long enough to be worth a place from its first turn on.
PROMPT = "Read this first. " * 300 + f"[[kvc-script: {json.dumps(SCRIPT)}]]"
SECOND = "Now the other file, please."
TOOL = {
    "name": "look",
    "description": "Look at a file.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "n": {"type": "number"}},
        "required": ["path"],
    },
}


class Tools:
    """Runs the tool and remembers how it was called."""

    def __init__(self):
        self.paths = []

    def run(self, name, arguments):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        assert name == "look", name
        self.paths.append(arguments["path"])
        return f"{arguments['path']} says: " + "nothing new. " * 40

    def check(self, texts):
        """The task is finished."""
        expected = [SCRIPT[1]["text"], SCRIPT[3]["text"]]
        assert texts == expected, texts
        assert self.paths == ["größe.txt", "b.txt"], self.paths
