//! A D takes the blocks of its transfer: from a P that computes them, or from a P's backup.

use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use crate::wire::plan::Pull;

use super::super::error::NodeError;
use super::super::transfer::inbox::{Arrival, Inbound};
use super::super::transfer::message::{Begin, Blocks};
use super::engine::Engine;
use super::running::Running;

/// What a transfer brought.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrived {
    /// Blocks its sender held before it computed.
    pub held_there: usize,
    /// From its first block to its last.
    pub took: Duration,
}

/// The range of the prompt that has to arrive.
#[derive(Debug, Clone, Copy)]
struct Range {
    from: usize,
    end: usize,
}

impl Engine {
    /// Takes the turn's transfer.
    ///
    /// # Errors
    /// 409 when it would leave a hole, 502 when it fails. What arrived until then goes with the turn.
    pub(super) async fn receive(
        &self,
        running: &mut Running,
        mut inbound: Inbound,
        pull: &Pull,
    ) -> Result<Arrived, NodeError> {
        let (from, whole) = (pull.from_block as usize, running.chain().len());
        let end = pull.blocks.map_or(whole, |blocks| from + blocks as usize);
        if from > running.reuse() || end > whole {
            let message = format!("blocks {from}..{end} of {whole} arrive, {} are held", running.reuse());
            return Err(NodeError::plan_mismatch(message));
        }
        // A backup is there already, so a restore has a time limit as a whole; a P may have a queue.
        let limit = pull.blocks.map(|_| Instant::now() + self.config.limits.restore_wait);
        let arrivals = self.take_arrivals(running, &mut inbound, Range { from, end });
        let taken = match limit {
            None => arrivals.await,
            Some(limit) => timeout_at(limit, arrivals)
                .await
                .unwrap_or_else(|_| Err(NodeError::transfer("the restore took too long"))),
        };
        match taken {
            Ok(arrived) => {
                inbound.accept();
                Ok(arrived)
            }
            Err(error) => {
                inbound.refuse(&error.message);
                Err(error)
            }
        }
    }

    async fn take_arrivals(
        &self,
        running: &mut Running,
        inbound: &mut Inbound,
        range: Range,
    ) -> Result<Arrived, NodeError> {
        let mut arrived = Arrived { held_there: 0, took: Duration::ZERO };
        let mut patience = self.config.limits.transfer_wait;
        let mut begun = None;
        loop {
            let arrival = timeout(patience, inbound.next()).await;
            patience = self.config.limits.transfer_idle;
            match arrival {
                Ok(Some(Arrival::Begin(begin))) => {
                    begun = Some((Instant::now(), self.arriving()));
                    arrived.held_there = accept(&begin, range)?;
                }
                Ok(Some(Arrival::Blocks(blocks))) => store(running, blocks, range)?,
                Ok(Some(Arrival::End)) if running.held() >= range.end => {
                    arrived.took = begun.map_or(Duration::ZERO, |(at, _)| at.elapsed());
                    return Ok(arrived);
                }
                Ok(Some(Arrival::End)) => {
                    return Err(NodeError::transfer("the transfer ended before its last block"));
                }
                Ok(Some(Arrival::Failed(reason))) => return Err(NodeError::transfer(reason)),
                Ok(None) => return Err(NodeError::transfer("the KV connection ended")),
                Err(_) => return Err(NodeError::transfer("no KV arrived within the deadline")),
            }
        }
    }
}

fn accept(begin: &Begin, range: Range) -> Result<usize, NodeError> {
    if (begin.from_block as usize, begin.blocks as usize) != (range.from, range.end - range.from) {
        return Err(NodeError::transfer("the sender has another range or prompt"));
    }
    Ok(begin.held_blocks as usize)
}

fn store(running: &mut Running, arrived: Blocks, range: Range) -> Result<(), NodeError> {
    let end = arrived.first + arrived.blocks.len();
    if arrived.first > running.held() || end > range.end {
        return Err(NodeError::transfer("blocks out of order"));
    }
    let expected = &running.chain()[arrived.first..end];
    if !arrived.blocks.iter().map(|(hash, _)| hash).eq(expected) {
        return Err(NodeError::transfer("a block of another prompt arrived"));
    }
    let known = running.held() - arrived.first;
    let new = arrived.blocks.into_iter().skip(known).map(|(_, kv)| (&kv[..]).into());
    running.store(new.collect())
}
