//! The numbered changes of one incarnation, and a bounded backlog for readers that come back.

use std::collections::VecDeque;

use bytes::Bytes;

use super::events::{NodeEvent, Numbered, encode};
use crate::core::ledger::LedgerEvent;

/// See the module.
#[derive(Debug)]
pub struct Log {
    epoch: u64,
    seq: u64,
    backlog: VecDeque<Bytes>,
    bytes: usize,
    max_bytes: usize,
}

impl Log {
    /// An empty log that keeps up to `max_bytes` of encoded changes.
    pub fn new(epoch: u64, max_bytes: usize) -> Self {
        Self { epoch, seq: 0, backlog: VecDeque::new(), bytes: 0, max_bytes }
    }

    /// Seq of the last change; 0 before the first.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Numbers and keeps changes.
    pub fn push(&mut self, changes: Vec<LedgerEvent>) {
        self.seq += 1;
        let event = NodeEvent::Changes(changes);
        let frame = encode(&Numbered { epoch: self.epoch, seq: self.seq, event });
        self.bytes += frame.len();
        self.backlog.push_back(frame);
        while self.bytes > self.max_bytes {
            let Some(oldest) = self.backlog.pop_front() else { break };
            self.bytes -= oldest.len();
        }
    }

    /// The changes after `seq`, encoded; `None` when the backlog does not reach back that far (or `seq` is not
    /// of this incarnation).
    pub fn since(&self, seq: u64) -> Option<Vec<Bytes>> {
        let missing = usize::try_from(self.seq.checked_sub(seq)?).ok()?;
        let from = self.backlog.len().checked_sub(missing)?;
        Some(self.backlog.range(from..).cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(id: &str) -> Vec<LedgerEvent> {
        vec![LedgerEvent::LeaseEnded { request_id: id.into() }]
    }

    #[test]
    fn a_reader_resumes_within_the_backlog_only() {
        let one = encode(&Numbered { epoch: 1, seq: 1, event: NodeEvent::Changes(ended("a")) }).len();
        let mut log = Log::new(1, 2 * one);
        assert_eq!(log.since(0), Some(vec![]));
        for id in ["a", "b", "c"] {
            log.push(ended(id));
        }
        assert_eq!(log.since(3), Some(vec![]));
        assert_eq!(log.since(1).map(|f| f.len()), Some(2));
        assert_eq!(log.since(0), None);
        assert_eq!(log.since(4), None);
    }
}
