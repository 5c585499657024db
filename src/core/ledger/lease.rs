//! Leases: what a turn has reserved and pinned, and the book-keeping when it begins and ends.

use std::sync::Arc;

use super::super::residency::Change;
use super::super::types::{BlockHash, Millis, RejectReason, SessionId, Tokens};
use super::{AdmitReply, AdmitRequest, Ledger, LedgerEvent};
use crate::core::admit::AdmitTerms;

/// How long a message may be on its way, in ms.
pub(super) const LATE_MS: Millis = 60_000;
/// Ids remembered at most.
const MOST_SETTLED: usize = 1 << 16;

/// Where a lease is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Granted without a reservation (`reserve = check`).
    Granted,
    /// As before, and its turn is here and waits for room: it no longer expires.
    Waiting,
    /// Granted, its blocks reserved.
    Reserved,
    /// The turn runs; it no longer expires.
    Running,
}

#[derive(Debug)]
pub(super) struct LeaseState {
    pub session: SessionId,
    pub chain: Arc<[BlockHash]>,
    /// Blocks of `chain` that are held.
    pub reuse: usize,
    /// First block of `chain[..reuse]` this lease holds by a pin of its own; those before it are held by the
    /// session's chain, which does not shrink while a lease is on it.
    pub pinned_from: usize,
    pub phase: Phase,
    /// Blocks the turn needs beyond `reuse`; they count in `reserved_blocks` if it [counts](Self::counts).
    pub blocks: usize,
    /// What Admit took, in tokens.
    pub tokens: Tokens,
    /// `input` accounting: how far the running turn is beyond what the session is known to hold.
    pub tokens_beyond_held: Tokens,
    pub expires_at: Millis,
    pub grant: AdmitReply,
}

impl LeaseState {
    /// Whether it counts in `used`.
    pub fn counts(&self) -> bool {
        matches!(self.phase, Phase::Reserved | Phase::Running)
    }
}

impl Ledger {
    /// A lease for `request` with its reusable blocks pinned, not yet in the books.
    pub(super) fn open(&mut self, request: &AdmitRequest, now: Millis) -> LeaseState {
        let session = &request.session;
        let reuse = self.residency.prefix(&request.chain);
        let usage = self.usage.entry(session.clone()).or_default();
        let alone = usage.leases == 0;
        usage.leases += 1;
        if alone && !planted!(RunningEvicted) {
            self.idle.remove(&(usage.key, session.clone()));
        }
        // A sibling's commit may cut the chain both turns stand on, so only the first leans on it.
        let pinned_from = if alone { self.residency.own_prefix(session, &request.chain) } else { 0 };
        self.residency.pin(&request.chain[pinned_from..reuse]);
        let held = self.residency.get(session).map_or(0, |h| h.tokens);
        let output = if self.options.output_reserve { request.output_reserve } else { 0 };
        let length = request.input_len + output;
        LeaseState {
            session: session.clone(),
            chain: request.chain.clone(),
            reuse,
            pinned_from,
            phase: Phase::Granted,
            blocks: self.blocks_up(length).saturating_sub(reuse),
            tokens: 0,
            tokens_beyond_held: length.saturating_sub(held),
            expires_at: now + self.options.lease_ms,
            grant: AdmitReply::Rejected { reason: RejectReason::NoDCapacity, terms: AdmitTerms::default() },
        }
    }

    /// Undoes [`Ledger::open`] for a lease that never entered the books.
    pub(super) fn close(&mut self, session: &SessionId, lease: &LeaseState, now: Millis) {
        self.unpin(lease);
        let key = self.usage.get(session).map_or(now, |u| u.key);
        self.idle_again(session, key);
    }

    /// Counts the lease's blocks as reserved.
    pub(super) fn reserve(&mut self, lease: &mut LeaseState) {
        debug_assert!(!lease.counts());
        lease.phase = Phase::Reserved;
        self.reserved_blocks += lease.blocks;
    }

    /// Reserves the lease's blocks in the pool, evicting idle KV as an engine would.
    pub(super) fn make_room(&mut self, lease: &mut LeaseState) -> bool {
        let need = (self.occupied_blocks() + lease.blocks).saturating_sub(self.pool_blocks());
        let (session, chain) = (lease.session.clone(), lease.chain.clone());
        if self.evictable(need, &session, &chain) < need {
            return false;
        }
        self.evict(need, &session, &chain);
        self.reserve(lease);
        true
    }

    /// Takes a lease out of the reserved blocks.
    pub(super) fn settle(&mut self, lease: &LeaseState) {
        if lease.counts() {
            self.reserved_blocks -= lease.blocks;
        }
    }

    /// Drops a lease's own pins.
    pub(super) fn unpin(&mut self, lease: &LeaseState) {
        let freed = self.residency.unpin(&lease.chain[lease.pinned_from..lease.reuse]);
        self.freed(freed);
    }

    /// Before a commit may cut the session's chain: its other turns stop leaning on it.
    pub(super) fn guard_siblings(&mut self, session: &SessionId) {
        if self.usage.get(session).is_none_or(|u| u.leases < 2) {
            return;
        }
        let siblings = self.leases.values_mut().filter(|l| l.session == *session);
        for lease in siblings {
            self.residency.pin(&lease.chain[..lease.pinned_from.min(lease.reuse)]);
            lease.pinned_from = 0;
        }
    }

    /// Changes what a session holds, frees what nobody holds any more, tells the outside.
    pub(super) fn apply(&mut self, change: Change) {
        if change.tokens == 0 {
            if let Some(usage) = self.usage.get(&change.session) {
                self.idle.remove(&(usage.key, change.session.clone()));
                if usage.leases == 0 {
                    self.usage.remove(&change.session);
                }
            }
            if self.residency.get(&change.session).is_none() {
                return;
            }
        }
        let freed = self.residency.set(&change);
        self.events.push(LedgerEvent::Held(change));
        self.freed(freed);
    }

    fn freed(&mut self, blocks: Vec<BlockHash>) {
        if !blocks.is_empty() {
            self.events.push(LedgerEvent::Freed(blocks));
        }
    }

    /// The last word on a lease: remembers the id, and makes its session evictable again.
    pub(super) fn finish(&mut self, request_id: &str, session: &SessionId, key: Millis, now: Millis) {
        self.settled(request_id, AdmitReply::Stale, now);
        self.events.push(LedgerEvent::LeaseEnded { request_id: request_id.to_owned() });
        self.idle_again(session, key);
    }

    /// Keeps the last word on an id, so that a late message about it is known as late.
    pub(super) fn settled(&mut self, request_id: &str, reply: AdmitReply, now: Millis) {
        let id: Arc<str> = request_id.into();
        if self.settled.insert(id.clone(), reply).is_none() {
            self.settled_order.push_back((now + LATE_MS.max(self.options.lease_ms), id));
        }
        self.forget_settled(now);
    }

    /// Forgets the ids whose messages can't be on their way any more.
    pub(super) fn forget_settled(&mut self, now: Millis) {
        while self.settled_order.len() > MOST_SETTLED
            || self.settled_order.front().is_some_and(|(until, _)| *until <= now)
        {
            let Some((_, id)) = self.settled_order.pop_front() else { break };
            self.settled.remove(&id);
        }
    }

    fn idle_again(&mut self, session: &SessionId, key: Millis) {
        let Some(usage) = self.usage.get_mut(session) else { return };
        usage.leases -= 1;
        usage.key = key;
        if usage.leases > 0 {
            return;
        }
        if self.residency.get(session).is_some() {
            self.idle.insert((key, session.clone()));
        } else {
            self.usage.remove(session);
        }
    }
}
