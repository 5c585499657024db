//! The task that pushes a D's batches: one after another, below P→D transfers and serving.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use crate::core::types::Tokens;

use super::super::builtin::engine::Engine;
use super::super::builtin::lane::pass;
use super::super::transfer::message::{OfferHead, per_frame};
use super::super::transfer::send::Outbound;
use super::sender::Batch;
use super::tier::InsertExternalResult;

/// Share of the modelled link that pushes may take while turns run.
const BUSY_SHARE: u32 = 4;
/// Longest time one frame gives way to P→D transfers.
const GIVE_WAY: Duration = Duration::from_millis(100);
/// How long a P that could not be reached is left alone; batches for it fail at once meanwhile.
const DOWN: Duration = Duration::from_secs(1);
/// Tries of one batch: on the open connection, then on a new one.
const TRIES: u32 = 2;
/// Blocks from this size on are sent one by one, without being copied into a frame.
const LARGE: usize = 64 << 10;

/// What is known of one P.
#[derive(Debug, Default)]
struct Peer {
    connection: Option<Outbound>,
    down_until: Option<Instant>,
}

impl Engine {
    /// Pushes what is enqueued, for ever.
    pub async fn push_backups(self: &Arc<Self>) {
        let mut peers: HashMap<String, Peer> = HashMap::new();
        loop {
            let mut batch = self.sync.next().await;
            let peer = peers.entry(batch.to.clone()).or_default();
            match self.push_to(peer, &batch).await {
                Ok(()) => {
                    self.sync.counters.stored.fetch_add(1, Relaxed);
                    if let Some(stored) = batch.stored.take() {
                        // The turn may have stopped waiting.
                        let _ = stored.send(());
                    }
                }
                Err(reason) => {
                    self.sync.counters.failed.fetch_add(1, Relaxed);
                    let (session, sync_id, to) = (&batch.session, batch.sync_id, &batch.to);
                    tracing::info!(%session, sync_id, to, reason, "a D→P sync failed");
                }
            }
        }
    }

    /// β = 0: waits until a turn's pushes are stored, but never so long that the turn seems stalled.
    pub async fn backed_up(&self, pushes: Vec<oneshot::Receiver<()>>) {
        if pushes.is_empty() {
            return;
        }
        let all = futures_util::future::join_all(pushes);
        let stored = timeout(self.config.limits.sync_wait, all).await;
        if !stored.is_ok_and(|all| all.iter().all(Result::is_ok)) {
            self.sync.counters.late.fetch_add(1, Relaxed);
            tracing::warn!("β = 0: a turn ended before its backup was stored");
        }
    }

    /// The document's choice for failures: a retry or two, then the session is simply less backed up.
    async fn push_to(&self, peer: &mut Peer, batch: &Batch) -> Result<(), String> {
        if peer.down_until.is_some_and(|until| Instant::now() < until) {
            return Err("its P could not be reached a moment ago".into());
        }
        let mut failed = String::new();
        for _ in 0..TRIES {
            match self.attempt(peer, batch).await {
                Ok(()) => {
                    peer.down_until = None;
                    return Ok(());
                }
                Err(reason) => {
                    peer.connection = None;
                    failed = reason;
                }
            }
        }
        peer.down_until = Some(Instant::now() + DOWN);
        Err(failed)
    }

    async fn attempt(&self, peer: &mut Peer, batch: &Batch) -> Result<(), String> {
        let patience = self.config.limits.sync_patience;
        let to = match &mut peer.connection {
            Some(open) => open,
            None => {
                let open = Outbound::connect(&*self.network, &batch.to, &self.hello(), patience).await?;
                peer.connection.insert(open)
            }
        };
        let head = OfferHead { sync_id: batch.sync_id, session: batch.session.clone(), epoch: to.epoch() };
        let wanted = to.offer(&head, batch.blocks.iter().map(|(hash, _)| *hash)).await?;
        let missing: Vec<_> = batch.blocks.iter().zip(wanted).filter(|(_, w)| *w).map(|(b, _)| b).collect();
        let block_bytes = self.config.kv.block_bytes();
        let piece = if block_bytes >= LARGE { 1 } else { per_frame(block_bytes) };
        let mut free = Instant::now();
        for (i, blocks) in missing.chunks(piece).enumerate() {
            free = self.place_on_the_link(free, blocks.len() as Tokens * self.block()).await;
            match *blocks {
                [(hash, kv)] => to.send_one(i * piece, *hash, kv).await?,
                _ => to.send(i * piece, blocks.iter().map(|(hash, kv)| (*hash, &**kv))).await?,
            }
        }
        let result: InsertExternalResult = to.pushed().await?;
        let counters = &self.sync.counters;
        counters.blocks.fetch_add(missing.len() as u64, Relaxed);
        counters.bytes.fetch_add((missing.len() * block_bytes) as u64, Relaxed);
        counters.shared.fetch_add(result.shared.into(), Relaxed);
        Ok(())
    }

    /// Waits for a frame's time on the modelled link, which transfers to this D have first.
    async fn place_on_the_link(&self, free: Instant, tokens: Tokens) -> Instant {
        let until = Instant::now() + GIVE_WAY;
        while self.receiving() > 0 && Instant::now() < until {
            sleep(Duration::from_millis(1)).await;
        }
        let share = if self.with(|s, _| s.running()) > 0 { BUSY_SHARE } else { 1 };
        let free = free.max(Instant::now()) + self.config.cost.transfer(tokens) * share;
        pass(free).await;
        free
    }
}
