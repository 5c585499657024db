//! Placement (R4, production): the D for a session that has no usable pin.
//!
//! Algorithm 1's score sends every new session to the first worker that ever held the shared system prompt.
//! Here the cheapest worker wins, counted in seconds: the work D and P would have to do now, the KV demand of
//! the sessions that live there, what runs there, and a bonus for the old pin.

use super::cost::{CostModel, LadderInput, cheapest};
use super::options::Options;
use super::route::{Ask, Candidate, PrefillView, SessionState};
use super::types::{Tokens, WorkerId};

/// Seconds charged for a worker whose live sessions fill its pool exactly.
const DEMAND: f64 = 1.0;
/// Seconds charged per turn in flight.
const PER_INFLIGHT: f64 = 0.05;
/// Seconds credited to the old pin.
const STICKY: f64 = 0.5;
/// Seconds charged to a worker without room for the turn beside what runs there.
const NO_ROOM: f64 = 10.0;
/// Seconds charged to a worker that started just now; falls to 0 as it warms up.
const COLD: f64 = 2.0;

/// The cheapest candidate; ties go to fewer in flight, fewer assigned, lowest id. `None` without candidates.
pub fn place(
    ask: &Ask,
    session: &SessionState,
    allowed: &[&Candidate],
    prefills: &[PrefillView],
    options: &Options,
    model: &CostModel,
) -> Option<WorkerId> {
    let price = |c: &&&Candidate| seconds(c, ask, session, prefills, options, model);
    allowed
        .iter()
        .map(|c| (price(&c), c))
        .min_by(|(a, x), (b, y)| {
            a.total_cmp(b).then_with(|| (x.inflight, x.assigned, x.id).cmp(&(y.inflight, y.assigned, y.id)))
        })
        .map(|(_, c)| c.id)
}

/// What it costs to put the session on `c`, in seconds.
pub fn seconds(
    c: &Candidate,
    ask: &Ask,
    session: &SessionState,
    prefills: &[PrefillView],
    options: &Options,
    model: &CostModel,
) -> f64 {
    let held = Tokens::from(c.overlap) * Tokens::from(options.block_tokens);
    let p = prefills.iter().min_by_key(|p| (p.backlog, p.id));
    let (_, work_ms) = cheapest(
        &LadderInput {
            input_len: ask.input_len,
            held_d: held.min(ask.input_len),
            backup: c.backup,
            prefix_len: ask.input_len.saturating_sub(ask.append_len),
            beta: options.d2p_staleness_budget_tokens.unwrap_or(0),
            held_p: p.map(|p| p.held),
            backlog_p: p.map_or(0, |p| p.backlog),
            backlog_d: c.load.map_or(0, |l| l.queued_tokens),
            running_d: c.load.map_or(c.inflight, |l| l.running.max(c.inflight)),
        },
        model,
    );
    let (demand, room) = c.load.map_or((0.0, true), |l| {
        let high_water = options.high_water(l.k_d).max(1);
        (c.pinned_tokens as f64 / high_water as f64, l.active + ask.input_len <= high_water + held)
    });
    let mut seconds = work_ms / 1000.0 + DEMAND * demand + PER_INFLIGHT * f64::from(c.inflight);
    seconds += COLD * (1.0 - c.warm.clamp(0.0, 1.0));
    if !room {
        seconds += NO_ROOM;
    }
    if session.pin == Some(c.id) {
        seconds -= STICKY;
    }
    seconds
}
