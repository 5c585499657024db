//! A P worker: a queue, batches of prompts, its own pool as prefix cache, and a host-memory tier.

use std::collections::VecDeque;

use super::job::JobId;
use crate::core::ledger::Ledger;
use crate::core::staleness::BackupStore;
use crate::core::types::Tokens;

/// See the module. [`super::fleet::Fleet`] runs it.
#[derive(Debug)]
pub struct Prefill {
    /// Its KV: prompts being computed or sent hold leases, the rest is an LRU cache.
    pub ledger: Ledger,
    /// Backups, or P's own evicted blocks.
    pub host: BackupStore,
    /// Prompts that wait.
    pub queue: VecDeque<JobId>,
    /// Prompts being computed.
    pub batch: Vec<JobId>,
    /// Prompt tokens dispatched to it and not computed.
    pub backlog: Tokens,
    /// When its network link is free.
    pub link_free: u64,
    /// When its link for arriving pushes is free.
    pub push_free: u64,
    /// µs it computed.
    pub busy: u64,
}

impl Prefill {
    /// An idle worker.
    pub fn new(ledger: Ledger, host: BackupStore) -> Self {
        let (queue, batch) = (VecDeque::new(), Vec::new());
        Self { ledger, host, queue, batch, backlog: 0, link_free: 0, push_free: 0, busy: 0 }
    }
}
