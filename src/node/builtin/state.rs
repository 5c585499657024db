//! The books of one engine, changed in one step under one lock: ledger, pool, queue, event log.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use crate::core::ledger::{AdmitReply, AdmitRequest, Ledger, LedgerEvent, LoadReport, StartError};
use crate::core::residency::Change;
use crate::core::types::{BlockHash, Millis, SessionId, StopKind, Tokens};
use crate::wire::events::Snapshot;
use crate::wire::log::Log;

use super::backup::Backups;
use super::pool::{Pool, Slot};

/// Blocks by which conversations of plain requests are found again; each turn leaves two at most.
const PLAIN_MARKS: usize = 1024;

/// See the module.
#[derive(Debug)]
pub struct State {
    /// What is held, reserved and running.
    pub ledger: Ledger,
    /// The bytes of it.
    pub pool: Pool,
    /// Numbered changes.
    pub log: Log,
    /// What goes to and comes from the memory of other workers.
    pub backups: Backups,
    /// Chains that leases were granted for.
    granted: HashMap<String, Arc<[BlockHash]>>,
    /// Turns that run, by request id, with the slots they hold.
    running: HashMap<String, usize>,
    /// Forced turns that wait for room, first come first.
    pub waiting: BTreeSet<u64>,
    next_ticket: u64,
    /// Prompt tokens queued or being computed.
    pub queued_tokens: Tokens,
    /// Plain requests have no session: the last blocks of a prompt and of its answer name it.
    plain: HashMap<BlockHash, SessionId>,
    plain_order: VecDeque<(BlockHash, SessionId)>,
    /// Something changed that waiting turns and event readers want to know.
    pub touched: bool,
}

/// Why a turn cannot begin.
#[derive(Debug, PartialEq, Eq)]
pub enum NotBegun {
    /// Wait and try again.
    NoRoom,
    /// The plan or the request is wrong; says how.
    Mismatch(String),
}

/// A turn that begins.
#[derive(Debug)]
pub struct Begun {
    /// Blocks it reuses.
    pub reuse: usize,
    /// Holds on them.
    pub slots: Vec<Slot>,
}

impl State {
    /// Empty books.
    pub fn new(ledger: Ledger, log: Log) -> Self {
        Self {
            pool: Pool::new(ledger.pool_blocks()),
            ledger,
            log,
            backups: Backups::default(),
            granted: HashMap::new(),
            running: HashMap::new(),
            waiting: BTreeSet::new(),
            next_ticket: 0,
            queued_tokens: 0,
            plain: HashMap::new(),
            plain_order: VecDeque::new(),
            touched: false,
        }
    }

    /// Algorithm 2 at this worker.
    pub fn admit(&mut self, request: &AdmitRequest, now: Millis) -> AdmitReply {
        let reply = self.ledger.admit(request, now);
        if let AdmitReply::Admitted { .. } = reply {
            self.granted.entry(request.request_id.clone()).or_insert_with(|| request.chain.clone());
            self.touched = true;
        }
        reply
    }

    /// Starts a turn: on its lease when `leased`, else by force. `ticket`: its place in the queue, if it has
    /// one; a forced turn does not overtake those before it.
    pub fn begin(
        &mut self,
        turn: &AdmitRequest,
        leased: bool,
        ticket: Option<u64>,
        now: Millis,
    ) -> Result<Begun, NotBegun> {
        let id = &turn.request_id;
        if self.running.contains_key(id) {
            return Err(NotBegun::Mismatch(format!("turn {id} is running already")));
        }
        let first = self.waiting.first().copied();
        if !leased && first.is_some() && first != ticket {
            return Err(NotBegun::NoRoom);
        }
        let granted = self.granted.get(id).cloned();
        let started = if leased { self.ledger.start(id, now) } else { self.ledger.force(turn, now) };
        let reuse = match started {
            Ok(reuse) => reuse as usize,
            Err(StartError::NoRoom) => return Err(NotBegun::NoRoom),
            Err(StartError::NoLease) => {
                return Err(NotBegun::Mismatch(format!("no lease for {id}: it expired or has ended")));
            }
        };
        let held = turn.chain.get(..reuse);
        let same = held.is_some() && granted.is_none_or(|lease| lease.get(..reuse) == held);
        let slots: Option<Vec<Slot>> =
            held.filter(|_| same).and_then(|c| c.iter().map(|b| self.pool.hold(*b)).collect());
        let Some(slots) = slots else {
            self.ledger.release(id, now);
            return Err(NotBegun::Mismatch("the lease was granted for another prompt".into()));
        };
        self.running.insert(id.clone(), slots.len());
        self.touched = true;
        Ok(Begun { reuse, slots })
    }

    /// Puts a running turn's new blocks into the pool; `None` when the pool is full, which the ledger's
    /// reservations make impossible.
    pub fn store(&mut self, id: &str, blocks: Vec<super::model::KvBytes>) -> Option<Vec<Slot>> {
        let mut slots = Vec::with_capacity(blocks.len());
        for block in blocks {
            match self.pool.store(block) {
                Some(slot) => slots.push(slot),
                None => {
                    slots.into_iter().for_each(|slot| self.pool.release(slot));
                    return None;
                }
            }
        }
        if let Some(held) = self.running.get_mut(id) {
            *held += slots.len();
        }
        Some(slots)
    }

    /// Ends a turn whose KV becomes the session's.
    pub fn commit(&mut self, id: &str, turn: &Committed<'_>, slots: Vec<Slot>, now: Millis) {
        self.ledger.commit(id, turn.chain, turn.tokens, turn.stop, now);
        for (block, slot) in turn.chain.iter().zip(&slots) {
            if self.ledger.residency().contains(*block) {
                self.pool.adopt(*block, slot);
            }
        }
        self.leave(id, slots);
    }

    /// Ends a turn that leaves nothing.
    pub fn release(&mut self, id: &str, slots: Vec<Slot>, now: Millis) {
        self.ledger.release(id, now);
        self.leave(id, slots);
    }

    /// Gives a granted lease back. A turn that runs on it ends by itself and does so then. Returns whether there
    /// is such a lease.
    pub fn give_back(&mut self, id: &str, now: Millis) -> bool {
        self.running.contains_key(id) || self.ledger.release(id, now)
    }

    fn leave(&mut self, id: &str, slots: Vec<Slot>) {
        slots.into_iter().for_each(|slot| self.pool.release(slot));
        self.running.remove(id);
        self.touched = true;
    }

    /// The end of every change: pool, grants and log follow the ledger. Returns whether anybody should look.
    pub fn settle(&mut self) -> bool {
        let mut events = self.ledger.take_events();
        // An eviction says what a session keeps, and then what nobody holds any more.
        let mut evicting = None;
        for event in &events {
            match event {
                LedgerEvent::Freed(blocks) => {
                    if let Some(session) = evicting.take() {
                        self.keep_evicted(session, blocks);
                    }
                    // What counts is the end of the step: a block may have gone and come back within it.
                    for block in blocks {
                        if !self.ledger.residency().contains(*block) {
                            self.pool.forget(*block);
                        }
                    }
                }
                LedgerEvent::LeaseEnded { request_id } => drop(self.granted.remove(request_id)),
                LedgerEvent::Held(change) => {
                    evicting = change.appended.is_empty().then_some(&change.session);
                }
                LedgerEvent::BackedUp(_) | LedgerEvent::BackupDropped(_) => {}
            }
        }
        for event in &events {
            if let LedgerEvent::Held(Change { session, tokens: 0, .. }) = event
                && self.ledger.residency().get(session).is_none()
            {
                self.backups.targets.remove(session);
            }
        }
        events.append(&mut self.backups.news);
        let touched = std::mem::take(&mut self.touched) || !events.is_empty();
        if !events.is_empty() {
            self.log.push(events);
        }
        touched
    }

    /// A place at the end of the queue.
    pub fn queue(&mut self) -> u64 {
        self.next_ticket += 1;
        self.waiting.insert(self.next_ticket);
        self.touched = true;
        self.next_ticket
    }

    /// The session of a plain request: the conversation it goes on with, unless that is busy.
    pub fn plain_session(&self, chain: &[BlockHash], request_id: &str) -> SessionId {
        let known = chain.iter().rev().find_map(|block| self.plain.get(block));
        known.cloned().unwrap_or_else(|| SessionId::new(format!("plain/{request_id}")))
    }

    /// Remembers by which block (of its prompt, or of its answer) a plain request's session is found again, and
    /// forgets the oldest.
    pub fn plain_left(&mut self, block: Option<&BlockHash>, session: &SessionId) {
        let Some(block) = block else { return };
        if self.plain.insert(*block, session.clone()).as_ref() == Some(session) {
            return;
        }
        self.plain_order.push_back((*block, session.clone()));
        if self.plain_order.len() <= PLAIN_MARKS {
            return;
        }
        let Some((block, session)) = self.plain_order.pop_front() else { return };
        if self.plain.get(&block) == Some(&session) {
            self.plain.remove(&block);
        }
        if !self.plain_order.iter().any(|(_, newer)| *newer == session) {
            self.ledger.end_session(&session);
        }
    }

    /// Load, the queue included.
    pub fn load(&self) -> LoadReport {
        LoadReport {
            waiting: self.waiting.len() as u32,
            queued_tokens: self.queued_tokens,
            running: self.running.len() as u32,
            ..self.ledger.load()
        }
    }

    /// Everything it holds.
    pub fn snapshot(&self) -> Snapshot {
        let sessions = self.ledger.residency().sessions();
        Snapshot {
            sessions: sessions.map(|(id, held)| (id.clone(), held.tokens, held.chain.clone())).collect(),
            backups: self.backups.tier.blocks(),
            load: self.load(),
        }
    }

    /// Whether a turn runs.
    pub fn is_running(&self, id: &str) -> bool {
        self.running.contains_key(id)
    }

    /// Turns running now.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Checks pool against ledger: every slot accounted for exactly once.
    ///
    /// # Errors
    /// A sentence that says what does not add up.
    pub fn audit(&self) -> Result<(), String> {
        let residency = self.ledger.residency();
        let held: HashSet<BlockHash> =
            residency.sessions().flat_map(|(_, held)| held.chain.iter().copied()).collect();
        // Blocks that only pins of leases hold are in no chain; with no lease there are none.
        if self.ledger.leases() == 0 && held.len() != residency.blocks() {
            return Err(format!("{} blocks in chains, {} held", held.len(), residency.blocks()));
        }
        self.pool.audit(&held, residency.blocks(), self.running.values().sum())?;
        self.backups.tier.audit()?;
        if self.ledger.occupied_blocks() > self.ledger.pool_blocks() {
            return Err("the ledger holds more than the pool".into());
        }
        Ok(())
    }
}

/// What a turn leaves.
#[derive(Debug, Clone, Copy)]
pub struct Committed<'a> {
    /// Whole blocks of prompt plus output.
    pub chain: &'a [BlockHash],
    /// Its length in tokens.
    pub tokens: Tokens,
    /// Why it stopped.
    pub stop: StopKind,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::options::Options;

    fn turn(id: &str, tokens: Tokens) -> AdmitRequest {
        AdmitRequest {
            request_id: id.into(),
            session: SessionId::new(id),
            turn: 0,
            chain: Arc::new([]),
            input_len: tokens,
            output_reserve: 0,
        }
    }

    /// A small turn that would fit does not overtake a large one that waits.
    #[test]
    fn forced_turns_begin_in_order() {
        let ledger = Ledger::new(Options::production(), 240, 1);
        let mut state = State::new(ledger, Log::new(1, 1000));
        assert!(state.begin(&turn("a", 200), false, None, 0).is_ok());
        assert_eq!(state.begin(&turn("b", 200), false, None, 0).err(), Some(NotBegun::NoRoom));
        let b = state.queue();
        assert_eq!(state.begin(&turn("c", 24), false, None, 0).err(), Some(NotBegun::NoRoom));
        let c = state.queue();
        assert_eq!(state.begin(&turn("c", 24), false, Some(c), 0).err(), Some(NotBegun::NoRoom));
        state.release("a", Vec::new(), 0);
        assert!(state.begin(&turn("b", 200), false, Some(b), 0).is_ok());
        state.waiting.remove(&b);
        assert!(state.begin(&turn("c", 24), false, Some(c), 0).is_ok());
        let again = state.begin(&turn("c", 24), false, None, 0);
        assert!(matches!(again, Err(NotBegun::Mismatch(_))));
    }
}
