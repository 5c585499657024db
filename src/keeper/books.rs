//! The books of one engine, changed in one step under one lock: ledger, turns, slots, numbered changes.

use std::collections::HashMap;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::scale::Scale;
use super::slots::Slots;
use super::trust::Trust;
use crate::actors::api::TurnResult;
use crate::core::admit::{AdmitTerms, Verdict, admit};
use crate::core::ledger::{AdmitReply, AdmitRequest, Ledger, LedgerEvent, LoadReport, StartError};
use crate::core::options::{Eviction, Options};
use crate::core::types::{BlockHash, Millis, RejectReason, SessionId, StopKind, Tokens};
use crate::engines::reading::{Pulse, Reading};
use crate::wire::events::Snapshot;
use crate::wire::log::Log;

/// Bytes of past changes kept for readers that come back.
const BACKLOG: usize = 4 << 20;

/// One life of an engine: from its start to its end. A new one has a new epoch and holds nothing.
#[derive(Debug)]
pub struct Books {
    /// What is held, reserved and running; in blocks of the chain.
    pub ledger: Ledger,
    /// Numbered changes.
    pub log: Log,
    /// How the engine does.
    pub pulse: Pulse,
    /// Whether its `usage` can be believed.
    pub trust: Trust,
    options: Options,
    /// `K_d` in the engine's tokens.
    k_d: Tokens,
    scale: Scale,
    slots: Option<Slots>,
    turns: HashMap<String, Turn>,
    /// Turns that run without room in the books: nobody admitted them, and the engine queues them itself.
    uncounted: u32,
    touched: bool,
}

#[derive(Debug)]
struct Turn {
    session: SessionId,
    chain: Arc<[BlockHash]>,
    /// Blocks of the chain that the engine should find in its cache.
    expected: usize,
    slot: Option<u32>,
    running: bool,
}

/// How a turn ended at its engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// From `usage`, in the engine's tokens.
    pub prompt: Option<Tokens>,
    /// From `usage`.
    pub completion: Option<Tokens>,
    /// From `usage`: prompt tokens that were not computed.
    pub cached: Option<Tokens>,
    /// Why it stopped.
    pub stop: StopKind,
}

impl From<&TurnResult> for Served {
    fn from(seen: &TurnResult) -> Self {
        Self {
            prompt: seen.prompt_tokens,
            completion: seen.completion_tokens,
            cached: seen.cached_tokens,
            stop: seen.stop,
        }
    }
}

/// Why a turn cannot begin on its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotBegun {
    /// No such lease: it expired, has ended, or belongs to an earlier life.
    NoLease,
    /// It runs already.
    Running,
}

impl Books {
    /// Empty books of a life that begins now. `k_d`: the pool in the engine's tokens.
    pub fn new(options: &Options, reading: &Reading, k_d: Tokens, epoch: u64) -> Self {
        let mut options = options.clone();
        // The engine chooses what to evict, whatever would be wiser.
        if options.eviction == Eviction::Blocks {
            options.eviction = Eviction::Lru;
        }
        Self {
            ledger: Ledger::new(options.clone(), k_d, epoch),
            log: Log::new(epoch, BACKLOG),
            pulse: Pulse::default(),
            trust: Trust::default(),
            scale: Scale::new(options.block_tokens),
            options,
            k_d,
            slots: reading.slots.map(Slots::new),
            turns: HashMap::new(),
            uncounted: 0,
            touched: false,
        }
    }

    /// This life.
    pub fn epoch(&self) -> u64 {
        self.ledger.epoch()
    }

    /// Algorithm 2, from these books. Lengths of `request` are the engine's tokens.
    pub fn admit(&mut self, request: AdmitRequest, now: Millis) -> AdmitReply {
        let request = self.nominal(request);
        let known = self.turns.contains_key(&request.request_id);
        if !known && self.slots.as_ref().is_some_and(|slots| !slots.has_room(&request.session)) {
            return self.no_slot(&request);
        }
        let reply = self.ledger.admit(&request, now);
        if let AdmitReply::Admitted { mode, reuse_blocks, reserved, expires_at, terms } = reply {
            if !known {
                self.enter(&request, reuse_blocks as usize, now);
            }
            let reserved = self.scale.real(reserved);
            return AdmitReply::Admitted { mode, reuse_blocks, reserved, expires_at, terms };
        }
        reply
    }

    /// The books' lengths of a request.
    fn nominal(&self, request: AdmitRequest) -> AdmitRequest {
        let input_len = self.scale.prompt(request.chain.len(), request.input_len);
        AdmitRequest { input_len, output_reserve: self.scale.nominal(request.output_reserve), ..request }
    }

    /// All slots run turns: as if the pool were full of them.
    fn no_slot(&self, request: &AdmitRequest) -> AdmitReply {
        let held = self.ledger.residency();
        let reused = held.own_prefix(&request.session, &request.chain) as Tokens;
        let reused = reused * Tokens::from(self.options.block_tokens);
        let terms = AdmitTerms {
            k_d: self.ledger.k_d(),
            used: self.ledger.k_d(),
            resident: held.get(&request.session).is_some(),
            reused,
            append_len: request.input_len.saturating_sub(reused),
            input_len: request.input_len,
            turn: request.turn,
            output_reserve: request.output_reserve,
            evictable: 0,
        };
        let reason = match admit(&terms, &self.options) {
            Verdict::Reject(reason) => reason,
            Verdict::Admit { .. } => RejectReason::NoDCapacity,
        };
        AdmitReply::Rejected { reason, terms }
    }

    /// Notes a turn that has got its room, and gives it a slot.
    fn enter(&mut self, request: &AdmitRequest, reuse: usize, now: Millis) {
        let own = self.ledger.residency().own_prefix(&request.session, &request.chain);
        let taken = self.slots.as_mut().and_then(|s| s.take(&request.session, &request.request_id, now));
        let (slot, lost) = taken.map_or((None, None), |(slot, lost)| (Some(slot), lost));
        if let Some(lost) = lost {
            self.ledger.cut(&lost, 0);
        }
        let turn = Turn {
            session: request.session.clone(),
            chain: request.chain.clone(),
            // Slots share nothing: what another session's slot holds is of no use.
            expected: if self.slots.is_some() { own } else { reuse },
            slot,
            running: false,
        };
        self.turns.insert(request.request_id.clone(), turn);
        self.touched = true;
    }

    /// Begins a turn on its lease. Returns the engine's slot for it.
    ///
    /// # Errors
    /// [`NotBegun`].
    pub fn begin(&mut self, request_id: &str, now: Millis) -> Result<Option<u32>, NotBegun> {
        if self.turns.get(request_id).is_some_and(|turn| turn.running) {
            return Err(NotBegun::Running);
        }
        match self.ledger.start(request_id, now) {
            Ok(_) => {}
            // With `reserve = check` room was not promised; the engine queues what does not fit.
            Err(StartError::NoRoom) => {}
            Err(StartError::NoLease) => return Err(NotBegun::NoLease),
        }
        let turn = self.turns.get_mut(request_id).ok_or(NotBegun::NoLease)?;
        turn.running = true;
        self.touched = true;
        Ok(turn.slot)
    }

    /// Begins a turn nobody admitted. Without room it runs uncounted: the engine has a queue of its own.
    ///
    /// # Errors
    /// [`NotBegun`].
    pub fn force(&mut self, request: AdmitRequest, now: Millis) -> Result<Forced, NotBegun> {
        let request = self.nominal(request);
        if self.turns.contains_key(&request.request_id) {
            return Err(NotBegun::Running);
        }
        match self.ledger.force(&request, now) {
            Ok(reuse) => {
                self.enter(&request, reuse as usize, now);
                let turn = self.turns.get_mut(&request.request_id);
                let slot = turn.and_then(|turn| {
                    turn.running = true;
                    turn.slot
                });
                Ok(Forced::Counted(slot))
            }
            Err(StartError::NoRoom) => {
                self.uncounted += 1;
                self.touched = true;
                Ok(Forced::Uncounted)
            }
            Err(StartError::NoLease) => Err(NotBegun::NoLease),
        }
    }

    /// Ends a turn that [`Forced::Uncounted`] began.
    pub fn uncounted_ends(&mut self) {
        self.uncounted = self.uncounted.saturating_sub(1);
        self.touched = true;
    }

    /// Ends a turn whose KV the engine keeps: the prompt's blocks, and room for the answer's. Returns by how many of
    /// its tokens the engine held less than expected.
    pub fn commit(&mut self, request_id: &str, served: &Served, now: Millis) -> Option<Tokens> {
        let turn = self.turns.get(request_id)?;
        let (session, chain, expected) = (turn.session.clone(), turn.chain.clone(), turn.expected);
        if let Some(tokens) = served.prompt {
            self.learn(chain.len(), tokens);
        }
        let shortfall = self.trust.judge(&chain, expected, served);
        if let Some(short) = shortfall
            && self.slots.is_none()
            && let Some(block) = chain.get(short.from)
        {
            // Its own copy was just made anew; whoever else relied on the old one has lost it.
            self.ledger.lost(&[*block].into());
        }
        let answer = self.scale.nominal(served.completion.unwrap_or(0));
        let tail = answer / Tokens::from(self.options.block_tokens);
        let all: Vec<BlockHash> = chain.iter().copied().chain(unnamed(request_id, tail)).collect();
        let tokens = self.scale.prompt(chain.len(), 0) + answer;
        self.ledger.commit(request_id, &all, tokens.max(1), served.stop, now);
        if let Some(slots) = &mut self.slots {
            slots.leave(request_id, Some(&session), now);
        }
        shortfall.map(|short| short.tokens)
    }

    /// Learns how many tokens the engine makes of `blocks` blocks of the chain.
    pub fn learn(&mut self, blocks: usize, tokens: Tokens) {
        if self.scale.learn(blocks, tokens) {
            self.ledger.resize(self.scale.nominal(self.k_d));
            self.touched = true;
        }
    }

    /// The engine's cache has `cached` tokens: the books hold no more than that. While turns run their blocks are on
    /// the way, so only books at rest are compared.
    pub fn bound(&mut self, cached: Tokens) {
        let held = self.ledger.residency().blocks();
        let real = held as f64 * self.scale.per_block();
        if self.turns.is_empty() && real > cached as f64 * 1.05 + 256.0 {
            let allowed = (cached as f64 / self.scale.per_block()) as usize;
            self.ledger.drop_idle(held.saturating_sub(allowed));
        }
    }

    /// Ends a turn that leaves nothing new.
    pub fn release(&mut self, request_id: &str, now: Millis) {
        self.ledger.release(request_id, now);
        self.touched = true;
    }

    /// Gives a granted lease back. A turn that runs on it ends by itself. Returns whether there is such a lease.
    pub fn give_back(&mut self, request_id: &str, now: Millis) -> bool {
        self.turns.get(request_id).is_some_and(|turn| turn.running) || self.ledger.release(request_id, now)
    }

    /// The end of every change. Returns whether anybody should look.
    pub fn settle(&mut self, now: Millis) -> bool {
        let events = self.ledger.take_events();
        for event in &events {
            if let LedgerEvent::LeaseEnded { request_id } = event {
                self.turns.remove(request_id);
                if let Some(slots) = &mut self.slots {
                    slots.leave(request_id, None, now);
                }
            }
        }
        let touched = std::mem::take(&mut self.touched) || !events.is_empty();
        if !events.is_empty() {
            self.log.push(events);
        }
        touched
    }

    /// Load, in the engine's tokens.
    pub fn load(&self) -> LoadReport {
        let load = self.ledger.load();
        let running = self.turns.values().filter(|turn| turn.running).count() as u32;
        LoadReport {
            k_d: self.k_d,
            used: self.scale.real(load.used),
            active: self.scale.real(load.active).min(self.k_d),
            running: running.max(self.pulse.running.unwrap_or(0)),
            waiting: self.uncounted.max(self.pulse.waiting.unwrap_or(0)),
            queued_tokens: 0,
        }
    }

    /// Everything it holds.
    pub fn snapshot(&self) -> Snapshot {
        let sessions = self.ledger.residency().sessions();
        Snapshot {
            sessions: sessions.map(|(id, held)| (id.clone(), held.tokens, held.chain.clone())).collect(),
            backups: Vec::new(),
            load: self.load(),
        }
    }

    /// What `/admin/workers` shows beside the load.
    pub fn observe(&self) -> serde_json::Value {
        let slots =
            self.slots.as_ref().map(|slots| serde_json::json!({"busy": slots.busy(), "all": slots.count()}));
        serde_json::json!({
            "leases": self.ledger.leases(),
            "uncounted": self.uncounted,
            "tokens_per_block": (self.scale.per_block() * 100.0).round() / 100.0,
            "slots": slots,
            "usage": self.trust.observe(),
            "engine_kv_used": self.pulse.used,
        })
    }
}

/// How a turn without a lease begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forced {
    /// In the books, in this slot of the engine.
    Counted(Option<u32>),
    /// The pool is full.
    Uncounted,
}

/// Blocks that take room and are nobody's prefix: an answer's text is not known here. They go first when its session
/// comes back, for the new prompt brings the answer's blocks with it.
fn unnamed(request_id: &str, count: Tokens) -> impl Iterator<Item = BlockHash> {
    let seed = xxh3_64_with_seed(request_id.as_bytes(), 0x6b65_6570);
    (0..count).map(move |i| BlockHash(xxh3_64_with_seed(&i.to_le_bytes(), seed)))
}
