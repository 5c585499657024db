"""How each client is installed and run. A run gets a scratch home and the URL to talk to, nothing else."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from fleet import MODEL

HERE = Path(__file__).parent
KEY = "sk-no-secret-at-all"
FIRST, SECOND = "echo one > one.txt", "echo two > two.txt"
DONE = "Both files are written."


@dataclass
class Run:
    """One run of a client: its commands, one after another."""

    commands: list
    env: dict = field(default_factory=dict)
    #: Conversations it must hold, each on a lane of its own.
    conversations: int = 1
    #: Files it must have written.
    files: tuple = ("one.txt", "two.txt")
    #: A process it talks through, and the words by which that says it listens.
    through: list = None


@dataclass
class Client:
    """A client from a registry."""

    package: str
    version: str
    #: `pip` or `npm`.
    registry: str
    #: Given the folder it is installed in, its scratch home and the gateway's URL.
    run: Callable
    extra: tuple = ()


def prompts(tool, argument, **more):
    """A task of two turns, and the script of both: each calls `tool` once and ends with a text."""
    call = lambda command: {"tool_calls": [{"name": tool, "arguments": {argument: command, **more}}]}
    script = [call(FIRST), {"text": "The first file is written."}, call(SECOND), {"text": DONE}]
    return f"Write a file. [[kvc-script: {json.dumps(script)}]]", "Now the second file."


def sdk(name, conversations):
    """A program of ours that uses an SDK."""

    def run(place, home, url):
        env = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": KEY,
            "LANGSMITH_TRACING": "false",
        }
        command = [place / "bin/python", HERE / "sdk" / name, MODEL]
        return Run([command], env, conversations, files=())

    return run


def codex(place, home, url):
    config = f"""
model = "{MODEL}"
model_provider = "kvc"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
analytics.enabled = false
model_providers.kvc = {{ name = "kvc", base_url = "{url}/v1", wire_api = "responses", env_key = "KVC_KEY", supports_websockets = true }}
"""
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(config)
    first, second = prompts("exec_command", "cmd")
    program = [place / "node_modules/.bin/codex", "exec"]
    commands = [[*program, "--skip-git-repo-check", first]]
    commands.append([*program, "resume", "--last", "--skip-git-repo-check", second])
    return Run(commands, {"KVC_KEY": KEY, "CODEX_HOME": str(home / ".codex")})


def opencode(npm):
    def run(place, home, url):
        provider = {
            "npm": npm,
            "name": "kvc",
            "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
            "models": {MODEL: {"name": MODEL, "tool_call": True, "limit": {"context": 128000, "output": 8000}}},
        }
        config = {"autoupdate": False, "share": "disabled", "permission": "allow", "provider": {"kvc": provider}}
        env = {
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }
        first, second = prompts("bash", "command", description="Writes a file")
        program = [place / "node_modules/.bin/opencode", "run", "--model", f"kvc/{MODEL}"]
        # It quotes arguments with spaces, and escapes what is in them.
        return Run([[*program, *first.split(" ")], [*program, "--continue", *second.split(" ")]], env)

    return run


def mini(place, home, url):
    script = [
        {"tool_calls": [{"name": "bash", "arguments": {"command": FIRST}}]},
        {"tool_calls": [{"name": "bash", "arguments": {"command": SECOND}}]},
        {"tool_calls": [{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}]},
    ]
    # A conversation under 4 KB gets no place on its first turn.
    task = "Write two files. " * 80 + f"[[kvc-script: {json.dumps(script)}]]"
    env = {
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": KEY,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [place / "bin/mini", "-m", f"openai/{MODEL}", "-t", task, "-y", "--exit-immediately"]
    return Run([command], env)


def aider(place, home, url):
    def block(name, text):
        return f"{name}\n```\n<<<<<<< SEARCH\n=======\n{text}\n>>>>>>> REPLACE\n```\n"

    # Between its two turns it puts three answers of its own into the conversation.
    script = [{"text": block("one.txt", "one")}, {}, {}, {}, {"text": block("two.txt", "two")}]
    (home / "work/task.md").write_text(f"Write two files. [[kvc-script: {json.dumps(script)}]]\n")
    # It rewrites its prompt behind a fixed head on every turn: only an id keeps a conversation together.
    settings = [{"name": f"openai/{MODEL}", "extra_params": {"extra_headers": {"x-session-id": "aider-scratch-1"}}}]
    (home / "work/models.yml").write_text(json.dumps(settings))
    env = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [place / "bin/aider", "--model", f"openai/{MODEL}", "--edit-format", "diff", "--message-file", "task.md"]
    command += ["--model-settings-file", "models.yml", "--no-show-release-notes"]
    command += ["--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    command += ["--no-pretty", "--no-suggest-shell-commands", "--map-tokens", "0"]
    # The first edit fails this test, so aider comes back with its output.
    command += ["--auto-test", "--test-cmd", "test -f two.txt"]
    return Run([command], env)


def litellm(place, home, url):
    config = {
        "model_list": [
            {"model_name": MODEL, "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY}}
        ],
        "litellm_settings": {"telemetry": False, "num_retries": 0},
    }
    (home / "litellm.yaml").write_text(json.dumps(config))
    run = sdk("openai_loop.py", 4)(place, home, url)
    run.env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
    run.through = [place / "bin/litellm", "--config", home / "litellm.yaml", "--host", "127.0.0.1", "--telemetry", "False"]
    return run


CLIENTS = {
    "openai": Client("openai", "3.57.0", "pip", sdk("openai_loop.py", 4)),
    "anthropic": Client("anthropic", "2.14.0", "pip", sdk("anthropic_loop.py", 2)),
    "langchain": Client("langchain", "1.5.2", "pip", sdk("langchain_loop.py", 3), ("langchain-openai==1.7.4", "langchain-anthropic==1.7.10")),
    "codex": Client("@openai/codex", "0.171.0", "npm", codex),
    "opencode-chat": Client("opencode-ai", "1.18.33", "npm", opencode("@ai-sdk/openai-compatible")),
    "opencode-responses": Client("opencode-ai", "1.18.33", "npm", opencode("@ai-sdk/openai")),
    "opencode-messages": Client("opencode-ai", "1.18.33", "npm", opencode("@ai-sdk/anthropic")),
    "mini-swe-agent": Client("mini-swe-agent", "2.4.6", "pip", mini),
    "aider": Client("aider-chat", "0.86.2", "pip", aider),
    "litellm": Client("litellm[proxy]", "1.109.3", "pip", litellm),
}
#: What runs without being asked for.
DEFAULT = ["openai", "anthropic"]


def environment(home, env):
    """Nothing of the caller's but its programs; the only way out leads to loopback."""
    nowhere = "http://127.0.0.1:9"
    base = {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local/share"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "DO_NOT_TRACK": "1",
        "CI": "1",
        "TERM": "dumb",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    return base | {name: str(value) for name, value in env.items()}
