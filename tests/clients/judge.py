"""What the recorded requests of a client show: its lanes, its turns, and how they were served."""

import json
import subprocess
from collections import Counter, defaultdict


class Wrong(Exception):
    """The client was not served as it should be."""


def identify(binary, exchanges):
    """One dict per request, from `kvc-router identify`."""
    steps = [exchange.step() for exchange in exchanges]
    case = json.dumps([{"name": "", "steps": steps}])
    told = subprocess.run([binary, "identify", "-"], input=case, text=True, capture_output=True, check=True)
    lines = [line for line in told.stdout.splitlines() if " lane=" in line]
    return [dict(word.split("=", 1) for word in line.split(" ")[2:] if "=" in word) for line in lines]


def judge(binary, exchanges, conversations):
    """Checks the recorded turns and returns what the table shows. `conversations`: how many there must be."""
    served = [e for e in exchanges if not e.path.startswith("/v1/messages/count_tokens")]
    bad = [f"{e.path} {e.status}" for e in served if e.status != 200]
    if bad:
        raise Wrong(f"not answered: {bad}")
    places = identify(binary, served)
    lanes = defaultdict(list)
    for exchange, place in zip(served, places, strict=True):
        lanes[place["lane"]].append((exchange, place))
    main = [turns for turns in lanes.values() if len(turns) > 1]
    side = [turns for turns in lanes.values() if len(turns) == 1]
    if len(main) != conversations:
        raise Wrong(f"{len(main)} conversations, expected {conversations}: {show(places)}")
    for turns in main:
        ts = [int(place["t"]) for _, place in turns if place["how"] != "retry"]
        if ts != list(range(len(ts))):
            raise Wrong(f"t of one lane is {ts}")
        if len({exchange.session for exchange, _ in turns}) != 1:
            raise Wrong(f"one lane, several sessions: {[exchange.session for exchange, _ in turns]}")
    sessions = [turns[0][0].session for turns in lanes.values()]
    if len(set(sessions)) != len(sessions):
        raise Wrong(f"several lanes, one session: {sessions}")
    later = [exchange.mode for turns in main for exchange, _ in turns[1:]]
    if set(later) - {"direct"}:
        modes = [[exchange.mode for exchange, _ in turns] for turns in main]
        raise Wrong(f"not Direct from the second turn on: {modes}")
    first = main[0][0][1]
    return {
        "apis": sorted({exchange.path.split("?")[0] for exchange, _ in sum(main, [])}),
        "source": first["src"],
        "how": dict(Counter(place["how"] for turns in main for _, place in turns[1:])),
        "lanes": f"{len(main)} main, {len(side)} side",
        "direct": f"{len(later)}/{len(later)}",
    }


def show(places):
    return [f"{place['lane']}:{place['how']}:t{place['t']}:{place['cls']}" for place in places]
