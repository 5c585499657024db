//! Block-level eviction: the tail of the session least likely to return, one session after another, never a
//! session with a lease on it. An admitted session's own diverged tail (a rewrite) goes first of all.

use std::collections::{HashMap, HashSet};

use super::super::options::Eviction;
use super::super::residency::{Change, Held};
use super::super::types::{BlockHash, BlockHashing, Millis, SessionId, StopKind, Tokens};
use super::Ledger;

/// What an eviction would do.
struct Cuts {
    /// Blocks it frees.
    freed: usize,
    /// Sessions and the blocks each keeps.
    keep: Vec<(SessionId, usize)>,
}

impl Ledger {
    /// How much longer than an `end_turn` session of the same age a session is spared from eviction.
    /// Real traces: after tool_use the next turn comes within 9 s (p50), after end_turn within 210 s.
    pub(super) fn spare_ms(&self, stop: StopKind) -> Millis {
        match stop {
            _ if self.options.eviction == Eviction::Lru => 0,
            StopKind::ToolUse => 120_000,
            StopKind::Unknown => 60_000,
            StopKind::EndTurn => 0,
        }
    }

    /// How many blocks eviction could free for a turn of `session`, counted up to `need`.
    pub(super) fn evictable(&self, need: usize, session: &SessionId, chain: &[BlockHash]) -> usize {
        self.cuts(need, session, chain).freed
    }

    /// Blocks that cannot give way: held by or reserved for granted and running turns.
    pub fn kept_blocks(&self) -> usize {
        let nobody = SessionId::new("");
        self.occupied_blocks() - self.evictable(usize::MAX, &nobody, &[])
    }

    /// Blocks of all idle sessions, shared ones as often as they are held: more than eviction can free.
    pub(super) fn idle_blocks(&self) -> usize {
        self.idle.iter().filter_map(|(_, s)| self.residency.get(s)).map(|held| held.chain.len()).sum()
    }

    /// Frees up to `need` blocks; returns how many it freed.
    pub(super) fn evict(&mut self, need: usize, session: &SessionId, chain: &[BlockHash]) -> usize {
        let cuts = self.cuts(need, session, chain);
        for (victim, keep) in cuts.keep {
            let tokens = self.tokens(keep);
            let change = Change { session: victim, keep: keep as u32, appended: Vec::new(), tokens };
            self.apply(change);
        }
        if cuts.freed > 0 {
            self.evicted.count += 1;
            self.evicted.tokens += self.tokens(cuts.freed);
        }
        cuts.freed
    }

    /// Cuts a session to `keep` blocks: its engine has dropped the rest by itself. A session with a running turn
    /// keeps what that turn stands on.
    pub fn cut(&mut self, session: &SessionId, keep: usize) {
        let tokens = self.tokens(keep);
        let longer = self.residency.get(session).is_some_and(|held| held.chain.len() > keep);
        if !longer || self.usage.get(session).is_some_and(|usage| usage.leases > 0) {
            return;
        }
        self.apply(Change { session: session.clone(), keep: keep as u32, appended: Vec::new(), tokens });
    }

    /// The engine no longer holds these blocks, nor what follows them: cuts every session that relied on one.
    pub fn lost(&mut self, blocks: &HashSet<BlockHash>) {
        if !blocks.iter().any(|block| self.residency.contains(*block)) {
            return;
        }
        let place = |(session, held): (&SessionId, &Held)| {
            Some((session.clone(), held.chain.iter().position(|own| blocks.contains(own))?))
        };
        let cut: Vec<_> = self.residency.sessions().filter_map(place).collect();
        for (session, keep) in cut {
            self.cut(&session, keep);
        }
    }

    /// The engine has dropped its whole cache.
    pub fn forget_all(&mut self) {
        let all: Vec<_> = self.residency.sessions().map(|(session, _)| session.clone()).collect();
        for session in all {
            self.cut(&session, 0);
        }
    }

    /// Changes the pool's size; what no longer fits is evicted, as far as no turn runs on it.
    pub fn resize(&mut self, k_d: Tokens) {
        self.k_d = k_d;
        self.drop_idle(self.occupied_blocks().saturating_sub(self.pool_blocks()));
    }

    /// Drops up to `blocks` blocks, in the order of eviction.
    pub fn drop_idle(&mut self, blocks: usize) {
        if blocks > 0 {
            self.evict(blocks, &SessionId::new(""), &[]);
        }
    }

    fn cuts(&self, need: usize, session: &SessionId, chain: &[BlockHash]) -> Cuts {
        let mut cuts = Cuts { freed: 0, keep: Vec::new() };
        // A block shared by several victims is freed with its last holder.
        let mut dropped: HashMap<BlockHash, u32, BlockHashing> = HashMap::default();
        for (victim, floor) in self.victims(session, chain) {
            if cuts.freed >= need {
                break;
            }
            let Some(held) = self.residency.get(victim) else { continue };
            let mut keep = held.chain.len();
            // Whoever holds a block holds all before it, so holders only get fewer along a chain: what this
            // session holds alone is a tail, found by a binary search and freed in one piece.
            let alone = held.chain.partition_point(|block| self.residency.refs(*block) > 1).max(floor);
            let tail = keep.saturating_sub(alone).min(need - cuts.freed);
            keep -= tail;
            cuts.freed += tail;
            while keep > floor && cuts.freed < need {
                keep -= 1;
                let block = held.chain[keep];
                let refs = self.residency.refs(block);
                let last = refs == 1 || {
                    let seen = dropped.entry(block).or_insert(0);
                    *seen += 1;
                    *seen == refs
                };
                cuts.freed += usize::from(last);
            }
            if keep < held.chain.len() {
                cuts.keep.push((victim.clone(), keep));
            }
        }
        cuts
    }

    /// Sessions in the order they give way, each with the blocks it must keep.
    fn victims<'a>(
        &'a self,
        session: &'a SessionId,
        chain: &[BlockHash],
    ) -> impl Iterator<Item = (&'a SessionId, usize)> {
        let own = self.alone(session).then(|| (session, self.residency.own_prefix(session, chain)));
        own.into_iter().chain(self.idle.iter().map(|(_, victim)| (victim, 0)))
    }

    /// Whether the session's only turn is the one being admitted.
    fn alone(&self, session: &SessionId) -> bool {
        self.usage.get(session).is_some_and(|u| u.leases == 1)
    }

    /// Blocks the session holds that `chain` does not go on with, when nobody else runs on them.
    pub(super) fn rewritten(&self, session: &SessionId, chain: &[BlockHash]) -> usize {
        let held = self.residency.get(session).filter(|_| self.alone(session));
        held.map_or(0, |held| held.chain.len() - self.residency.own_prefix(session, chain))
    }

    pub(super) fn tokens(&self, blocks: usize) -> Tokens {
        blocks as Tokens * Tokens::from(self.options.block_tokens)
    }
}
