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


class World:
    """Runs until closed."""

    def __init__(self, engine, program, scratch, flags=()):
        self.engine, self.log, self.child = engine, scratch / "gateway.log", None
        self.turns = scratch / "turns.jsonl"
        self.turns.unlink(missing_ok=True)
        self.servers = engine.prefill + engine.decode
        self.all = list(dict.fromkeys([*self.servers, engine.alone]))
        try:
            for server in self.all:
                server.launch()
            for server in self.all:
                server.wait()
            command = [program, "serve", "--listen=127.0.0.1:0", "--set=http.workers=1", *engine.gateway(), *flags]
            with open(self.log, "wb") as log:
                self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, preexec_fn=end_with_parent)
            self.url = self.until(self.serves_on, "the gateway to start")
            self.up()
        except BaseException:
            self.close()
            raise

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

    def serves_on(self):
        for line in self.log.read_text(errors="replace").splitlines():
            if "serves on http://" in line:
                return "http://" + line.split("serves on http://")[1].strip()
        return None

    def admin(self, what):
        with urllib.request.urlopen(f"{self.url}/admin/{what}", timeout=30) as answer:
            return json.load(answer)

    def workers(self):
        return {worker["name"]: worker for worker in self.admin("workers")["workers"]}

    def up(self):
        """Waits until every worker takes turns."""
        self.until(lambda: all(w["health"] == "up" for w in self.workers().values()), "all workers to be up")

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
        if self.child:
            self.child.terminate()
            self.child.wait()
        for server in self.all:
            server.kill()
