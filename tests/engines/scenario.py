"""What every engine has to show: a day of a small fleet whose workers cannot hold all sessions."""

from statistics import median

from agent import Agent, Unanswered, ask
from world import must


class Scenario:
    """Plays in a world and keeps all turns. `sizes`: how many sessions fit, and how many words they begin with."""

    def __init__(self, world, sizes):
        self.world, self.engine, self.sizes = world, world.engine, sizes
        self.turns, self.agents = [], []

    def agent(self, name):
        agent = Agent(self.world.url, name, self.sizes.words)
        self.agents.append(agent)
        return agent

    def play(self, agent, *modes, resident=True):
        """One turn; it must be served in one of `modes`. Where its session is `resident`, Direct finds all of it."""
        before = agent.turns[-1] if agent.turns else None
        turn = self.world.play(agent)
        self.turns.append(turn)
        told = f"{agent.name} turn {len(agent.turns)}: {turn.mode} ({turn.reason}) at {turn.worker}, {turn.cached} of {turn.prompt} cached"
        must(turn.mode in modes, f"{told}; expected {' or '.join(modes)}")
        predicted = before.held - before.held % self.engine.block if before else 0
        turn.lost = turn.cached < predicted - self.engine.block
        if turn.mode == "direct":
            must(turn.worker == before.worker, f"{told}; the session was at {before.worker}")
            must(turn.cached <= predicted + self.engine.block, f"{told}; {predicted} were predicted")
            must(not (resident and turn.lost), f"{told}; {predicted} were predicted")
        return turn

    def run(self, deaths):
        self.seed_and_append()
        self.evict_and_return()
        if deaths:
            self.death_at_rest()
            self.death_in_mid_answer()
        self.books_are_true()

    def seed_and_append(self):
        for i in range(self.sizes.fit):
            agent = self.agent(f"first-{i}")
            turn = self.play(agent, "seed")
            must(turn.cached < self.sizes.words / 2 or self.engine.prefill, f"a new session found {turn.cached} tokens")
        for _ in range(2):
            for agent in self.agents:
                self.play(agent, self.engine.home)

    def evict_and_return(self):
        """More sessions come; the first ones lose their place, come back, and are at home again."""
        for i in range(self.sizes.fit):
            self.play(self.agent(f"more-{i}"), "seed")
        returned = [self.play(agent, "reseed", "direct", resident=False) for agent in self.agents[: self.sizes.fit]]
        # What a P has kept for a session counts as found.
        must(any(turn.lost or turn.moved for turn in returned), "no session lost anything, though they cannot all fit")
        self.play(self.agents[self.sizes.fit - 1], self.engine.home)

    def death_at_rest(self):
        """A D is killed between turns: its session is served elsewhere; the D comes back empty and is used again."""
        agent = self.agents[self.sizes.fit - 1]
        gone = agent.turns[-1].worker
        self.world.server(gone).kill()
        turn = self.play(agent, "reseed", "fallback")
        must(turn.worker != gone, f"{agent.name} was served by {gone}, which is dead")
        self.play(agent, self.engine.home)
        self.revive(gone)
        homeless = [a for a in self.agents if a.turns[-1].worker == gone]
        must(homeless, f"nobody was at {gone}")
        turn = self.play(homeless[0], "reseed")
        self.play(homeless[0], self.engine.home)

    def death_in_mid_answer(self):
        """A D is killed while it answers: its client is told, and the same turn is served when it is sent again."""
        agent = self.agent("cut-off")
        at = self.play(agent, "seed").worker
        server = self.world.server(at)
        try:
            ask(self.world.url, agent.body() | {"max_tokens": 1000}, agent.name, heard=lambda _: server.kill())
        except Unanswered:
            pass
        else:
            must(False, "an answer ended well though its worker was killed in the middle")
        self.play(agent, "reseed", "fallback")
        self.revive(at)

    def revive(self, worker):
        server = self.world.server(worker)
        server.launch()
        server.wait()
        self.world.up()

    def books_are_true(self):
        """Nothing is left of ended turns, and whoever the books call resident is found in the engine's cache."""
        for agent in self.agents:
            self.play(agent, "direct", "reseed", resident=False)
        # Engines are asked how they do once a second.
        self.world.until(lambda: not self.left(), "all turns to be over", limit=15, told=self.left)
        for name, worker in self.world.workers().items():
            load = worker["load"]
            must(load["used"] <= load["k_d"], f"{name} holds {load['used']} of {load['k_d']} tokens")
            events = (worker.get("engine") or {}).get("kv_events")
            if events:
                must(events["messages"] and not events["gaps"], f"{name}: {events}")
                # Events tell of whole blocks, the books also of what fills a part of one, and of answers' room.
                most = events["cached_tokens"] + 3 * self.engine.block * worker["sessions"]
                must(load["used"] <= most, f"{name}: the books have {load['used']} tokens, the engine's cache {most}")
        # No engine keeps KV for anybody; what P has handed out has a lease of 30 s.
        self.world.until(lambda: not self.pinned(), "engines to let go of all KV", limit=60, told=self.pinned)
        # P sent what it had not computed for this turn: it was handed back.
        backups = [turn for turn in self.turns if turn.mode == "reseed" and turn.moved > 3 * turn.computed]
        must(backups or not getattr(self.engine, "backs_up", False), "no reseed used a backup at P")

    def pinned(self):
        """Engines with KV in use though nothing runs: its share of their pools."""
        books = {name: (w.get("engine") or {}).get("books") or {} for name, w in self.world.workers().items()}
        used = {name: book.get("engine_kv_used") for name, book in books.items()}
        return {name: share for name, share in used.items() if share}

    def left(self):
        """What the gateway says is still going on."""
        kinds = [("inflight", "backlog_tokens"), ("running", "waiting", "active")]
        workers = self.world.workers()
        found = {name: {k: w[k] for k in kinds[0]} | {k: w["load"][k] for k in kinds[1]} for name, w in workers.items()}
        return {name: kind for name, kind in found.items() if any(kind.values())}

    def compare(self, alone):
        """Every answer again, from a single engine that never saw anything."""
        for turn in self.turns:
            cold = ask(alone.url, turn.body | self.engine.cold())
            must(cold.text == turn.text, f"{turn.session}, {turn.mode} ({turn.reason}): {turn.text!r} instead of {cold.text!r}")


def rows(turns):
    """Mode, reason → how many, and the medians."""
    kinds = sorted({(t.mode, t.reason) for t in turns})
    for mode, reason in kinds:
        these = [t for t in turns if (t.mode, t.reason) == (mode, reason)]
        yield {
            "mode": mode, "reason": reason, "turns": len(these), "ttft_ms": round(1000 * median(t.ttft for t in these), 1),
            "prompt": round(median(t.prompt for t in these)), "cached": round(median(t.cached for t in these)),
            "computed": round(median(t.computed for t in these)), "moved": round(median(t.moved for t in these)),
        }  # fmt: skip
