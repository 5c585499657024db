"""A gateway with one prefill and two decode workers, on ports the system chooses."""

import subprocess

MODEL = "builtin"


class Fleet:
    """Runs until closed."""

    def __init__(self, binary, more):
        self.children = []
        node = ["--listen=127.0.0.1:0", "--time-scale=50", "--set=node.d2p_port_base=0"]
        prefill = self.start([binary, "node", "--role=prefill", *node], "stdout")
        decode = [self.start([binary, "node", "--role=decode", *node], "stdout") for _ in range(2)]
        workers = [f"--decode={','.join(decode)}", f"--prefill={prefill}"]
        self.url = self.start([binary, "serve", "--listen=127.0.0.1:0", "--set=http.workers=2", *workers, *more], "stderr")

    def start(self, command, where):
        """Starts a process; the URL it serves on is in its first line."""
        pipe = {where: subprocess.PIPE}
        child = subprocess.Popen(command, text=True, **pipe)
        self.children.append(child)
        for line in getattr(child, where):
            if "http://" in line:
                return "http://" + line.split("http://")[1].strip()
        raise SystemExit(f"{command[1]} did not start")

    def close(self):
        for child in reversed(self.children):
            child.terminate()
        for child in self.children:
            child.wait()
