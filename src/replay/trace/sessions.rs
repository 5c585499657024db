//! Reader of `*.sessions.jsonl`: one session a line.

use std::collections::HashMap;

use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64;

use super::{MAX_TOKENS, SessionSpec, Trace, TurnSpec, line, micros};
use crate::core::types::{StopKind, Tokens};

#[derive(Deserialize)]
struct RawSession {
    session: String,
    parent: Option<String>,
    parent_turn: Option<usize>,
    kind: Option<String>,
    start: Option<f64>,
    #[serde(default)]
    models: Vec<String>,
    block: u32,
    shared_prefix_tokens: Tokens,
    turns: Vec<RawTurn>,
}

#[derive(Deserialize)]
struct RawTurn {
    t: f64,
    r#in: Tokens,
    out: Tokens,
    gap: Option<f64>,
    api: Option<f64>,
    #[serde(default)]
    stop: String,
    h: Vec<(u64, u32)>,
}

pub(super) fn parse<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Result<Trace, String> {
    let mut trace = Trace::default();
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut waiting: Vec<(usize, usize, String, usize, f64)> = Vec::new();
    for (number, text) in lines {
        let raw: RawSession = line(number, text)?;
        let at = |message: String| format!("line {number}: {message}");
        if raw.block == 0 || (trace.block != 0 && trace.block != raw.block) {
            return Err(at(format!("field `block`: {} where {} is expected", raw.block, trace.block.max(1))));
        }
        trace.block = raw.block;
        let place = trace.sessions.len();
        if places.insert(raw.session.clone(), place).is_some() {
            return Err(at(format!("field `session`: {:?} appears twice", raw.session)));
        }
        if let Some(parent) = raw.parent.clone() {
            let turn =
                raw.parent_turn.ok_or_else(|| at("field `parent_turn`: missing for a sub-agent".into()))?;
            let start = raw.start.ok_or_else(|| at("field `start`: missing for a sub-agent".into()))?;
            waiting.push((number, place, parent, turn, start));
        }
        trace.sessions.push(session(raw).map_err(at)?);
    }
    for (number, place, parent, turn, start) in waiting {
        adopt(&mut trace, &places, place, &parent, turn, start).map_err(|e| format!("line {number}: {e}"))?;
    }
    Ok(trace)
}

/// Ties a sub-agent to its parent.
fn adopt(
    trace: &mut Trace,
    places: &HashMap<String, usize>,
    place: usize,
    parent: &str,
    turn: usize,
    start: f64,
) -> Result<(), String> {
    let start = micros(start, 1e6).ok_or(format!("field `start`: {start} is no time"))?;
    // The file may be a sample without the parent: the sub-agent is then a session of its own.
    let Some(&up) = places.get(parent) else { return Ok(()) };
    if up == place {
        return Err("field `parent`: the session itself".into());
    }
    // A sub-agent may start after its parent's last recorded turn: it then starts beside that one.
    let turns = &trace.sessions[up].turns;
    let turn = turn.min(turns.len() - 1);
    let starts = turns[turn].at;
    trace.sessions[place].parent = Some((up, turn));
    trace.sessions[place].delay = start.saturating_sub(starts);
    trace.sessions[place].family = trace.sessions[up].family;
    Ok(())
}

fn session(raw: RawSession) -> Result<SessionSpec, String> {
    if raw.turns.is_empty() {
        return Err("field `turns`: empty".into());
    }
    if let Some(kind) = raw.kind.filter(|kind| kind != "main" && !kind.starts_with("subagent")) {
        return Err(format!("field `kind`: {kind:?} is neither \"main\" nor \"subagent…\""));
    }
    let first = raw.turns[0].r#in;
    if raw.shared_prefix_tokens > first {
        let prefix = raw.shared_prefix_tokens;
        return Err(format!("field `shared_prefix_tokens`: {prefix}, the first prompt has {first}"));
    }
    let mut turns: Vec<TurnSpec> = Vec::with_capacity(raw.turns.len());
    let mut previous: Option<(f64, Option<f64>)> = None;
    for (i, t) in raw.turns.iter().enumerate() {
        let spec = turn(t, previous, raw.block).map_err(|e| format!("field `turns[{i}].{e}"))?;
        turns.push(spec);
        previous = Some((t.t, t.api));
    }
    Ok(SessionSpec {
        family: xxh3_64(raw.session.as_bytes()),
        group: xxh3_64(format!("{}/{}", raw.models.join(","), raw.shared_prefix_tokens).as_bytes()),
        name: raw.session,
        parent: None,
        delay: 0,
        shared_prefix: raw.shared_prefix_tokens,
        turns,
    })
}

fn turn(t: &RawTurn, previous: Option<(f64, Option<f64>)>, block: u32) -> Result<TurnSpec, String> {
    let at = micros(t.t, 1e6).ok_or(format!("t`: {} is no time", t.t))?;
    if t.r#in == 0 || t.r#in > MAX_TOKENS {
        return Err(format!("in`: {} tokens", t.r#in));
    }
    if t.out > MAX_TOKENS {
        return Err(format!("out`: {} tokens", t.out));
    }
    if let Some((start, n)) =
        t.h.iter().find(|(start, n)| *n == 0 || start.checked_add(u64::from(*n)).is_none())
    {
        return Err(format!("h`: no run of {n} blocks from {start}"));
    }
    let blocks: u64 = t.h.iter().map(|(_, n)| u64::from(*n)).sum();
    if blocks != t.r#in / u64::from(block) {
        return Err(format!("h`: {blocks} blocks for {} tokens", t.r#in));
    }
    if let Some((before, _)) = previous.filter(|(before, _)| t.t < *before) {
        return Err(format!("t`: {} lies before the turn before, {before}", t.t));
    }
    if let Some(api) = t.api.filter(|api| micros(*api, 1e6).is_none()) {
        return Err(format!("api`: {api} is no time"));
    }
    // A missing gap is what lies between the recorded turns.
    let between = previous.map_or(0.0, |(start, api)| (t.t - start - api.unwrap_or(0.0)).max(0.0));
    let gap = t.gap.unwrap_or(between);
    Ok(TurnSpec {
        at,
        input: t.r#in,
        output: t.out.max(1),
        gap: micros(gap, 1e6).ok_or(format!("gap`: {gap} is no time"))?,
        stop: stop(&t.stop).ok_or(format!("stop`: {:?} is unknown", t.stop))?,
        runs: t.h.clone(),
    })
}

fn stop(text: &str) -> Option<StopKind> {
    match text {
        "tool_use" => Some(StopKind::ToolUse),
        "end_turn" => Some(StopKind::EndTurn),
        "" | "max_tokens" | "stop_sequence" => Some(StopKind::Unknown),
        _ => None,
    }
}
