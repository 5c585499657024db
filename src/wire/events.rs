//! The event stream: what a node holds, as (epoch, seq)-numbered changes after a snapshot.

use crate::core::ledger::{LedgerEvent, LoadReport};
use crate::core::types::{BlockHash, SessionId, Tokens};

/// One numbered message of the stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Numbered {
    /// Incarnation of the node.
    pub epoch: u64,
    /// 1, 2, 3 … within the epoch. A snapshot carries the seq of the last change it contains.
    pub seq: u64,
    /// What happened.
    pub event: NodeEvent,
}

/// What a node reports.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeEvent {
    /// Everything it holds: the first message of every stream that cannot go on where the reader was.
    Snapshot(Snapshot),
    /// Changes of its ledger, in order.
    Changes(Vec<LedgerEvent>),
    /// Its load; sent after changes and at least once a second.
    Load(LoadReport),
}

/// Everything a node holds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    /// Sessions with their tokens and chains. Blocks of no session are not kept.
    pub sessions: Vec<(SessionId, Tokens, Vec<BlockHash>)>,
    /// Load at that moment.
    pub load: LoadReport,
}
