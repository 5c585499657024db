//! D→P sync in the simulated fleet: where a D pushes what it commits or drops, the links that takes, and how stale
//! a backup is when its session comes back.

use std::collections::HashMap;

use super::fleet::{Fleet, Tick};
use super::job::JobId;
use crate::core::options::{D2pTarget, D2pTrigger};
use crate::core::sync::{SyncRule, staleness};
use crate::core::types::{BlockHash, SessionId, Tokens};

/// Names a push under way.
pub type PushId = u64;

/// Blocks on their way to a P.
#[derive(Debug)]
struct Push {
    session: SessionId,
    p: usize,
    /// Tail first.
    blocks: Vec<BlockHash>,
}

/// What a session has to do with the P workers.
#[derive(Debug, Default)]
struct Backed {
    /// The P that last computed for it, restored it or was pushed to.
    last_p: Option<usize>,
    /// Pushed since its last turn.
    pushed: bool,
    /// Pushes that have not landed.
    under_way: u32,
}

/// Figures of D→P sync.
#[derive(Debug, Clone, Default)]
pub struct SyncFigures {
    /// Tokens that travelled to backups.
    pub pushed: Tokens,
    /// Staleness of the best backup of each session that came back without residency, in tokens.
    pub stale: Vec<Tokens>,
    /// Of these: over β.
    pub over_beta: u64,
    /// Turns whose session had been pushed since its turn before.
    pub issued: u64,
    /// Of these: the push had landed.
    pub in_time: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Sync {
    rule: Option<SyncRule>,
    pushes: HashMap<PushId, Push>,
    sessions: HashMap<SessionId, Backed>,
    next_push: PushId,
    next_p: usize,
    /// What came of it.
    pub figures: SyncFigures,
}

impl Sync {
    /// Nothing under way.
    pub fn new(rule: Option<SyncRule>) -> Self {
        Self { rule, ..Self::default() }
    }

    /// A P has to do with a session.
    pub fn met(&mut self, session: &SessionId, p: usize) {
        if self.rule.is_some() {
            self.sessions.entry(session.clone()).or_default().last_p = Some(p);
        }
    }

    /// The P workers a session's KV goes to now.
    fn targets(&mut self, session: &SessionId, ps: usize, policy: D2pTarget) -> Vec<usize> {
        let mut next = || {
            self.next_p += 1;
            (self.next_p - 1) % ps
        };
        match policy {
            D2pTarget::Broadcast => (0..ps).collect(),
            D2pTarget::RoundRobin => vec![next()],
            D2pTarget::LastP => {
                let known = self.sessions.get(session).and_then(|s| s.last_p);
                vec![known.unwrap_or_else(next)]
            }
        }
    }
}

impl Fleet {
    /// Pushes blocks, tail first, to the host memory beside D: its own, or that of P workers. The links to a P are
    /// serial, and apart from those of P→D.
    pub(super) fn push(&mut self, d: usize, session: &SessionId, blocks: Vec<BlockHash>) {
        let block = self.block();
        if self.ps.is_empty() {
            self.sync.figures.pushed += self.ds[d].host.insert(blocks) as Tokens * block;
            return;
        }
        let Some(rule) = self.sync.rule else { return };
        for p in self.sync.targets(session, self.ps.len(), self.options.d2p_sync_target_policy) {
            let fresh = blocks.iter().filter(|b| !self.ps[p].host.contains(**b)).count() as Tokens * block;
            if !rule.worth(fresh) {
                continue;
            }
            let us = (self.cost.transfer_ms(fresh) * 1000.0).round() as u64;
            let begin = self.now.max(self.ds[d].push_free).max(self.ps[p].push_free);
            (self.ds[d].push_free, self.ps[p].push_free) = (begin + us, begin + us);
            let id = self.sync.next_push;
            self.sync.next_push += 1;
            self.sync.pushes.insert(id, Push { session: session.clone(), p, blocks: blocks.clone() });
            let backed = self.sync.sessions.entry(session.clone()).or_default();
            (backed.pushed, backed.last_p) = (true, Some(p));
            backed.under_way += 1;
            self.due.push((begin + us, Tick::Pushed(id)));
        }
    }

    /// A push has landed.
    pub fn pushed(&mut self, id: PushId) {
        let Some(push) = self.sync.pushes.remove(&id) else { return };
        if let Some(backed) = self.sync.sessions.get_mut(&push.session) {
            backed.under_way -= 1;
        }
        let new = self.ps[push.p].host.insert(push.blocks) as Tokens;
        self.sync.figures.pushed += new * self.block();
    }

    /// A session comes back: was its push in time, and if no D holds its prefix, how far behind is its best backup?
    pub(super) fn measure_sync(&mut self, job: JobId) {
        let (Some(rule), false) = (self.sync.rule, self.ps.is_empty()) else { return };
        let j = &self.jobs[job];
        if let Some(backed) = self.sync.sessions.get_mut(&j.session)
            && std::mem::take(&mut backed.pushed)
        {
            self.sync.figures.issued += 1;
            self.sync.figures.in_time += u64::from(backed.under_way == 0);
        }
        let (block, committed) = (self.block(), j.input.saturating_sub(j.append));
        let kept = self.ds.iter().map(|d| d.ledger.residency().prefix(&j.chain)).max().unwrap_or(0);
        if committed == 0 || kept as Tokens * block + block > committed {
            return;
        }
        let run = |p| self.restorable(Some(p), 0, &j.chain, kept);
        let best = (0..self.ps.len()).map(run).max().unwrap_or(0);
        let behind = staleness(committed, (kept + best) as Tokens * block);
        self.sync.figures.stale.push(behind);
        self.sync.figures.over_beta += u64::from(!rule.within(behind));
    }

    /// Whether a D pushes what a turn commits.
    pub(super) fn pushes_commits(&self) -> bool {
        matches!(self.options.d2p_trigger, D2pTrigger::Commit | D2pTrigger::Both)
    }

    /// Whether a D pushes what it drops; the host of a fused worker always keeps it.
    pub(super) fn pushes_drops(&self) -> bool {
        self.ps.is_empty() || matches!(self.options.d2p_trigger, D2pTrigger::Evict | D2pTrigger::Both)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(name: &str) -> SessionId {
        SessionId::new(name)
    }

    #[test]
    fn targets_follow_their_policy() {
        let mut sync = Sync::new(SyncRule::of(&crate::core::options::Options {
            d2p_trigger: D2pTrigger::Evict,
            ..crate::core::options::Options::production()
        }));
        let mut to = |name, policy| sync.targets(&session(name), 2, policy);
        assert_eq!(to("a", D2pTarget::Broadcast), [0, 1]);
        assert_eq!((to("a", D2pTarget::RoundRobin), to("a", D2pTarget::RoundRobin)), (vec![0], vec![1]));
        sync.met(&session("a"), 1);
        assert_eq!(sync.targets(&session("a"), 2, D2pTarget::LastP), [1]);
    }
}
