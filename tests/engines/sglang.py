"""SGLang on a CPU: one P and two D over NIXL on the loopback."""

import os
import tempfile

from engines import MODEL, ROOT, Server, Sizes, clean_environment, free_port, installed, models, plugin, run, venv

SGLANG, NIXL = "0.5.23", "1.5.1"
CONTEXT = 2600

# SGLang's kernels are linked with the CUDA driver, also where no GPU is: this one says that there is no device.
STUB = """
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return 100; }
int cuPointerGetAttribute(void *data, int attribute, unsigned long pointer) { return 100; }
int cuGetErrorString(int error, const char **text) { *text = "no device"; return 0; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
"""
# Its NIXL connector registers KV as GPU memory, whatever it is.
SHIM = '''"""Host memory for SGLang's NIXL connector on a machine without a GPU."""


def register():
    from nixl._api import nixl_agent

    def in_host_memory(call):
        def changed(*args, **kwargs):
            host = lambda value: "DRAM" if isinstance(value, str) and value == "VRAM" else value
            return call(*map(host, args), **{name: host(value) for name, value in kwargs.items()})

        return changed

    for name in ("register_memory", "get_xfer_descs", "get_reg_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, in_host_memory(getattr(nixl_agent, name)))
'''


def wheels(place):
    venv(place, newest=12)
    run(place / "bin/python", "-m", "pip", "install", "--quiet", "uv")
    install = [place / "bin/uv", "pip", "install", "--quiet", "--python", place / "bin/python"]
    run(*install, f"sglang=={SGLANG}", f"nixl=={NIXL}", f"nixl-cu13=={NIXL}")
    (place / "stub").mkdir()
    with tempfile.NamedTemporaryFile("w", suffix=".c") as source:
        source.write(STUB)
        source.flush()
        run("cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", place / "stub/libcuda.so.1", source.name)
    plugin(next(place.glob("lib/python3*/site-packages")), "sglang.srt.plugins", "kvc_host_memory", SHIM)


class Sglang:
    name, version, block = "sglang", f"SGLang {SGLANG} (CPU, NIXL)", 1
    # A decode server computes no prompt: P sends what it lacks, each turn.
    home, sizes = "reseed", Sizes(fit=4, words=700)

    def __init__(self, scratch):
        self.place = installed(f"sglang-{SGLANG}", wheels)
        self.tiny, self.scratch = models() / "tiny", scratch
        pair = ["--disaggregation-transfer-backend", "nixl"]
        prefill = ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", free_port()]
        decode = ["--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache"]
        self.prefill = [self.server("p0", [*prefill, *pair])]
        self.decode = [self.server(name, [*decode, *pair]) for name in ("d0", "d1")]
        self.alone = self.server("cold", ["--disable-radix-cache"])

    def cold(self):
        return {}

    def server(self, role, more):
        def command(port):
            return [
                self.place / "bin/python", "-m", "sglang.launch_server", "--model-path", self.tiny, "--served-model-name", MODEL,
                "--host", "127.0.0.1", "--port", port, "--device", "cpu", "--dtype", "float32", "--mem-fraction-static", "0.1",
                "--max-total-tokens", CONTEXT, "--disable-overlap-schedule", "--disable-cuda-graph", "--page-size", "1",
                "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none",
                "--enable-cache-report", "--enable-metrics", "--sleep-on-idle", *more,
            ]  # fmt: skip

        env = clean_environment(
            **self.more_environment(),
            LD_LIBRARY_PATH=f"{self.place}/stub:{os.environ.get('LD_LIBRARY_PATH', '')}", SGLANG_USE_CPU_ENGINE="1",
            SGLANG_HOST_IP="127.0.0.1", SGLANG_LOCAL_IP_NIC="lo", UCX_TLS="tcp,self", UCX_NET_DEVICES="lo",
        )  # fmt: skip
        return Server(role, command, env, self.scratch / f"{role}.log", port=free_port())

    def more_environment(self):
        return {}

    def gateway(self):
        join = ",".join
        return [
            "--engine=sglang", f"--prefill={join(s.url for s in self.prefill)}", f"--decode={join(s.url for s in self.decode)}",
        ]  # fmt: skip

    def work(self, server):
        """Its counters move once in a while: what a turn cost cannot be read from them."""
        return None


class SglangDirect(Sglang):
    """With the project's plugin on the decode servers: they append to what they hold."""

    name, version, home = "sglang-direct", f"SGLang {SGLANG} (CPU, NIXL) with integrations/sglang", "direct"

    def more_environment(self):
        packages = self.scratch / "plugin"
        packages.mkdir(exist_ok=True)
        plugin(packages, "sglang.srt.plugins", "kvc_sglang", (ROOT / "integrations/sglang/kvc_sglang.py").read_text())
        return {"PYTHONPATH": str(packages)}

    def gateway(self):
        return [*super().gateway(), "--set=fleet.sglang_plugin=true"]
