"""llama.cpp: two fused workers with two slots each, so that a third session on a worker evicts one."""

import json
import subprocess

from engines import MODEL, ROOT, Server, Sizes, clean_environment, free_port, llama_place, models

SLOTS, CONTEXT = 2, 2 * 2048


class Llama:
    name, version = "llama", "llama.cpp (xllamacpp 2026.10)"
    block, home, sizes = 1, "direct", Sizes(fit=4, words=700)

    def __init__(self, scratch):
        place, tiny = llama_place(), models() / "tiny.gguf"
        host = ROOT / "src/demo/model/llama_server.py"

        def server(role):
            def command(port):
                asked = {"model": str(tiny), "name": MODEL, "port": port, "slots": SLOTS, "context": CONTEXT, "threads": 1}
                return [place / "bin/python", host, json.dumps(asked)]

            log = scratch / f"{role}.log"
            return Server(role, command, clean_environment(), log, port=free_port(), stdin=subprocess.PIPE)

        self.prefill, self.decode = [], [server("d0"), server("d1")]
        self.alone = server("cold")

    def gateway(self):
        return ["--engine=openai", f"--decode={','.join(s.url for s in self.decode)}"]

    def work(self, server):
        """Tokens that a server has computed and received so far."""
        return server.metrics()["llamacpp:prompt_tokens_total"], 0

    def cold(self):
        """Makes a request compute its prompt from the first token."""
        return {"cache_prompt": False}
