"""A gateway in front of an engine's servers, and what both say of themselves."""

import json
import subprocess
import time
import urllib.request

from engines import end_with_parent


class Wrong(Exception):
    """Something is not as it must be."""


def must(holds, why):
    if not holds:
        raise Wrong(why)


def serves_on(log):
    for line in log.read_text(errors="replace").splitlines():
        if "serves on http://" in line:
            return "http://" + line.split("serves on http://")[1].strip()
    return None


class World:
    """Runs until closed."""

    def __init__(self, engine, program, scratch, flags=()):
        self.engine, self.scratch, self.log, self.child = engine, scratch, scratch / "gateway.log", None
        self.command = [program, "serve", "--listen=127.0.0.1:0", "--set=http.workers=1"]
        self.others = []
        self.turns = scratch / "turns.jsonl"
        self.turns.unlink(missing_ok=True)
        self.servers = engine.prefill + engine.decode
        self.all = list(dict.fromkeys([*self.servers, engine.alone]))
        beside = engine.beside(program) if hasattr(engine, "beside") else []
        try:
            for server in self.all:
                server.launch()
            for server in self.all:
                server.wait()
            for node in beside:
                self.all.append(node)
                node.launch()
                node.wait()
            self.command += [*engine.gateway(), *flags]
            self.child = self.gateway(self.log)
            self.url = self.until(lambda: serves_on(self.log), "the gateway to start")
            self.up()
        except BaseException:
            self.close()
            raise

    def gateway(self, log):
        with open(log, "wb") as to:
            return subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stderr=to, preexec_fn=end_with_parent)

    def another(self):
        """One more gateway in front of the same workers."""
        log = self.scratch / "gateway-2.log"
        self.others.append(self.gateway(log))
        url = self.until(lambda: serves_on(log), "another gateway to start")
        self.up(url)
        return url

    def until(self, found, what, limit=120, told=lambda: ""):
        """Asks until there is an answer. `told`: what to say when there is none."""
        deadline = time.monotonic() + limit
        while not (answer := found()):
            if time.monotonic() > deadline or (self.child and self.child.poll() is not None):
                raise Wrong(f"waited for {what}: {told()}")
            time.sleep(0.1)
        return answer

    def said(self):
        return self.log.read_text(errors="replace")[-3000:]

    def workers(self, url=None):
        with urllib.request.urlopen(f"{url or self.url}/admin/workers", timeout=30) as answer:
            return {worker["name"]: worker for worker in json.load(answer)["workers"]}

    def up(self, url=None):
        """Waits until every worker takes turns."""
        self.until(lambda: all(w["health"] == "up" for w in self.workers(url).values()), "all workers to be up")

    def work(self):
        """What each living server has computed and received so far, in tokens, as far as it says so."""
        told = {server.child.pid: self.engine.work(server) for server in self.servers if server.child.poll() is None}
        return {pid: work for pid, work in told.items() if work}

    def play(self, agent):
        """The agent's next turn, and what it cost the engines."""
        before = self.work()
        turn = agent.turn()
        for pid, (computed, moved) in self.work().items():
            had = before.get(pid, (0, 0))
            turn.computed, turn.moved = turn.computed + computed - had[0], turn.moved + moved - had[1]
        with open(self.turns, "a") as log:
            log.write(json.dumps(vars(turn) | {"body": None}) + "\n")
        return turn

    def server(self, worker):
        return self.engine.decode[int(worker.removeprefix("d"))]

    def close(self):
        for child in filter(None, [self.child, *self.others]):
            child.terminate()
            child.wait()
        for server in self.all:
            server.kill()
