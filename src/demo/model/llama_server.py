"""llama.cpp's own HTTP server, out of the xllamacpp wheel. Ends when its standard input does: a parent takes it along.

    llama_server.py '{"model": FILE, "name": NAME, "port": 0, "slots": 4, "context": 8192, "threads": 1}'

Prints `serves URL` once it listens. `context` is what all slots hold together, in tokens; each has an equal part.
"""

import json
import os
import sys

import xllamacpp


def start(asked):
    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.model_alias = {asked["name"]}
    params.hostnames = ["127.0.0.1"]
    params.port = asked["port"]
    params.n_parallel = asked["slots"]
    params.n_ctx = asked["context"]
    params.kv_unified = False
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    params.endpoint_slots = params.endpoint_metrics = params.endpoint_props = True
    params.cache_prompt = True
    # Prompts parked in host memory would make a cold turn warm without anybody knowing.
    params.cache_ram_mib = 0
    params.ui = False
    return xllamacpp.Server(params)


server = start(json.loads(sys.argv[1]))
print("serves", server.listening_address, flush=True)
sys.stdin.buffer.read()
# The server's threads would hold up an orderly exit.
os._exit(0)
