//! Restore: a P sends blocks of its backup to a D. No prompt is computed and no prefill lane is entered.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;

use crate::core::types::Tokens;
use crate::wire::plan::{Push, Report};

use super::super::builtin::engine::Engine;
use super::super::builtin::lane::pass;
use super::super::builtin::request::Job;
use super::super::error::NodeError;
use super::super::transfer::message::{Begin, per_frame};
use super::super::transfer::send::Outbound;

impl Engine {
    /// Sends `blocks` blocks of the prompt from `push.from_block` on; returns when the D has stored them.
    ///
    /// # Errors
    /// 400 for a range beyond the prompt, 409 when the backup lacks some of it by now, 502 when the transfer
    /// fails.
    pub async fn restore(self: &Arc<Self>, job: &Job, push: &Push, blocks: u32) -> Result<Report, NodeError> {
        let from = push.from_block as usize;
        let chain = job.chain.get(from..from + blocks as usize).filter(|chain| !chain.is_empty());
        let Some(chain) = chain else {
            let message = format!("blocks {from}+{blocks} of a prompt of {} blocks", job.chain.len());
            return Err(NodeError::bad_request(message));
        };
        let run = self.with(|s, _| s.backup_run(chain));
        if run.len() < chain.len() {
            let message = format!("{} of {blocks} blocks are backed up here", run.len());
            return Err(NodeError::plan_mismatch(message));
        }
        let patience = self.config.limits.transfer_idle;
        let mut to = Outbound::connect(&*self.network, &push.to, &self.hello(), patience)
            .await
            .map_err(NodeError::transfer)?;
        let begin = Begin {
            transfer_id: push.transfer_id.clone(),
            epoch: to.epoch(),
            from_block: push.from_block,
            blocks,
            held_blocks: push.from_block + blocks,
        };
        to.begin(&begin).await.map_err(NodeError::transfer)?;
        let piece = per_frame(self.config.kv.block_bytes());
        let mut free = Instant::now();
        for (i, kv) in run.chunks(piece).enumerate() {
            let at = i * piece;
            free = free.max(Instant::now()) + self.config.cost.transfer(kv.len() as Tokens * self.block());
            tokio::select! {
                biased;
                () = to.disturbed() => return Err(NodeError::transfer(to.refusal().await)),
                () = pass(free) => {}
            }
            let batch = chain[at..].iter().zip(kv).map(|(hash, kv): (_, &Bytes)| (*hash, &**kv));
            to.send(from + at, batch).await.map_err(NodeError::transfer)?;
        }
        to.finish().await.map_err(NodeError::transfer)?;
        Ok(Report { transferred: Tokens::from(blocks) * self.block(), ..Report::default() })
    }
}
