//! The D→P side of the books: what the pool is about to drop on its way out, and the backup tier.

use std::sync::Arc;

use bytes::Bytes;

use crate::core::ledger::LedgerEvent;
use crate::core::types::{BlockHash, SessionId};
use crate::wire::plan::SyncTarget;

use super::super::d2p::tier::{InsertExternalResult, Tier};
use super::model::KvBytes;
use super::state::State;

/// KV that was dropped, with who may want it.
#[derive(Debug)]
pub struct Evicted {
    /// Whose.
    pub session: SessionId,
    /// Tail first.
    pub blocks: Vec<(BlockHash, KvBytes)>,
    /// Where the session's KV goes.
    pub targets: Arc<[SyncTarget]>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Backups {
    /// Host memory for other workers' KV; empty on a worker that takes none.
    pub tier: Tier,
    /// Keep the bytes of what is evicted for [`Self::evicted`].
    pub keeps_evicted: bool,
    /// Where the KV of resident sessions goes, as their last turn said.
    pub targets: hashbrown::HashMap<SessionId, Arc<[SyncTarget]>>,
    /// Evicted since the last look.
    pub evicted: Vec<Evicted>,
    /// Changes of the tier since the last look.
    pub(super) news: Vec<LedgerEvent>,
}

impl State {
    /// `insert_external` of the sync document, for one batch of a D: fresh memory, never pinned, only what is not
    /// there yet. Tail first.
    pub fn insert_external(
        &mut self,
        blocks: Vec<(BlockHash, Bytes)>,
        source_worker: &str,
        session: &SessionId,
    ) -> InsertExternalResult {
        let inserted = self.backups.tier.insert_external(blocks);
        let result = inserted.result;
        tracing::trace!(source_worker, %session, ?result, "backup");
        if !inserted.dropped.is_empty() {
            self.backups.news.push(LedgerEvent::BackupDropped(inserted.dropped));
        }
        if !inserted.added.is_empty() {
            self.backups.news.push(LedgerEvent::BackedUp(inserted.added));
        }
        result
    }

    /// Which of a D's blocks (tail first) are worth sending. What the pool here holds is copied into the tier
    /// without travelling.
    pub fn wanted(&mut self, offered: &[BlockHash], source: &str, session: &SessionId) -> Vec<bool> {
        let here: Vec<(BlockHash, Bytes)> = offered
            .iter()
            .filter(|block| !self.backups.tier.contains(**block))
            .filter_map(|block| Some((*block, Bytes::from_owner(self.pool.bytes(*block)?.clone()))))
            .collect();
        if !here.is_empty() {
            self.insert_external(here, source, session);
        }
        offered.iter().map(|block| !self.backups.tier.contains(*block)).collect()
    }

    /// The KV of blocks that follow each other, from the tier or the pool, up to the first that is in neither.
    pub fn backup_run(&mut self, chain: &[BlockHash]) -> Vec<Bytes> {
        let find = |block: &BlockHash| {
            let kept = self.backups.tier.get(*block).cloned();
            kept.or_else(|| Some(Bytes::from_owner(self.pool.bytes(*block)?.clone())))
        };
        let run: Vec<Bytes> = chain.iter().map_while(find).collect();
        self.backups.tier.touch(&chain[..run.len()]);
        run
    }

    /// Empties the tier.
    pub fn drop_backups(&mut self) {
        let dropped = self.backups.tier.clear();
        if !dropped.is_empty() {
            self.backups.news.push(LedgerEvent::BackupDropped(dropped));
        }
    }

    /// Keeps the bytes of blocks an eviction has just freed (in the order of their chain), if somebody is told to
    /// take them.
    pub(super) fn keep_evicted(&mut self, session: &SessionId, freed: &[BlockHash]) {
        let Some(targets) = self.backups.targets.get(session).filter(|_| self.backups.keeps_evicted) else {
            return;
        };
        if self.ledger.is_busy(session) {
            return; // its own rewritten tail: nobody asks for that again
        }
        let gone = freed.iter().rev().filter(|block| !self.ledger.residency().contains(**block));
        let blocks: Vec<_> = gone.filter_map(|b| Some((*b, self.pool.bytes(*b)?.clone()))).collect();
        if !blocks.is_empty() {
            let (session, targets) = (session.clone(), targets.clone());
            self.backups.evicted.push(Evicted { session, blocks, targets });
        }
    }
}
