//! Reader of Mooncake's JSONL (FAST'25 traces): one request a line, blocks named by prefix-chained ids.
//!
//! Without `session_id` the session is found as a gateway would find it: a request that starts with all whole
//! blocks of an earlier one continues it.

use std::collections::HashMap;

use serde::Deserialize;

use super::{MAX_BLOCKS, MAX_TOKENS, SessionSpec, Trace, TurnSpec, line, micros};
use crate::core::types::{StopKind, Tokens};

/// Tokens per block of these traces.
const BLOCK: u32 = 512;

#[derive(Deserialize)]
struct RawRequest {
    timestamp: Option<f64>,
    input_length: Tokens,
    output_length: Tokens,
    hash_ids: Vec<u64>,
    session_id: Option<serde_json::Value>,
    /// ms after the previous answer of the session.
    delay: Option<f64>,
}

pub(super) fn parse<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Result<Trace, String> {
    let mut trace = Trace { block: BLOCK, ..Trace::default() };
    let mut named: HashMap<String, usize> = HashMap::new();
    // Last whole block of a session's latest prompt → the session.
    let mut tips: HashMap<u64, usize> = HashMap::new();
    for (number, text) in lines {
        let raw: RawRequest = line(number, text)?;
        let at = |message: String| format!("line {number}: {message}");
        let whole = raw.input_length / u64::from(BLOCK);
        let ids = raw.hash_ids.len() as u64;
        if raw.input_length == 0 || raw.input_length > MAX_TOKENS {
            return Err(at(format!("field `input_length`: {} tokens", raw.input_length)));
        }
        if raw.output_length > MAX_TOKENS {
            return Err(at(format!("field `output_length`: {} tokens", raw.output_length)));
        }
        if (ids != whole && ids != raw.input_length.div_ceil(BLOCK.into())) || ids > MAX_BLOCKS {
            return Err(at(format!("field `hash_ids`: {ids} blocks for {} tokens", raw.input_length)));
        }
        let chain = &raw.hash_ids[..whole as usize];
        let known = match &raw.session_id {
            Some(id) => named.get(&id.to_string()).copied(),
            None => chain.iter().rev().find_map(|id| tips.get(id).copied()),
        };
        let place = known.unwrap_or_else(|| {
            trace.sessions.push(fresh(trace.sessions.len(), raw.session_id.as_ref()));
            trace.sessions.len() - 1
        });
        if let Some(id) = &raw.session_id {
            named.insert(id.to_string(), place);
        }
        let session = &mut trace.sessions[place];
        tips.retain_tip(session.turns.last(), chain.last(), place);
        session.turns.push(turn(&raw, chain, session.turns.last()).map_err(at)?);
    }
    Ok(trace)
}

trait Tips {
    fn retain_tip(&mut self, old: Option<&TurnSpec>, new: Option<&u64>, place: usize);
}

impl Tips for HashMap<u64, usize> {
    /// A session continues from its latest prompt only.
    fn retain_tip(&mut self, old: Option<&TurnSpec>, new: Option<&u64>, place: usize) {
        if let Some((start, count)) = old.and_then(|t| t.runs.last()) {
            self.remove(&(start + u64::from(*count) - 1));
        }
        if let Some(id) = new {
            self.insert(*id, place);
        }
    }
}

fn fresh(place: usize, id: Option<&serde_json::Value>) -> SessionSpec {
    let name =
        id.map_or_else(|| format!("lineage-{place}"), |id| id.to_string().trim_matches('"').to_owned());
    // Block ids are global in these files, so one family holds them all and no shared prefix is modelled.
    SessionSpec { name, parent: None, delay: 0, family: 1, group: 0, shared_prefix: 0, turns: Vec::new() }
}

fn turn(raw: &RawRequest, chain: &[u64], previous: Option<&TurnSpec>) -> Result<TurnSpec, String> {
    let delay =
        raw.delay.map(|d| micros(d, 1e3).ok_or(format!("field `delay`: {d} is no time"))).transpose()?;
    let stamp = match (raw.timestamp, previous, delay) {
        (Some(t), _, _) => micros(t, 1e3).ok_or(format!("field `timestamp`: {t} is no time"))?,
        (None, Some(p), Some(d)) => p.at + d,
        (None, ..) => return Err("field `timestamp`: missing".into()),
    };
    if let Some(before) = previous.map(|p| p.at).filter(|before| stamp < *before) {
        let before = before / 1000;
        return Err(format!("field `timestamp`: {} lies before the session's last, {before}", stamp / 1000));
    }
    // The recording has no service time: half of the distance is taken for thinking when `delay` is missing.
    let gap = delay.unwrap_or(previous.map_or(0, |p| stamp.saturating_sub(p.at) / 2));
    Ok(TurnSpec {
        at: stamp,
        input: raw.input_length,
        output: raw.output_length.max(1),
        gap,
        stop: StopKind::Unknown,
        runs: runs(chain),
    })
}

fn runs(ids: &[u64]) -> Vec<(u64, u32)> {
    let mut runs: Vec<(u64, u32)> = Vec::new();
    for id in ids {
        match runs.last_mut() {
            Some((start, count)) if start.checked_add(u64::from(*count)) == Some(*id) => *count += 1,
            _ => runs.push((*id, 1)),
        }
    }
    runs
}
