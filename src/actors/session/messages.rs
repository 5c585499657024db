//! What a session actor is told, and what it shows of itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::super::api::{Refusal, TurnRequest, TurnResult};
use super::super::book::Record;
use super::super::gather::Fleet;
use super::super::grant::Grant;
use super::super::reply::Reply;
use super::super::rpc::Admission;
use super::super::shared::Shared;
use super::super::worker::Outcome;
use crate::core::turn::Failure;
use crate::core::types::{SessionId, Tokens, WorkerId};
use crate::wire::plan::Report;

/// Names a turn within one router.
pub type TurnKey = u64;

/// The answer to a turn: how to execute it, or why not.
pub type Placed = Result<Grant, Refusal>;

/// Messages of a session actor.
pub enum SessionMsg {
    /// A turn arrived.
    Begin {
        /// Names the turn from now on; unique over the router.
        turn: TurnKey,
        /// The turn.
        request: Box<TurnRequest>,
        /// Where it goes.
        reply: Reply<Placed>,
    },
    /// Something a turn asked for came back.
    Event {
        /// The turn.
        turn: TurnKey,
        /// What came back.
        event: TurnEvent,
    },
    /// A granted turn failed before any byte reached the client: place it again.
    Failed {
        /// The turn.
        turn: TurnKey,
        /// Why.
        fault: Failure,
        /// The new placement.
        reply: Reply<Placed>,
    },
    /// A granted turn's P has done its part.
    PrefillDone(TurnKey),
    /// What a granted turn's D did for it.
    Reported(TurnKey, Report),
    /// A granted turn is complete.
    Finished(TurnKey, TurnResult),
    /// A granted turn broke off in the middle of its answer, or its D answered with an error of its own.
    Broken(TurnKey, Outcome),
    /// A turn's client is gone, or the turn failed beyond repair.
    Cancelled(TurnKey),
    /// Look whether this session rests.
    Idle,
    /// Observable state.
    Observe(Reply<SessionView>),
    /// Panics in its handler.
    #[cfg(test)]
    Panic,
}

/// An answer to a turn's question. `None`: the actor asked is gone.
pub enum TurnEvent {
    /// To `Gather`.
    Fleet(Option<Fleet>),
    /// To `Admit`.
    Admission(Option<Admission>),
    /// To `PickPrefill`.
    Prefill(Option<Option<WorkerId>>),
    /// To `PickFallback`.
    Fallback(Option<Option<(Option<WorkerId>, WorkerId)>>),
    /// From the wait queue.
    RoomFreed,
    /// From the wait queue.
    WaitOver,
}

/// What a session actor shows of itself.
#[derive(Debug, Clone, serde::Serialize)]
pub struct SessionView {
    /// `s(r)`, without its scope.
    pub session: String,
    /// `pin[s]`.
    pub pin: Option<String>,
    /// `rejects[s, ·]`.
    pub rejects: HashMap<String, u32>,
    /// Turns being placed or executed.
    pub running: usize,
    /// Turns completed.
    pub turns: u64,
    /// Times its pin went to another D.
    pub moves: u64,
    /// Length of the last prompt, in tokens.
    pub input_len: Tokens,
    /// Seconds since the last turn began or ended.
    pub idle_s: u64,
}

/// What a session actor needs.
pub struct SessionArgs {
    /// `s(r)`.
    pub id: SessionId,
    /// What all actors share.
    pub shared: Arc<Shared>,
    /// What was kept of it, if it rested.
    pub record: Option<Record>,
    /// Turns in the mailbox.
    pub waiting: Arc<AtomicU32>,
    /// The actor of one side request: it stops with its turn and is in no book.
    pub one_shot: bool,
}
