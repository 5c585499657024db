//! A running turn's hold on its engine: lease, slots, room. Dropping it gives everything back.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::core::ledger::AdmitRequest;
use crate::core::types::{BlockHash, SessionId, StopKind, Tokens};
use crate::prompt::BLOCK_BYTES;
use crate::wire::plan::SyncTarget;

use super::super::error::NodeError;
use super::engine::{Engine, Queued, wait};
use super::model::{KvBytes, tokens};
use super::pool::Slot;
use super::state::{Begun, Committed};

/// See the module.
#[derive(Debug)]
pub struct Running {
    engine: Arc<Engine>,
    turn: AdmitRequest,
    /// Whose KV it becomes; `None` leaves nothing.
    session: Option<SessionId>,
    reuse: usize,
    slots: Vec<Slot>,
    /// Where the session's KV goes from here.
    sync: Arc<[SyncTarget]>,
    /// Blocks the turn may hold: reused plus reserved, as far as this side knows.
    covered: usize,
    ended: bool,
}

impl Running {
    pub(super) fn new(
        engine: Arc<Engine>,
        turn: AdmitRequest,
        session: Option<SessionId>,
        begun: Begun,
    ) -> Self {
        let Begun { reuse, slots } = begun;
        Self { engine, turn, session, reuse, slots, sync: Arc::default(), covered: reuse, ended: false }
    }

    /// Tells where the session's KV is to be pushed to.
    pub fn sync_to(&mut self, targets: &[SyncTarget]) {
        self.sync = targets.into();
    }

    /// Blocks taken from the pool at the start.
    pub fn reuse(&self) -> usize {
        self.reuse
    }

    /// Blocks held now, from the front.
    pub fn held(&self) -> usize {
        self.slots.len()
    }

    /// The prompt in tokens.
    pub fn prompt_tokens(&self) -> Tokens {
        self.turn.input_len
    }

    /// The prompt's whole blocks.
    pub fn chain(&self) -> &Arc<[BlockHash]> {
        &self.turn.chain
    }

    /// The KV held, block by block.
    pub fn kv(&self) -> impl Iterator<Item = &KvBytes> {
        self.slots.iter().map(Slot::bytes)
    }

    /// Makes room for `tokens` in all; waits for it. `false`: the deadline passed.
    pub async fn cover(&mut self, tokens: Tokens) -> bool {
        let blocks = tokens.div_ceil(self.engine.block()) as usize;
        if blocks <= self.covered {
            return true;
        }
        let mut changes = self.engine.changes();
        let deadline = Instant::now() + self.engine.config.limits.grow_deadline;
        let beyond = blocks.saturating_sub(self.reuse);
        loop {
            changes.catch_up();
            if self.engine.with(|s, _| s.ledger.grow(&self.turn.request_id, beyond)) {
                self.covered = blocks;
                return true;
            }
            if wait(&mut changes, deadline).await.is_err() {
                return false;
            }
        }
    }

    /// Puts the next blocks into the pool.
    ///
    /// # Errors
    /// 500: the pool has no slot for what the ledger reserved.
    pub fn store(&mut self, blocks: Vec<KvBytes>) -> Result<(), NodeError> {
        if blocks.is_empty() {
            return Ok(());
        }
        let stored = self.engine.with(|s, _| s.store(&self.turn.request_id, blocks));
        let stored = stored.ok_or_else(|| NodeError::internal("no slot for a reserved block"))?;
        self.slots.extend(stored);
        Ok(())
    }

    /// Computes what the prompt lacks. `whole`: one stretch of the lane for all of it (a P); else chunk by
    /// chunk, between the chunks of others. `each` sees the place of the first new block after every step, and
    /// once before the first.
    ///
    /// # Errors
    /// As [`Self::store`].
    pub async fn compute(
        &mut self,
        text: &[u8],
        whole: bool,
        mut each: impl FnMut(&Self, usize),
    ) -> Result<Tokens, NodeError> {
        let engine = self.engine.clone();
        let (cost, model) = (engine.config.cost.clone(), engine.config.kv);
        let missing = |held: usize| tokens(text.len()) - (held as Tokens) * engine.block();
        let (first, last) = (self.held(), self.chain().len());
        let mut queued = Queued::new(&engine, missing(first));
        let chunk = (cost.chunk_tokens() / engine.block()).max(1) as usize;
        let mut ready = Instant::now() + cost.prefill_base();
        let mut place = if whole { Some(engine.lane.enter().await) } else { None };
        each(self, 0);
        let mut done = missing(first) == 0;
        while !done {
            let (from, to) = (self.held(), (self.held() + chunk).min(last));
            // The tail that fills no block is computed with the last whole one.
            done = to == last;
            let left = if done { 0 } else { missing(to) };
            let here = match place.take() {
                Some(place) => place,
                None => engine.lane.enter().await,
            };
            let context = (from as Tokens) * engine.block();
            ready = here.work(ready, cost.prefill(context, missing(from) - left)).await;
            let previous = self.kv().last().cloned();
            self.store(model.blocks(previous, &text[from * BLOCK_BYTES..to * BLOCK_BYTES]))?;
            queued.set(left);
            each(self, from);
            place = whole.then_some(here);
        }
        Ok(missing(first))
    }

    /// Ends the turn: `chain` (whole blocks of prompt plus output, all of them held) of `tokens` tokens becomes
    /// the session's, or nothing stays of a one-shot turn. Returns the pushes whose end the turn has to wait for.
    pub fn commit(
        mut self,
        chain: &[BlockHash],
        tokens: Tokens,
        stop: StopKind,
    ) -> Vec<oneshot::Receiver<()>> {
        let Some(session) = self.session.take() else { return Vec::new() };
        self.ended = true;
        let slots = std::mem::take(&mut self.slots);
        let pushes = !self.sync.is_empty() && self.engine.sync.rule.is_some_and(|rule| rule.on_commit);
        let kv: Vec<_> = match pushes {
            true => chain.iter().copied().zip(slots.iter().map(|slot| slot.bytes().clone())).collect(),
            false => Vec::new(),
        };
        let id = &self.turn.request_id;
        self.engine.with(|s, now| {
            s.backups.targets.insert(session.clone(), self.sync.clone());
            s.commit(id, &Committed { chain, tokens, stop }, slots, now);
            if session.as_str().starts_with("plain/") {
                s.plain_left(self.turn.chain.last(), &session);
                s.plain_left(chain.last(), &session);
            }
            if self.sync.is_empty() || s.ledger.residency().get(&session).is_none() {
                s.backups.targets.remove(&session);
            }
        });
        self.engine.sync.committed(&session, &kv, &self.sync)
    }

    /// Ends the turn early with what it has computed of its prompt.
    pub fn keep_prompt(self) {
        let held = self.held();
        let (chain, tokens) = (self.chain().clone(), held as Tokens * self.engine.block());
        if tokens > 0 {
            drop(self.commit(&chain[..held], tokens, StopKind::Unknown));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            let slots = std::mem::take(&mut self.slots);
            self.engine.with(|s, now| s.release(&self.turn.request_id, slots, now));
        }
    }
}
