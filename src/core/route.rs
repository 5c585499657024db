//! Algorithm 1 (Route): which D to ask for admission.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::cost::{Backup, CostModel};
use super::ledger::LoadReport;
use super::options::{Options, Overlap, Placement};
use super::placement;
use super::types::{BlockHash, Tokens, WorkerId};

/// What the router keeps per session: `Σ.pin[s]`, `Σ.rejects[s, ·]`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SessionState {
    /// `pin[s]`: the D that last served it. `None` = ⊥.
    pub pin: Option<WorkerId>,
    /// `rejects[s, d]`, without zeros.
    pub rejects: SmallVec<[(WorkerId, u32); 2]>,
}

impl SessionState {
    /// `rejects[s, d]`.
    pub fn rejects(&self, d: WorkerId) -> u32 {
        self.rejects.iter().find(|(id, _)| *id == d).map_or(0, |(_, n)| *n)
    }

    /// Algorithm 3 line 21.
    pub fn bump(&mut self, d: WorkerId) {
        match self.rejects.iter_mut().find(|(id, _)| *id == d) {
            Some((_, n)) => *n = n.saturating_add(1),
            None => self.rejects.push((d, 1)),
        }
    }

    /// Algorithm 3 line 8.
    pub fn reset(&mut self, d: WorkerId) {
        self.rejects.retain(|(id, _)| *id != d);
    }
}

/// What a D worker's mirror answers to a score query. `Option` = the signal is unavailable.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The worker.
    pub id: WorkerId,
    /// `overlap(d)` in blocks, counted as the `overlap` option says.
    pub overlap: u32,
    /// Tokens of the session the worker is known to hold. 0 = not resident.
    pub resident: Tokens,
    /// `inflight[d]`.
    pub inflight: u32,
    /// `assigned[d]`.
    pub assigned: u64,
    /// The worker's last load report.
    pub load: Option<LoadReport>,
    /// Prompt tokens of all live sessions pinned to it, resident or not.
    pub pinned_tokens: Tokens,
    /// 0 = just started, 1 = ramped up.
    pub warm: f64,
    /// What a P's backup or its own host memory could restore behind `overlap`.
    pub backup: Backup,
}

/// A P worker's state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillView {
    /// The worker.
    pub id: WorkerId,
    /// Prompt tokens dispatched to it and not done.
    pub backlog: Tokens,
    /// Tokens of this prompt it holds.
    pub held: Tokens,
}

/// The part of a request that Route looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// `t(r)`.
    pub turn: u32,
    /// `input_len(r)` in tokens.
    pub input_len: Tokens,
    /// `append_len(r)` in tokens.
    pub append_len: Tokens,
}

/// Line 10: compared lexicographically, greatest wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Score(pub i64, pub i64, pub i64, pub i64);

/// Which rule chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// Line 11.
    Score,
    /// Line 4.
    LeastRejected,
    /// R4, production.
    Placement,
}

/// A choice and what it was made from.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// `d*`.
    pub worker: WorkerId,
    /// Why.
    pub rule: Rule,
    /// The candidates compared, with their 4-tuples.
    pub scores: SmallVec<[(WorkerId, Score); 8]>,
}

/// Line 6 on a mirror: `|prefix_hashes ∩ resident[d]|` or the longest resident prefix (R3).
/// `prefix` is a binary search on a prefix-closed set, where both readings agree for chained hashes.
pub fn overlap(chain: &[BlockHash], residency: &super::residency::Residency, options: &Options) -> u32 {
    match options.overlap {
        Overlap::Prefix => residency.prefix(chain) as u32,
        Overlap::Set => chain.iter().filter(|b| residency.contains(**b)).count() as u32,
    }
}

/// Algorithm 1. `tried` are the workers this dispatch already asked (D1). `None` = ⊥: all were tried.
pub fn route(
    ask: &Ask,
    session: &SessionState,
    tried: &[WorkerId],
    candidates: &[Candidate],
    prefills: &[PrefillView],
    options: &Options,
    cost: &CostModel,
) -> Option<Choice> {
    let open = || candidates.iter().filter(|c| !tried.contains(&c.id));
    let mut allowed: SmallVec<[&Candidate; 8]> =
        open().filter(|c| session.rejects(c.id) < options.tau_reject).collect(); // lines 1-2
    let degenerate = allowed.is_empty();
    if degenerate {
        let least = open().map(|c| session.rejects(c.id)).min()?; // line 4
        allowed = open().filter(|c| session.rejects(c.id) == least).collect();
    }
    let scores = allowed.iter().map(|c| (c.id, score(c, session, options))).collect();
    let (worker, rule) = if degenerate {
        (best(&scores)?, Rule::LeastRejected)
    } else if options.placement == Placement::Cost && !pin_usable(ask, session, &allowed, options) {
        (placement::place(ask, session, &allowed, prefills, options, cost)?, Rule::Placement)
    } else {
        (best(&scores)?, Rule::Score) // line 11
    };
    Some(Choice { worker, rule, scores })
}

/// Lines 6-10.
fn score(c: &Candidate, session: &SessionState, options: &Options) -> Score {
    let sticky = i64::from(session.pin == Some(c.id));
    Score(
        i64::from(c.overlap) + i64::from(options.alpha) * sticky,
        sticky,
        -i64::from(c.inflight),
        -i64::try_from(c.assigned).unwrap_or(i64::MAX),
    )
}

/// Line 11; ties go to the lowest id (R1).
fn best(scores: &SmallVec<[(WorkerId, Score); 8]>) -> Option<WorkerId> {
    scores.iter().max_by_key(|(id, score)| (*score, std::cmp::Reverse(*id))).map(|(id, _)| *id)
}

/// R4: a pin is usable while its D is a candidate and still holds at least half of what it was left with.
fn pin_usable(ask: &Ask, session: &SessionState, allowed: &[&Candidate], options: &Options) -> bool {
    let pinned = allowed.iter().find(|c| session.pin == Some(c.id));
    pinned.is_some_and(|c| {
        let held = Tokens::from(c.overlap) * Tokens::from(options.block_tokens);
        c.resident > 0 && 2 * held >= ask.input_len.saturating_sub(ask.append_len)
    })
}

#[cfg(test)]
mod tests;
