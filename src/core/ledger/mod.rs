//! The worker's truth about its KV: sessions, blocks, leases, epoch, eviction. Runs at a node, inside the
//! worker actor (`admission = "local"`) and in the replay lab: one type behind one message.
//!
//! Life of a turn at a D: [`Ledger::admit`] reserves room and answers with a lease; [`Ledger::start`] turns the
//! lease into a running turn (or [`Ledger::force`] starts a Fallback without one); [`Ledger::commit`] makes the
//! KV the session's, or [`Ledger::release`] gives the room back. Pool invariant, at every instant:
//! `blocks held + blocks reserved ≤ K_d / block`.

mod evict;
mod lease;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use super::admit::{AdmitTerms, Verdict, admit, may_evict};
use super::options::{Accounting, Options, Reserve};
use super::residency::{Change, Residency};
use super::types::{BlockHash, Millis, Mode, RejectReason, SessionId, StopKind, Tokens};
use lease::{LeaseState, Phase};

/// A request for admission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdmitRequest {
    /// Idempotency key of the attempt.
    pub request_id: String,
    /// `s(r)`.
    pub session: SessionId,
    /// `t(r)`.
    pub turn: u32,
    /// Hashes of all whole blocks of the prompt.
    pub chain: Arc<[BlockHash]>,
    /// `input_len(r)` in tokens.
    pub input_len: Tokens,
    /// Output tokens to reserve (A5).
    pub output_reserve: Tokens,
}

/// The ledger's answer to [`Ledger::admit`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AdmitReply {
    /// A lease was granted (or had been, for the same request id).
    Admitted {
        /// Direct, Seed or Reseed.
        mode: Mode,
        /// Blocks of the request's chain that are held, from the front.
        reuse_blocks: u32,
        /// Tokens reserved beyond those.
        reserved: Tokens,
        /// When the lease expires unless the turn begins.
        expires_at: Millis,
        /// What the decision was made from.
        terms: AdmitTerms,
    },
    /// Refused.
    Rejected {
        /// Why.
        reason: RejectReason,
        /// What the decision was made from.
        terms: AdmitTerms,
    },
    /// The id was already finished, released or expired: a late message.
    Stale,
}

/// Why a turn cannot start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartError {
    /// No lease of that id: never granted, expired, or of an older epoch.
    NoLease,
    /// The pool has no room now; try again when something was released.
    NoRoom,
}

/// A change the outside is told about, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LedgerEvent {
    /// What a session holds changed.
    Held(Change),
    /// Blocks left the pool, in the order of their chain (already contained in the changes; the pool frees their memory).
    Freed(Vec<BlockHash>),
    /// A lease ended: committed, released or expired.
    LeaseEnded {
        /// Its request id.
        request_id: String,
    },
    /// The host-memory tier beside the pool took backups. The ledger itself never says so.
    BackedUp(Vec<BlockHash>),
    /// The tier dropped backups.
    BackupDropped(Vec<BlockHash>),
}

/// How loaded a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LoadReport {
    /// `K_d` in tokens.
    pub k_d: Tokens,
    /// Tokens held and reserved.
    pub used: Tokens,
    /// Of these: held by or reserved for granted and running turns. Never evicted.
    pub active: Tokens,
    /// Turns running now.
    pub running: u32,
    /// Turns waiting for the engine.
    pub waiting: u32,
    /// Prompt tokens queued or being computed.
    pub queued_tokens: Tokens,
}

/// See the module.
#[derive(Debug)]
pub struct Ledger {
    options: Options,
    k_d: Tokens,
    epoch: u64,
    residency: Residency,
    leases: HashMap<String, LeaseState>,
    /// What an Admit of an id that was refused or has ended lately gets: a late duplicate opens no new lease.
    settled: HashMap<Arc<str>, AdmitReply>,
    /// Until when, oldest first.
    settled_order: VecDeque<(Millis, Arc<str>)>,
    /// Idle sessions in eviction order.
    idle: BTreeSet<(Millis, SessionId)>,
    usage: HashMap<SessionId, Usage>,
    reserved_blocks: usize,
    events: Vec<LedgerEvent>,
    evicted: Evicted,
}

/// Evictions and what they freed. Each frees what one turn lacks, in whole blocks from tails: `tokens / count` is
/// the mean size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Evicted {
    /// Evictions.
    pub count: u64,
    /// Tokens they freed.
    pub tokens: Tokens,
    /// Of these: to admit a Direct turn.
    pub direct: u64,
    /// Tokens those freed.
    pub direct_tokens: Tokens,
}

impl std::ops::AddAssign for Evicted {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.tokens += other.tokens;
        self.direct += other.direct;
        self.direct_tokens += other.direct_tokens;
    }
}

/// What eviction needs to know of a session.
#[derive(Debug, Clone, Copy, Default)]
struct Usage {
    /// Leases that hold it. Above 0 it is never evicted.
    leases: u32,
    /// Its key in `idle`: smaller goes first.
    key: Millis,
}

impl Ledger {
    /// An empty pool of `k_d` tokens. `epoch` names this incarnation (not 0).
    pub fn new(options: Options, k_d: Tokens, epoch: u64) -> Self {
        Self {
            options,
            k_d,
            epoch,
            residency: Residency::default(),
            leases: HashMap::new(),
            settled: HashMap::new(),
            settled_order: VecDeque::new(),
            idle: BTreeSet::new(),
            usage: HashMap::new(),
            reserved_blocks: 0,
            events: Vec::new(),
            evicted: Evicted::default(),
        }
    }

    /// This incarnation.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// `K_d` in tokens.
    pub fn k_d(&self) -> Tokens {
        self.k_d
    }

    /// What is held.
    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    /// Evictions since the start.
    pub fn evicted(&self) -> Evicted {
        self.evicted
    }

    /// The changes since the last call, in order.
    pub fn take_events(&mut self) -> Vec<LedgerEvent> {
        std::mem::take(&mut self.events)
    }

    /// Algorithm 2, reserving (A4): evicts what it must and grants a lease in one step. The same request id
    /// gets the same answer, a refusal too: who was refused has gone on and would not return a lease. An id that has
    /// ended gets [`AdmitReply::Stale`].
    pub fn admit(&mut self, request: &AdmitRequest, now: Millis) -> AdmitReply {
        self.expire(now);
        if let Some(lease) = self.leases.get(&request.request_id).filter(|_| !planted!(AdmitNotIdempotent)) {
            return lease.grant;
        }
        if let Some(reply) = self.settled.get(&*request.request_id) {
            return *reply;
        }
        let reply = self.decide(request, now);
        if let AdmitReply::Rejected { .. } = reply {
            self.settled(&request.request_id, reply, now);
        }
        reply
    }

    fn decide(&mut self, request: &AdmitRequest, now: Millis) -> AdmitReply {
        let terms = self.glance(request);
        if let Verdict::Reject(reason) = admit(&terms, &self.options) {
            return AdmitReply::Rejected { reason, terms };
        }
        let mut lease = self.open(request, now);
        let terms = self.terms(request, &lease);
        match admit(&terms, &self.options) {
            Verdict::Admit { mode, take, evict } => {
                let over = (terms.used + take).saturating_sub(self.options.high_water(self.k_d));
                // Its own rewritten tail can't give way any more once the turn runs.
                let own = self.rewritten(&request.session, &request.chain).min(self.blocks_up(over));
                let need = self.blocks_up(evict).max(own);
                let freed = self.evict(need, &request.session, &request.chain);
                if mode == Mode::Direct && freed > 0 {
                    self.evicted.direct += 1;
                    self.evicted.direct_tokens += self.tokens(freed);
                }
                lease.tokens = take;
                lease.grant = AdmitReply::Admitted {
                    mode,
                    reuse_blocks: lease.reuse as u32,
                    reserved: take,
                    expires_at: lease.expires_at,
                    terms,
                };
                let grant = lease.grant;
                if self.options.reserve == Reserve::Lease {
                    // `input` accounting counts tokens, the pool blocks: where they differ `start` asks again.
                    self.make_room(&mut lease);
                }
                self.leases.insert(request.request_id.clone(), lease);
                grant
            }
            Verdict::Reject(reason) => {
                self.close(&request.session, &lease, now);
                AdmitReply::Rejected { reason, terms }
            }
        }
    }

    /// The terms without eviction.
    fn plain_terms(&self, request: &AdmitRequest, reuse: usize) -> AdmitTerms {
        let reused = self.tokens(reuse);
        AdmitTerms {
            k_d: self.k_d,
            used: self.used(),
            resident: self.residency.get(&request.session).is_some(),
            reused,
            append_len: request.input_len.saturating_sub(reused),
            input_len: request.input_len,
            turn: request.turn,
            output_reserve: request.output_reserve,
            evictable: 0,
        }
    }

    /// The terms with an upper bound of what eviction could free: all of every idle session. Most rejects (a wait
    /// queue that was woken) end here, before anything is pinned.
    fn glance(&self, request: &AdmitRequest) -> AdmitTerms {
        let mut terms = self.plain_terms(request, self.residency.prefix(&request.chain));
        if may_evict(&self.options) {
            terms.evictable = self.tokens(self.idle_blocks()).min(terms.used);
        }
        terms
    }

    /// Line 1 and the rest of what Algorithm 2 looks at.
    fn terms(&self, request: &AdmitRequest, lease: &LeaseState) -> AdmitTerms {
        let block = Tokens::from(self.options.block_tokens);
        let mut terms = self.plain_terms(request, lease.reuse);
        if may_evict(&self.options) && matches!(admit(&terms, &self.options), Verdict::Reject(_)) {
            // Only a turn that does not fit as it is pays for the search; it stops at what is missing.
            let missing = (terms.used + terms.input_len + terms.output_reserve + block)
                .saturating_sub(self.options.high_water(self.k_d));
            let found = self.evictable(self.blocks_up(missing), &request.session, &request.chain);
            terms.evictable = self.tokens(found);
        }
        terms
    }

    /// `used` of Algorithm 2 line 1, by the accounting option.
    fn used(&self) -> Tokens {
        match self.options.accounting {
            Accounting::Marginal => {
                self.occupied_blocks() as Tokens * Tokens::from(self.options.block_tokens)
            }
            Accounting::Input => {
                let running: Tokens =
                    self.leases.values().filter(|l| l.counts()).map(|l| l.tokens_beyond_held).sum();
                self.residency.session_tokens() + running
            }
        }
    }

    /// Turns a lease into a running turn. Repeating it is harmless.
    ///
    /// # Errors
    /// [`StartError::NoLease`]; [`StartError::NoRoom`] only where grants are not reserved (`reserve = check`): the
    /// lease stays until it is started again or released.
    pub fn start(&mut self, request_id: &str, now: Millis) -> Result<u32, StartError> {
        self.expire(now);
        let Some(mut lease) = self.leases.remove(request_id) else {
            return Err(StartError::NoLease);
        };
        let room = lease.counts() || self.make_room(&mut lease);
        let reuse = lease.reuse as u32;
        lease.phase = if room { Phase::Running } else { Phase::Waiting };
        self.leases.insert(request_id.to_owned(), lease);
        if room { Ok(reuse) } else { Err(StartError::NoRoom) }
    }

    /// Starts a turn nobody admitted (Fallback, or a P's own work): limited by the pool, not by ρ.
    /// Returns the blocks of its chain that are held.
    ///
    /// # Errors
    /// [`StartError::NoRoom`]: try again when something was released. [`StartError::NoLease`]: the id has ended.
    pub fn force(&mut self, request: &AdmitRequest, now: Millis) -> Result<u32, StartError> {
        self.expire(now);
        if self.leases.contains_key(&request.request_id) {
            return self.start(&request.request_id, now);
        }
        if self.settled.get(&*request.request_id) == Some(&AdmitReply::Stale) {
            return Err(StartError::NoLease);
        }
        let mut lease = self.open(request, now);
        // Nobody promised room for the whole answer: it gets what the pool has beside the prompt.
        lease.blocks = lease.blocks.min(self.pool_blocks().saturating_sub(lease.reuse));
        if !self.make_room(&mut lease) {
            self.close(&request.session, &lease, now);
            return Err(StartError::NoRoom);
        }
        lease.phase = Phase::Running;
        let reuse = lease.reuse as u32;
        self.leases.insert(request.request_id.clone(), lease);
        Ok(reuse)
    }

    /// Makes a running turn's reservation at least `blocks` beyond what it reuses (an output longer than was
    /// reserved). `false`: not running, or no room; the turn has to stop here.
    pub fn grow(&mut self, request_id: &str, blocks: usize) -> bool {
        let Some(lease) = self.leases.get(request_id).filter(|l| l.phase == Phase::Running) else {
            return false;
        };
        let (more, session, chain) =
            (blocks.saturating_sub(lease.blocks), lease.session.clone(), lease.chain.clone());
        let need = (self.occupied_blocks() + more).saturating_sub(self.pool_blocks());
        if self.evictable(need, &session, &chain) < need {
            return false;
        }
        self.evict(need, &session, &chain);
        self.reserved_blocks += more;
        if let Some(lease) = self.leases.get_mut(request_id) {
            lease.blocks += more;
        }
        true
    }

    /// Ends a turn whose KV is complete: `chain` (whole blocks of prompt plus output) of `tokens` tokens is now
    /// what the session holds. Unknown ids are ignored.
    pub fn commit(
        &mut self,
        request_id: &str,
        chain: &[BlockHash],
        tokens: Tokens,
        stop: StopKind,
        now: Millis,
    ) {
        let Some(lease) = self.leases.remove(request_id) else { return };
        let session = lease.session.clone();
        self.settle(&lease);
        self.guard_siblings(&session);
        let keep = self.residency.own_prefix(&session, chain);
        let change = Change {
            session: session.clone(),
            keep: keep as u32,
            appended: chain.get(keep..).unwrap_or_default().to_vec(),
            tokens,
        };
        self.apply(change);
        self.unpin(&lease);
        self.finish(request_id, &session, now + self.spare_ms(stop), now);
        // Only KV beyond what was reserved can exceed the pool; the caller should have grown the lease.
        let over = self.occupied_blocks().saturating_sub(self.pool_blocks());
        self.evict(over, &session, &[]);
    }

    /// Ends a turn that leaves nothing new. Returns whether the id was known. Safe to repeat. An unknown id is
    /// remembered: its Admit may still be on the way, and must not open a lease nobody will return.
    pub fn release(&mut self, request_id: &str, now: Millis) -> bool {
        let Some(lease) = self.leases.remove(request_id) else {
            self.settled(request_id, AdmitReply::Stale, now);
            return false;
        };
        self.settle(&lease);
        self.unpin(&lease);
        let key = self.usage.get(&lease.session).map_or(now, |u| u.key);
        self.finish(request_id, &lease.session.clone(), key, now);
        true
    }

    /// Extends a granted lease by its full lifetime. Returns whether it still exists.
    pub fn renew(&mut self, request_id: &str, now: Millis) -> bool {
        let ttl = self.options.lease_ms;
        self.leases.get_mut(request_id).is_some_and(|lease| {
            lease.expires_at = now + ttl;
            true
        })
    }

    /// Drops a session that ended, unless a turn of it runs.
    pub fn end_session(&mut self, session: &SessionId) {
        if self.usage.get(session).is_some_and(|u| u.leases == 0) {
            self.apply(Change { session: session.clone(), keep: 0, appended: Vec::new(), tokens: 0 });
        }
    }

    /// Releases every granted lease that expired without a start.
    pub fn expire(&mut self, now: Millis) {
        let mut late: Vec<String> = self
            .leases
            .iter()
            .filter(|(_, l)| l.phase == Phase::Granted || l.phase == Phase::Reserved)
            .filter(|(_, l)| l.expires_at <= now && !planted!(ExpiredLeaseHonoured))
            .map(|(id, _)| id.clone())
            .collect();
        late.sort_unstable();
        for id in late {
            self.release(&id, now);
        }
        self.forget_settled(now);
    }

    /// Load now. The engine adds `running`, `waiting` and `queued_tokens`.
    pub fn load(&self) -> LoadReport {
        let block = Tokens::from(self.options.block_tokens);
        let busy = self.leases.values().map(|l| l.reuse + l.blocks).sum::<usize>() as Tokens * block;
        LoadReport {
            k_d: self.k_d,
            used: self.occupied_blocks() as Tokens * block,
            active: busy.min(self.k_d),
            running: self.leases.values().filter(|l| l.phase == Phase::Running).count() as u32,
            ..LoadReport::default()
        }
    }

    /// Whether a turn of the session is granted or runs. What such a session loses is a tail it has rewritten.
    pub fn is_busy(&self, session: &SessionId) -> bool {
        self.usage.get(session).is_some_and(|usage| usage.leases > 0)
    }

    /// Whether the turn of a lease has come: it runs, or waits for room.
    pub fn is_taken(&self, request_id: &str) -> bool {
        self.leases.get(request_id).is_some_and(|l| matches!(l.phase, Phase::Running | Phase::Waiting))
    }

    /// Leases granted or running.
    pub fn leases(&self) -> usize {
        self.leases.len()
    }

    /// Blocks held plus blocks reserved.
    pub fn occupied_blocks(&self) -> usize {
        self.residency.blocks() + self.reserved_blocks
    }

    /// Blocks of the pool.
    pub fn pool_blocks(&self) -> usize {
        self.options.blocks(self.k_d)
    }

    fn blocks_up(&self, tokens: Tokens) -> usize {
        tokens.div_ceil(self.options.block_tokens.into()) as usize
    }
}
