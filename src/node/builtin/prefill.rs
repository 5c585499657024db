//! The P leg of a turn: compute what this P lacks of the prompt, and push blocks to the D meanwhile.

use std::sync::Arc;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::Instant;

use crate::core::ledger::AdmitRequest;
use crate::core::types::{BlockHash, SessionId, StopKind, Tokens};
use crate::wire::plan::{Push, Report};

use super::super::error::NodeError;
use super::super::transfer::message::{Begin, per_frame};
use super::super::transfer::send::Outbound;
use super::engine::{Engine, Entry};
use super::lane::pass;
use super::model::KvBytes;
use super::request::Job;
use super::running::Running;

/// Blocks ready to go: the place of the first, and their KV. As much as the turn holds in the pool anyway.
type Ready = (usize, Vec<KvBytes>);

impl Engine {
    /// Computes the prompt and sends `[push.from_block ..]` of its whole blocks; returns when the D has them.
    ///
    /// # Errors
    /// 400 for a range beyond the prompt, 429 without room, 502 when the transfer fails. What was computed
    /// stays in this P's cache.
    pub async fn prefill(
        self: &Arc<Self>,
        job: Job,
        request_id: &str,
        session: SessionId,
        push: &Push,
    ) -> Result<Report, NodeError> {
        let (from, last) = (push.from_block as usize, job.chain.len());
        if from > last {
            return Err(NodeError::bad_request(format!("block {from} of a prompt of {last} blocks")));
        }
        let turn = AdmitRequest {
            // A node may be the P and the D of different legs with one id.
            request_id: format!("prefill/{request_id}"),
            session: session.clone(),
            turn: 0,
            chain: job.chain.clone(),
            input_len: job.input_tokens(),
            output_reserve: 0,
        };
        let mut running = self.begin(turn, Some(session), Entry::Forced).await?;
        self.resume(&mut running).await?;
        let reuse = running.held();
        let patience = self.config.limits.transfer_patience;
        let sent = match Outbound::connect(&*self.network, &push.to, &self.hello(), patience).await {
            Ok(mut to) => self.compute_and_send(&job, &mut running, &mut to, push).await,
            Err(reason) => Err(NodeError::transfer(reason)),
        };
        if let Err(error) = sent {
            running.keep_prompt();
            return Err(error);
        }
        drop(running.commit(&job.chain, job.input_tokens(), StopKind::Unknown));
        let tokens = |blocks: usize| blocks as Tokens * self.block();
        Ok(Report {
            reused: tokens(reuse),
            transferred: tokens(last - from),
            computed: tokens(last - reuse),
            ..Report::default()
        })
    }

    /// Brings what the backup tier has behind the pool's own prefix up into the pool.
    async fn resume(&self, running: &mut Running) -> Result<(), NodeError> {
        let chain = running.chain().clone();
        let run = self.with(|s, _| match s.backups.tier.is_empty() {
            true => Vec::new(),
            false => s.backup_run(&chain[running.held()..]),
        });
        pass(Instant::now() + self.config.cost.host(run.len() as Tokens * self.block())).await;
        running.store(run.iter().map(|kv| (&kv[..]).into()).collect())
    }

    async fn compute_and_send(
        &self,
        job: &Job,
        running: &mut Running,
        to: &mut Outbound,
        push: &Push,
    ) -> Result<(), NodeError> {
        let begin = Begin {
            transfer_id: push.transfer_id.clone(),
            epoch: to.epoch(),
            from_block: push.from_block,
            blocks: (job.chain.len() - push.from_block as usize) as u32,
            held_blocks: running.held() as u32,
        };
        let from = push.from_block as usize;
        let (ready, blocks) = unbounded_channel::<Ready>();
        let compute = async move {
            let done = running.compute(&job.text, true, |running, first| {
                let first = first.max(from);
                let new = running.kv().skip(first).cloned().collect();
                // The sender is gone only when it failed, which ends this too.
                drop(ready.send((first, new)));
            });
            done.await.map(drop)
        };
        let send = self.send(job, to, begin, blocks);
        tokio::try_join!(compute, send).map(drop)
    }

    /// Sends blocks as they become ready, at the speed of the modelled link.
    async fn send(
        &self,
        job: &Job,
        to: &mut Outbound,
        begin: Begin,
        mut ready: UnboundedReceiver<Ready>,
    ) -> Result<(), NodeError> {
        let mut due: Option<Instant> = None;
        loop {
            let batch = tokio::select! {
                biased;
                () = to.disturbed() => return Err(NodeError::transfer(to.refusal().await)),
                batch = ready.recv() => batch,
            };
            let Some((first, kv)) = batch else { break };
            if due.is_none() {
                // The prompt is at the front of the lane: now the D's patience may be asked for.
                to.begin(&begin).await.map_err(NodeError::transfer)?;
            }
            let mut free = due.map_or_else(Instant::now, |due| due.max(Instant::now()));
            let per_frame = per_frame(self.config.kv.block_bytes());
            for (i, piece) in kv.chunks(per_frame).enumerate() {
                free += self.config.cost.transfer(piece.len() as Tokens * self.block());
                pass(free).await;
                let at = first + i * per_frame;
                to.send(at, frame_of(&job.chain[at..], piece)).await.map_err(NodeError::transfer)?;
            }
            due = Some(free);
        }
        to.finish().await.map_err(NodeError::transfer)
    }
}

fn frame_of<'a>(
    chain: &'a [BlockHash],
    kv: &'a [KvBytes],
) -> impl ExactSizeIterator<Item = (BlockHash, &'a [u8])> {
    chain.iter().zip(kv).map(|(hash, kv)| (*hash, &**kv))
}
