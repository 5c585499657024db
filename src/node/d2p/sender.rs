//! `DecodeKvSender` of the sync document: what a D has to push. Enqueueing never waits and never fails a turn;
//! what does not fit is dropped and counted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use crate::core::sync::SyncRule;
use crate::core::types::{BlockHash, SessionId, Tokens};
use crate::wire::plan::SyncTarget;

use super::super::builtin::model::KvBytes;

/// Why a batch is pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A turn committed it.
    Commit,
    /// The pool dropped it.
    Evict,
}

/// Blocks on their way to one P.
#[derive(Debug)]
pub struct Batch {
    /// Names it in logs.
    pub sync_id: u64,
    /// Whose.
    pub session: SessionId,
    /// Tail first. Their bytes live as long as the batch, whatever the pool does.
    pub blocks: Vec<(BlockHash, KvBytes)>,
    /// `host:port` of the P's D→P listener.
    pub to: String,
    /// Why.
    pub cause: Cause,
    /// Told when it is stored; dropped when it failed.
    pub stored: Option<oneshot::Sender<()>>,
}

impl Batch {
    fn bytes(&self) -> usize {
        self.blocks.iter().map(|(_, kv)| kv.len()).sum()
    }
}

#[derive(Debug, Default)]
struct Queue {
    batches: VecDeque<Batch>,
    bytes: usize,
    next_id: u64,
}

/// What has become of all pushes so far.
#[derive(Debug, Default)]
pub struct Counters {
    /// Batches enqueued.
    pub issued: AtomicU64,
    /// Batches stored at their P.
    pub stored: AtomicU64,
    /// Batches given up after retries.
    pub failed: AtomicU64,
    /// Turns that ended without the acknowledgement β = 0 asks for.
    pub late: AtomicU64,
    /// Batches that a later commit of their session took the place of.
    pub replaced: AtomicU64,
    /// Batches that found the queue full.
    pub refused: AtomicU64,
    /// Blocks that travelled.
    pub blocks: AtomicU64,
    /// Blocks the P had already.
    pub shared: AtomicU64,
    /// KV bytes that travelled.
    pub bytes: AtomicU64,
}

/// See the module.
#[derive(Debug)]
pub struct DecodeKvSender {
    queue: Mutex<Queue>,
    wake: Notify,
    /// When to push; `None`: this node pushes nothing.
    pub rule: Option<SyncRule>,
    block_tokens: Tokens,
    max_bytes: usize,
    /// What became of it.
    pub counters: Counters,
}

impl DecodeKvSender {
    /// An empty queue of at most `max_bytes` of KV.
    pub fn new(rule: Option<SyncRule>, block_tokens: u32, max_bytes: usize) -> Self {
        Self {
            queue: Mutex::default(),
            wake: Notify::new(),
            rule,
            block_tokens: block_tokens.into(),
            max_bytes,
            counters: Counters::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues blocks (tail first) for a P and returns the batch's id. `None`: too few to be worth it, or the queue
    /// is full. A commit of the same session that still waits for the same P is replaced: at most one a turn.
    pub fn enqueue_sync(
        &self,
        session: &SessionId,
        blocks: Vec<(BlockHash, KvBytes)>,
        target_p: &str,
        cause: Cause,
        stored: Option<oneshot::Sender<()>>,
    ) -> Option<u64> {
        let rule = self.rule?;
        if !rule.worth(blocks.len() as Tokens * self.block_tokens) {
            return None;
        }
        let mut queue = self.lock();
        if cause == Cause::Commit {
            let older = |b: &Batch| b.cause == cause && b.session == *session && b.to == target_p;
            if let Some(place) = queue.batches.iter().position(older)
                && let Some(old) = queue.batches.remove(place)
            {
                queue.bytes -= old.bytes();
                self.counters.replaced.fetch_add(1, Relaxed);
            }
        }
        queue.next_id += 1;
        let (sync_id, session, to) = (queue.next_id, session.clone(), target_p.to_owned());
        let batch = Batch { sync_id, session, blocks, to, cause, stored };
        let bytes = batch.bytes();
        if queue.bytes + bytes > self.max_bytes {
            self.counters.refused.fetch_add(1, Relaxed);
            tracing::debug!(session = %batch.session, "a sync is dropped: the queue is full");
            return None;
        }
        queue.bytes += bytes;
        queue.batches.push_back(batch);
        drop(queue);
        self.counters.issued.fetch_add(1, Relaxed);
        self.wake.notify_one();
        Some(sync_id)
    }

    /// Queues what a turn has committed, for each target from where its own copy ends. With β = 0 the receivers
    /// tell when it is stored.
    pub fn committed(
        &self,
        session: &SessionId,
        chain: &[(BlockHash, KvBytes)],
        targets: &[SyncTarget],
    ) -> Vec<oneshot::Receiver<()>> {
        let Some(rule) = self.rule.filter(|rule| rule.on_commit) else { return Vec::new() };
        let mut waits = Vec::new();
        for target in targets {
            let new = chain.get(target.held as usize..).unwrap_or_default();
            let blocks = new.iter().rev().cloned().collect();
            let (told, wait) = oneshot::channel();
            let told = rule.wait.then_some(told);
            if self.enqueue_sync(session, blocks, &target.to, Cause::Commit, told).is_some() && rule.wait {
                waits.push(wait);
            }
        }
        waits
    }

    /// The next batch; waits for one.
    pub async fn next(&self) -> Batch {
        loop {
            let next = {
                let mut queue = self.lock();
                let batch = queue.batches.pop_front();
                queue.bytes -= batch.as_ref().map_or(0, Batch::bytes);
                batch
            };
            match next {
                Some(batch) => return batch,
                None => self.wake.notified().await,
            }
        }
    }

    /// All counters, by name.
    pub fn figures(&self) -> serde_json::Value {
        let c = &self.counters;
        let at = |count: &AtomicU64| count.load(Relaxed);
        serde_json::json!({
            "issued": at(&c.issued), "stored": at(&c.stored), "failed": at(&c.failed), "late": at(&c.late),
            "replaced": at(&c.replaced), "refused": at(&c.refused), "blocks": at(&c.blocks),
            "shared": at(&c.shared), "bytes": at(&c.bytes), "waiting": self.waiting(),
        })
    }

    /// Batches that wait.
    pub fn waiting(&self) -> usize {
        self.lock().batches.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::options::{D2pTrigger, Options};

    fn sender(trigger: D2pTrigger) -> DecodeKvSender {
        let options = Options { d2p_trigger: trigger, ..Options::production() };
        DecodeKvSender::new(SyncRule::of(&options), 24, 100)
    }

    fn chain(n: u64) -> Vec<(BlockHash, KvBytes)> {
        (0..n).map(|b| (BlockHash(b), KvBytes::from(vec![0; 10]))).collect()
    }

    #[tokio::test]
    async fn one_batch_a_turn_bounded_and_tail_first() {
        let sender = sender(D2pTrigger::Both);
        let s = SessionId::new("s");
        let to = |held| [SyncTarget { to: "p".into(), held }];
        assert!(sender.committed(&s, &chain(3), &to(3)).is_empty() && sender.waiting() == 0);
        sender.committed(&s, &chain(3), &to(1));
        sender.committed(&s, &chain(5), &to(1));
        assert_eq!(sender.waiting(), 1);
        assert!(sender.enqueue_sync(&s, chain(7), "p", Cause::Evict, None).is_none());
        assert_eq!(sender.counters.refused.load(Relaxed), 1);
        let blocks: Vec<u64> = sender.next().await.blocks.iter().map(|(b, _)| b.0).collect();
        assert_eq!((blocks, sender.waiting()), (vec![4, 3, 2, 1], 0));
        assert!(sender.enqueue_sync(&s, chain(7), "p", Cause::Evict, None).is_some());
    }

    #[test]
    fn the_trigger_decides() {
        let s = SessionId::new("s");
        let to = [SyncTarget { to: "p".into(), held: 0 }];
        for (trigger, waiting) in [(D2pTrigger::Evict, 0), (D2pTrigger::Commit, 1), (D2pTrigger::Off, 0)] {
            let sender = sender(trigger);
            sender.committed(&s, &chain(3), &to);
            assert_eq!(sender.waiting(), waiting);
        }
    }
}
